"""`--install-completion` and `--show-completion`, for the shell that is named or the one that the command runs in."""

from __future__ import annotations

from collections.abc import Sequence

from cocktail.cli.output import Output
from cocktail.errors import CocktailError, UsageError

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_INSTALL, _SHOW = "--install-completion", "--show-completion"
_PROGRAM, _VARIABLE = "cocktail", "_COCKTAIL_COMPLETE"
# zsh reads the file when completion is first asked for, and would then only define the function.
_ZSH_FIRST = '\n[[ $zsh_eval_context[-1] == loadautofunc ]] && _cocktail_completion "$@"\n'


def answer_completion(arguments: Sequence[str]) -> bool:
    """Shows or installs completion if that is what a command line asks for; Typer itself takes no shell's name.

    Raises:
        UsageError: There is no completion for the shell, or it is not known which it is.
        CocktailError: The shell's files cannot be written.
    """
    words = [part for word in arguments[:1] for part in word.split("=", 1)] + list(arguments[1:])
    if not words or words[0] not in (_INSTALL, _SHOW) or len(words) > 2:
        return False
    # Typer's own, which the options that its help names call as well.
    from typer._completion_shared import _get_shell_name, get_completion_script, install

    shell = words[1] if len(words) == 2 else _get_shell_name()
    if shell not in SHELLS:
        found = f"There is no completion for {shell!r}." if shell else "It is not known which shell this runs in."
        raise UsageError(found, f"Name one: cocktail {words[0]} bash, or {', '.join(SHELLS[1:])}.")
    if words[0] == _SHOW:
        script = get_completion_script(prog_name=_PROGRAM, complete_var=_VARIABLE, shell=shell)
        Output().write(script.rstrip("\n") + "\n")
        return True
    try:
        _, path = install(shell=shell, prog_name=_PROGRAM, complete_var=_VARIABLE)
        if shell == "zsh":
            with path.open("a", encoding="utf-8") as file:
                file.write(_ZSH_FIRST)
    except OSError as error:
        raise CocktailError(f"{error.filename or shell} cannot be written: {error.strerror}.") from error
    Output().write(f"{shell} completion is in {path}; it takes effect in a new terminal.\n")
    return True
