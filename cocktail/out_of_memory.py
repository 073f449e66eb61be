"""Running out of memory, however it shows: on a card, an emulated device, or this machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from cocktail.errors import BudgetError

_MAX_REASON_CHARS = 200
# Of PyTorch's CPU allocator, and of the system where a library maps a file.
_WORDS = ("can't allocate memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory for something."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in _WORDS) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns running out of memory into a BudgetError that says how much was asked for, where that is known."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _budget_error(error) from error


def _budget_error(error: Exception) -> BudgetError:
    from cocktail.offload.ledger import LedgerOutOfMemoryError

    # PyTorch's advice to developers begins with the third sentence.
    reason = ". ".join(str(error).strip().partition("\n")[0].split(". ")[:2])[:_MAX_REASON_CHARS].rstrip(".")
    if isinstance(error, LedgerOutOfMemoryError):
        return BudgetError(
            f"The run took more memory than was planned: {reason}.", "Give a larger --vram; the plan was wrong."
        )
    return BudgetError(
        f"Memory ran out{f' ({reason})' if reason else ''}; other programs may have taken some since the run was "
        "planned.",
        "Close other programs, read fewer pages (--pages), or use a smaller model (-m).",
    )
