"""One check of a host, and the outcome of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

PASS, WARN, FAIL, UNKNOWN, NOT_APPLICABLE = "pass", "warn", "fail", "unknown", "not applicable"
STATES = (FAIL, UNKNOWN, WARN, PASS, NOT_APPLICABLE)
"""The worst first."""


@dataclass(frozen=True)
class Check:
    """What was found on one question, and what to do about it (empty where nothing is to be done).

    ``unknown`` means that the facts could not be read: it is never a success.
    """

    name: str
    state: str
    found: str
    todo: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


def passed(name: str, found: object) -> Check:
    return Check(name, PASS, str(found))


def judged(name: str, good: bool, found: object, todo: str, otherwise: str = FAIL) -> Check:
    """A check that passes when `good`, and is `otherwise` (fail or warn) with what to do when it is not."""
    return passed(name, found) if good else Check(name, otherwise, str(found), todo)


def unknown(name: str, why: object, todo: str) -> Check:
    return Check(name, UNKNOWN, f"not known: {why}", todo)


def not_applicable(name: str, why: str) -> Check:
    return Check(name, NOT_APPLICABLE, why)


def accept(checks: Iterable[Check], accepted: Sequence[str]) -> list[Check]:
    """The checks, those that the inventory accepts as they are with warnings in place of failures."""
    return [
        Check(check.name, WARN, f"{check.found} (accepted by preflight_accepted)", check.todo)
        if check.name in accepted and check.state in (FAIL, UNKNOWN)
        else check
        for check in checks
    ]


def overall(checks: Iterable[Check]) -> str:
    """fail, unknown, warn or pass: the worst state of all."""
    return min((check.state for check in checks if check.state != NOT_APPLICABLE), key=STATES.index, default=UNKNOWN)


def merged(checks: Iterable[Check]) -> list[Check]:
    """The checks, neighbours with one outcome as one: without a driver a dozen say the same."""
    return [
        replace(same[0], name=", ".join(each.name for each in same))
        for _, group in groupby(checks, key=lambda each: (each.state, each.found, each.todo))
        if (same := list(group))
    ]


def lines(checks: Iterable[Check]) -> list[str]:
    """One line a check, for people, with what to do."""
    return [
        f"{'-' if each.state == NOT_APPLICABLE else each.state:<8}{each.name}: {each.found}"
        + (f" -> {each.todo}" if each.todo else "")
        for each in merged(checks)
    ]
