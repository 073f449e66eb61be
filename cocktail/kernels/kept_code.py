"""Functions that numba compiles once for each signature and processor, and whose code is kept on disk.

numba's own cache fails where a file is damaged or cannot be written, and it names its folder after the place of the
sources. Here every piece of code is a file of its own, under the name of what it was compiled from.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from cocktail.kernels import compiled

_only_loading: ContextVar[bool] = ContextVar("only_loading", default=False)


class NotKeptError(Exception):
    """Code that would have to be compiled."""


@contextmanager
def only_loading() -> Iterator[None]:
    """Meanwhile a function whose code is not on disk raises NotKeptError and is not compiled."""
    token = _only_loading.set(True)
    try:
        yield
    finally:
        _only_loading.reset(token)


def kept_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` whose code is kept on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher._cache = _KeptCode(function)
        return dispatcher

    return decorate


def kept_cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.cfunc` whose code is kept on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        code: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
        code._cache = _KeptCode(function)
        code.compile()
        return code

    return decorate


class _Reduction(CompileResultCacheImpl):
    """How numba turns compiled code into what can be pickled and back; not where it is kept."""

    def __init__(self) -> None:
        pass


class _KeptCode(FunctionCache):
    """A function's code in the folder that is the current one when it is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_func = function  # read by _index_key
        self._impl = _Reduction()
        self._label = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @property
    def cache_path(self) -> str:
        return str(compiled.code_folder().path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        name, folder = self._name_of(sig, target_context.codegen()), compiled.code_folder()
        payload = folder.load(name)
        if payload is not None:
            try:
                return self._impl.rebuild(target_context, pickle.loads(payload))
            # Written by another build of the same numba: that raises anything, and would in every later run.
            except Exception:
                folder.damaged = True
        if _only_loading.get():
            raise NotKeptError(name)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._impl.check_cachable(data):
            compiled.code_folder().save(self._name_of(sig, data.codegen), dumps(self._impl.reduce(data)))

    def _name_of(self, sig: Any, codegen: Any) -> str:
        # Types, processor, and hashes of the function's byte code and of the cells of a closure.
        key = self._index_key(sig, codegen)
        return f"{self._label}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"
