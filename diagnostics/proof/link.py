"""A link of the chain that a verdict consists of, and how its texts are put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["proved", "refuted", "unknown", "consistent", "not applicable"]


@dataclass(frozen=True)
class Link:
    """One link of the chain. Where it is refuted or unknown, `reason` says what is wrong and what to do, in a sentence.

    "consistent" is the best that a link can be that rests on a log alone. Raises TypeError for a text that is none: the
    claims and sights come from documents that others wrote.
    """

    name: str
    claimed: str
    seen: str
    where: str
    state: State
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("claimed", "seen", "where"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} of {self.name!r} is {getattr(self, name)!r}, not a text")


def dicts(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list of a document; none where the document has something else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def listed(items: Iterable[object]) -> str:
    """Items for a sentence, separated by commas."""
    return ", ".join(str(item) for item in items)


def text_of(value: Any) -> str:
    """A value for a sentence."""
    return "none" if value is None else str(value)


def file_name(module: str) -> str:
    """The name of a module's file, for a sentence."""
    return module.rpartition(".")[2] + ".py"
