"""The command line: Typer commands, Rich rendering, JSON output, exit codes."""
