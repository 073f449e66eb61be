"""The memory of an emulated device: every tensor made on it is counted, up to a limit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LedgerOutOfMemoryError(torch.OutOfMemoryError):
    """An emulated device holds less than a run asked of it."""


class Ledger(TorchDispatchMode):
    """While it is entered, the tensors that this thread makes count as an accelerator's until they are freed.

    Views count nothing. What libraries take inside an operation is not seen: a card's take other buffers. Sizes are not
    rounded and there are no gaps between tensors, as there are in a card's memory. What a real run would hold in host
    memory is made inside `host()`.

    Args:
        limit_bytes: None: no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self.on_host = False
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_composite(func):
            # Under inference mode operations that consist of others come whole; what they make within must be seen.
            with self:
                output = func.decompose(*args, **(kwargs or {}))
            if output is not NotImplemented:
                return output
        output = func(*args, **(kwargs or {}))
        if not self.on_host:
            if isinstance(output, torch.Tensor):
                if _makes_new(func)[0]:
                    self._count(output)
            elif isinstance(output, tuple | list):
                for item, new in zip(output, _makes_new(func), strict=False):
                    if new and isinstance(item, torch.Tensor):
                        self._count(item)
        return output

    @contextmanager
    def host(self, on_host: bool = True) -> Iterator[None]:
        """Tensors made inside are held in host memory, or on the device again if `on_host` is False."""
        before, self.on_host = self.on_host, on_host
        try:
            yield
        finally:
            self.on_host = before

    def restart_peak(self) -> None:
        """Counts the peak from what is held now."""
        self._recount()
        self.peak_bytes = self.held_bytes

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or address in self._storages:
            return
        self._storages[address] = weakref.ref(storage, self._forget(address)), nbytes
        self.held_bytes += nbytes
        if self.limit_bytes is not None and self.held_bytes > self.limit_bytes:
            self._recount()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.limit_bytes is not None and self.held_bytes > self.limit_bytes:
            raise LedgerOutOfMemoryError(
                f"the emulated device has {self.limit_bytes:,} bytes and {self.held_bytes:,} would be in use"
            )

    def _recount(self) -> None:
        """Forgets storages whose end went unnoticed: an interrupt that arrives while one is told of is lost."""
        self._storages = {address: kept for address, kept in self._storages.items() if kept[0]() is not None}
        self.held_bytes = sum(nbytes for _, nbytes in self._storages.values())

    def _forget(self, address: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            kept = self._storages.pop(address, None)
            self.held_bytes -= 0 if kept is None else kept[1]

        return forget


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def _makes_new(func: Any) -> tuple[bool, ...]:
    """Whether each output of an operation is a new tensor and no view or alias of an argument."""
    if func.name() == "aten::lift_fresh":
        return (True,)  # the tensor that torch.tensor made of Python numbers
    return tuple(result.alias_info is None for result in func._schema.returns)
