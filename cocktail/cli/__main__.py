"""The process `cocktail`: everything is imported where Ctrl-C is already caught."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from cocktail.cli import signals


def main() -> NoReturn:
    """Runs the command line of this process and leaves with the documented exit code."""
    try:
        signals.catch()
        from cocktail.cli.app import run

        code = run(sys.argv[1:])
    except BaseException:
        # A library that is interrupted while it loads may raise anything.
        if not signals.received:
            raise
        signals.ignore()
        code = signals.exit_code()
        with suppress(OSError, ValueError):
            print("error: interrupted", file=sys.stderr, flush=True)
    # The interpreter's own way out takes time, in which a second Ctrl-C would print a traceback.
    signals.ignore()
    os._exit(code)


if __name__ == "__main__":
    main()
