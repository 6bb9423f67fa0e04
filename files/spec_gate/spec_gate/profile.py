"""A host's profile: what a step costs there with speculation and without, by batch and context. Pure Python.

The ratio of the two costs is the break-even: the accepted tokens per verify step, the bonus token included, above which
speculation pays. `make` gives the document that calibration stores, `load` reads it again, and `mismatch` tells why it
is not for this server.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = "specgate.profile/1"
KEY_FIELDS = ("host", "devices", "driver", "sglang_version", "series", "model", "draft", "tp_size", "speculative")
SHAPE_FIELDS = ("num_steps", "eagle_topk", "num_draft_tokens")
RECOMMENDED_FIELDS = ("threshold", "low_mark", "kv_token_threshold")

# In which `break_even` and the ratio of the costs beside it may differ: it is rounded.
_ROUNDING = 0.001


class ProfileError(ValueError):
    """The profile cannot be used. The message is one sentence: what was found, what is allowed and what to do."""


class Cell(NamedTuple):
    """One measured point: running requests, KV tokens of each, and the seconds that a decode step takes there."""

    batch: int
    context: int
    open_step_s: float
    closed_step_s: float

    @property
    def break_even(self) -> float:
        """Accepted tokens per verify step above which speculation pays here."""
        return self.open_step_s / self.closed_step_s


class Profile:
    """The measured cells of one server on one host, and the break-even between them.

    id: 12 hexadecimal digits of the SHA-256 of the document's content. key: what the profile was measured on (see
    `mismatch`). made: UTC, ISO 8601. Batches and contexts need no full grid: a long context may not fit a large batch.
    """

    def __init__(self, id: str, made: str, key: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        self.id = id
        self.made = made
        self.key = key
        self.cells = tuple(sorted(cells))
        self._batches = sorted({cell.batch for cell in cells})
        rows = [[cell for cell in self.cells if cell.batch == batch] for batch in self._batches]
        self._rows = [([cell.context for cell in row], row) for row in rows]

    @property
    def most_accepted(self) -> int:
        """The most tokens that a verify step can accept for a request: one for each drafting step, and the bonus."""
        shape = self.key["speculative"]
        return min(int(shape["num_steps"]) + 1, int(shape["num_draft_tokens"]))

    def break_even(self, batch: int, context: float) -> float:
        """The break-even at `batch` running requests of `context` KV tokens each.

        Between cells both costs are interpolated linearly, in the context first and then in the batch: a step's cost
        grows in proportion to both, the ratio of two such costs does not. Beyond the outermost cells the outermost
        holds.
        """
        high = bisect.bisect_left(self._batches, batch)
        if high == 0 or high == len(self._batches):
            open_s, closed_s = self._costs(min(high, len(self._batches) - 1), context)
            return open_s / closed_s
        low_open, low_closed = self._costs(high - 1, context)
        high_open, high_closed = self._costs(high, context)
        low_batch, high_batch = self._batches[high - 1], self._batches[high]
        part = (batch - low_batch) / (high_batch - low_batch)
        open_s = low_open + part * (high_open - low_open)
        return open_s / (low_closed + part * (high_closed - low_closed))

    def _costs(self, row: int, context: float) -> tuple[float, float]:
        """Seconds of an open and of a closed step in one row of cells of equal batch."""
        contexts, cells = self._rows[row]
        high = bisect.bisect_left(contexts, context)
        if high == 0 or high == len(contexts):
            cell = cells[min(high, len(contexts) - 1)]
            return cell.open_step_s, cell.closed_step_s
        below, above = cells[high - 1], cells[high]
        part = (context - below.context) / (above.context - below.context)
        return (
            below.open_step_s + part * (above.open_step_s - below.open_step_s),
            below.closed_step_s + part * (above.closed_step_s - below.closed_step_s),
        )


def content_id(document: Mapping[str, Any]) -> str:
    """The id of a document: 12 hexadecimal digits of the SHA-256 of all of it but the id."""
    content = {name: value for name, value in document.items() if name != "id"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def make(
    *,
    made: str,
    key: Mapping[str, Any],
    cells: Sequence[Cell],
    acceptance_seen: float | None,
    recommended: Mapping[str, int | None],
    why: str,
) -> dict[str, Any]:
    """The document `specgate.profile/1`, its id and its break-evens filled in. Raises ProfileError if it is not sound.

    made: UTC, ISO 8601. key: KEY_FIELDS, as the gate names them in /server_info (`profile_key`).
    acceptance_seen: accepted tokens per verify step during the calibration; None when there was none.
    recommended: RECOMMENDED_FIELDS; None where none is recommended. why: that, in a sentence for people.
    """
    document = {
        "schema": SCHEMA,
        "made": made,
        "key": dict(key),
        "cells": [cell._asdict() | {"break_even": round(cell.break_even, 4)} for cell in sorted(cells)],
        "acceptance_seen": acceptance_seen,
        "recommended": dict(recommended),
        "why": why,
    }
    document["id"] = content_id(document)
    parse(document)
    return document


def load(path: str | Path) -> Profile:
    """The profile in a file. Raises ProfileError when it cannot be read or is not sound."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} cannot be read ({error}): give the path of a profile") from None
    except ValueError as error:
        raise ProfileError(f"{path} is no JSON ({error}): give the path of a profile, or calibrate again") from None
    try:
        return parse(document)
    except ProfileError as error:
        raise ProfileError(f"{path} {error}") from None


def parse(document: object) -> Profile:
    """The profile that a document describes. Raises ProfileError, worded to follow the document's name."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise ProfileError(f"has the schema {schema!r}, allowed is {SCHEMA!r}: calibrate again with this version")
    problem = _problem(document)
    if problem is not None:
        raise ProfileError(f"{problem}: calibrate again")
    if document["id"] != content_id(document):
        raise ProfileError(
            f"says that its id is {document['id']}, its content has {content_id(document)}: "
            "it was changed after it was made; calibrate again"
        )
    cells = [Cell(**{name: cell[name] for name in Cell._fields}) for cell in document["cells"]]
    return Profile(document["id"], document["made"], document["key"], cells)


def mismatch(key: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """How a profile's key differs from that of the present server, in words; None when they are the same."""
    differing = [name for name in KEY_FIELDS if key.get(name) != present.get(name)]
    if not differing:
        return None
    return "; ".join(f"{name} was {_text(key.get(name))} and is {_text(present.get(name))}" for name in differing)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _problem(document: Mapping[str, Any]) -> str | None:
    """What is missing in a document or has a value that is not allowed; None when it is sound."""
    for name in ("id", "made", "why"):
        if not isinstance(document.get(name), str):
            return f"has no {name}"
    key = document.get("key")
    if not isinstance(key, dict) or any(name not in key for name in KEY_FIELDS):
        return f"has no key of {', '.join(KEY_FIELDS)}"
    shape = key["speculative"]
    if not isinstance(shape, dict) or not all(_is_count(shape.get(name)) for name in SHAPE_FIELDS):
        return f"has no speculative shape of {', '.join(SHAPE_FIELDS)}"
    recommended = document.get("recommended")
    if not isinstance(recommended, dict) or any(
        recommended.get(name, -1) is not None and not _is_count(recommended.get(name, -1))
        for name in RECOMMENDED_FIELDS
    ):
        return f"recommends no {', '.join(RECOMMENDED_FIELDS)}, each an integer of 0 or more or null"
    seen = document.get("acceptance_seen", -1)
    if seen is not None and not (_is_positive(seen) and seen >= 1):
        return f"has seen the acceptance {seen!r}, allowed is 1 or more, or null"
    cells = document.get("cells")
    if not isinstance(cells, list) or not cells:
        return "has no cells"
    for cell in cells:
        if (problem := _cell_problem(cell)) is not None:
            return f"has the cell {json.dumps(cell)}, {problem}"
    if len({(cell["batch"], cell["context"]) for cell in cells}) < len(cells):
        return "has two cells of the same batch and context"
    return None


def _cell_problem(cell: object) -> str | None:
    if not isinstance(cell, dict):
        return "which is no object"
    if not (_is_count(cell.get("batch")) and cell["batch"] and _is_count(cell.get("context"))):
        return "whose batch is not 1 or more or whose context is not 0 or more"
    if not all(_is_positive(cell.get(name)) for name in ("open_step_s", "closed_step_s", "break_even")):
        return "whose step times and break-even are not all above 0"
    if abs(cell["break_even"] - cell["open_step_s"] / cell["closed_step_s"]) > _ROUNDING:
        return "whose break-even is not open_step_s / closed_step_s"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
