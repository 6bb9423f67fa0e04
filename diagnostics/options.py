"""Values given on the command line: each is checked before any host is touched."""

from __future__ import annotations

import math
from typing import Any

from diagnostics.inventory import UsageError
from diagnostics.load import Plan


def integer(option: str, given: str, *, minimum: int) -> int:
    """Return *given* as an integer of at least *minimum*; raises UsageError."""
    try:
        value = int(given)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise UsageError(f"--{option} is {given!r}; allowed is an integer of at least {minimum}")
    return value


def integers(option: str, given: str, *, minimum: int) -> list[int]:
    """Return the integers of *given* (with commas between, each at least *minimum*), ascending; raises UsageError."""
    return sorted({integer(option, part.strip(), minimum=minimum) for part in given.split(",")})


def time_span(option: str, given: str) -> float:
    """Return the seconds that *given* names, such as 90, 90s, 5m or 1h; raises UsageError."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(given[-1:], 0)
    try:
        value = float(given[:-1]) * unit if unit else float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise UsageError(f"--{option} is {given!r}; allowed is a time of at least a second, such as 90s, 5m or 1h")
    return value


def positive(option: str, given: str | None, *, unit: str, maximum: float = math.inf) -> float | None:
    """Return *given* as a finite number above 0 and of at most *maximum* (in *unit*), or None; raises UsageError."""
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value <= maximum):
        most = f" and at most {maximum:g}" if math.isfinite(maximum) else ""
        raise UsageError(f"--{option} is {given!r}; allowed is a number of {unit} above 0{most}")
    return value


def load_plan(
    *,
    concurrency: str | None,
    rate: str | None,
    requests: str | None,
    duration: str | None,
    warm_up: str | None,
    **settings: Any,
) -> Plan:
    """Return what to send, defaults filled in: 10 requests in flight, five for each of them; raises UsageError."""
    if requests is not None and duration is not None:
        raise UsageError("--requests and --duration are both given; allowed is one of them")
    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency and --rate are both given; allowed is one of them")
    arrivals = positive("rate", rate, unit="requests a second")
    users = None if arrivals else integer("concurrency", concurrency or "10", minimum=1)
    default = 5 * users if users else math.ceil(30 * (arrivals or 0))
    count = integer("requests", requests, minimum=1) if requests is not None else default
    return Plan(
        concurrency=users,
        rate=arrivals,
        requests=None if duration is not None else count,
        duration=number("duration", duration, minimum=1, unit="seconds") if duration is not None else None,
        warm_up=integer("warm-up", warm_up, minimum=0) if warm_up is not None else users or 4,
        **settings,
    )


def number(option: str, given: str, *, minimum: float, unit: str) -> float:
    """Return *given* as a finite number of at least *minimum* (in *unit*); raises UsageError."""
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < minimum:
        raise UsageError(f"--{option} is {given!r}; allowed is a number of {unit} of at least {minimum:g}")
    return value
