"""Values given on the command line: each is checked before any host is touched."""

from __future__ import annotations

import math

from diagnostics.inventory import UsageError


def integer(option: str, given: str, *, minimum: int) -> int:
    """Return *given* as an integer of at least *minimum*; raises UsageError."""
    try:
        value = int(given)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise UsageError(f"--{option} is {given!r}; allowed is an integer of at least {minimum}")
    return value


def number(option: str, given: str, *, minimum: float, unit: str) -> float:
    """Return *given* as a finite number of at least *minimum* (in *unit*); raises UsageError."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < minimum:
        raise UsageError(f"--{option} is {given!r}; allowed is a number of {unit} of at least {minimum:g}")
    return value
