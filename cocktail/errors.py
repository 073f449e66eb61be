"""One tree of errors; every failure a user can cause is one of these."""

from __future__ import annotations


class CocktailError(Exception):
    """A failure that ends a command with one line, a hint and a documented exit code.

    Args:
        message: What failed, with the number found and the number needed where there is one.
        hint: What to try next, one sentence.
    """

    exit_code = 1
    code = "error"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CocktailError):
    """The options given cannot be combined or understood."""

    exit_code = 2
    code = "usage"


class DocumentError(CocktailError):
    """The document is missing, unreadable, damaged or of an unsupported format."""

    exit_code = 3
    code = "document"


class NoTextError(CocktailError):
    """The document holds no text, as a scan without a text layer does."""

    exit_code = 4
    code = "no_text"


class EncryptedError(CocktailError):
    """The document is encrypted and the password is missing or wrong."""

    exit_code = 5
    code = "encrypted"


class BudgetError(CocktailError):
    """The run does not fit the memory budget."""

    exit_code = 6
    code = "budget"


class ModelError(CocktailError):
    """The model is missing, damaged, unsupported, or may not be fetched offline."""

    exit_code = 7
    code = "model"


class BatchError(CocktailError):
    """Some questions of a batch could not be answered."""

    exit_code = 8
    code = "batch"
