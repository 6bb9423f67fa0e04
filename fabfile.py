"""Tasks for ``fab``: ``fab --list`` names them, ``fab --help TASK`` says what a task takes."""

from invoke.exceptions import Exit, ParseError
from invoke.parser import Parser, ParseResult

from diagnostics.tasks import USAGE, calibrate, compare, doctor, load, logs, report, smoke, status, verify_worker

__all__ = ["calibrate", "compare", "doctor", "load", "logs", "report", "smoke", "status", "verify_worker"]

_parse_argv = Parser.parse_argv


def _parse_argv_or_exit(parser: Parser, argv: list[str]) -> ParseResult:
    """Read the command line; one that cannot be read ends with the status of wrong use.

    Invoke's own status for it is 1, which it offers no way to change, and which would read as "refuted".
    """
    try:
        return _parse_argv(parser, argv)
    except ParseError as error:
        raise Exit(str(error), USAGE) from error


Parser.parse_argv = _parse_argv_or_exit  # type: ignore[method-assign, assignment]
