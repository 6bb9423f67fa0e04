"""From what a step costs to when speculation pays: thresholds to recommend, and the profile of the host.

With speculation a step yields as many tokens as are accepted, without it one; so speculation pays where the acceptance
exceeds the ratio of the two steps' costs, the break-even. ``derive`` is pure; ``calibrate`` measures and derives.
docs/calibration.md tells the method.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from diagnostics.load import fit
from diagnostics.prompts import Prompt
from diagnostics.server import Endpoint, ServerError, api_client, gate_given_back, server_info
from diagnostics.sweep import (
    MOST_UNCERTAIN,
    Cell,
    Limits,
    Sweep,
    SweepError,
    default_batches,
    default_contexts,
    read_limits,
    stretched,
)
from diagnostics.traffic import TokenPrompt

# The server reads the profile with the same code, and so interpolates as it does here.
sys.path.append(str(Path(__file__).resolve().parent.parent / "files" / "spec_gate"))
from spec_gate import profile as profiles

SCHEMA = "specgate.calibration/1"
LEAST_MARGIN = 0.03  # the gate opens again where speculation gains this much at least
LEAST_GAIN = 0.01  # what a second trigger must save of the time, on average
ACCEPTANCE_CONCURRENCY = 4
ANSWER_WAIT_S = 30.0


class NoRecommendation(Exception):
    """The measurements do not tell when speculation pays; the message says why."""


@dataclass(frozen=True)
class Recommendation:
    """When the gate should be closed, and why. ``threshold`` 0: never; the other two are then 0 and None.

    ``low_mark``: it opens below so many running requests. ``kv_token_threshold``: it closes at so many resident KV
    tokens as well; 0: no such trigger.
    """

    threshold: int
    low_mark: int | None
    kv_token_threshold: int
    why: str

    def settings(self) -> dict[str, int | None]:
        """The fields that a profile's ``recommended`` has."""
        return {
            "threshold": self.threshold,
            "low_mark": self.low_mark,
            "kv_token_threshold": self.kv_token_threshold,
        }


def usable(cells: Sequence[Cell]) -> tuple[list[Cell], list[tuple[Cell, str]]]:
    """Split *cells* into those that tell a cost and the others, each with the reason."""
    kept: list[Cell] = []
    left_out: list[tuple[Cell, str]] = []
    for cell in cells:
        if cell.left_out is not None:
            left_out.append((cell, cell.left_out))
        elif cell.uncertainty > MOST_UNCERTAIN:
            noise = f"its break-even is uncertain by {cell.uncertainty:.0%}, more than {MOST_UNCERTAIN:.0%}"
            left_out.append((cell, noise))
        else:
            kept.append(cell)
    return kept, left_out


def profile_cell(cell: Cell) -> profiles.Cell:
    """The cell as a profile has it. The closed step's cost is the median; the open one's follows the pairs' ratio."""
    closed = statistics.median(cell.closed_s)
    return profiles.Cell(cell.batch, cell.context, round(closed * statistics.median(cell.ratios), 9), round(closed, 9))


def recommend(cells: Sequence[Cell], acceptance: float, most_requests: int) -> Recommendation:
    """Thresholds under which the gate's decisions lose least at *acceptance*, over all that *cells* cover.

    *cells* are usable ones; between them the costs are interpolated as the gate does. What a wrong decision loses is
    the ratio of the two times per token, and each doubling of the batch weighs the same. *most_requests*: those that
    the server runs at once. Raises NoRecommendation.
    """
    if len({cell.batch for cell in cells}) < 2:
        raise NoRecommendation(f"{len(cells)} cells tell a cost; at least two of different batches are needed")
    if all(abs(math.log(acceptance / statistics.median(cell.ratios))) <= 2 * cell.uncertainty for cell in cells):
        raise NoRecommendation(
            f"at an acceptance of {acceptance:.2f} no cell tells the two modes apart by more than its noise"
        )
    surface = _Surface(cells)
    contexts = sorted({cell.context for cell in cells})
    crossings = {context: surface.threshold(acceptance, [context]) for context in contexts}
    thresholds = {*crossings.values(), surface.threshold(acceptance, contexts)}
    loss, threshold = min((surface.loss(acceptance, contexts, number), number) for number in thresholds)
    kv_tokens = 0
    for number in thresholds:
        for context in contexts:
            candidate = crossings[context] * context
            with_it = surface.loss(acceptance, contexts, number, candidate)
            # A second trigger must earn its place.
            if crossings[context] <= surface.last(context) and with_it < loss - LEAST_GAIN * surface.weight(contexts):
                loss, threshold, kv_tokens = with_it, number, candidate
    if threshold > surface.largest and kv_tokens:
        threshold = most_requests
    why = _why(surface, acceptance, contexts, threshold, kv_tokens)
    if threshold > surface.largest:
        return Recommendation(0, None, 0, why)
    margin = max(LEAST_MARGIN, statistics.median(cell.uncertainty for cell in cells))
    low_mark = min(threshold, surface.threshold(acceptance / (1 + margin), contexts))
    return Recommendation(threshold, low_mark, kv_tokens, why)


class _Surface:
    """The break-even over batch and context, as the gate interpolates it, at every number of requests measured."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        profile = profiles.Profile("", "", {}, [profile_cell(cell) for cell in cells])
        self._last = {cell.context: max(c.batch for c in cells if c.context == cell.context) for cell in cells}
        self._break_evens = {
            (batch, context): profile.break_even(batch, context)
            for context, last in self._last.items()
            for batch in range(1, last + 1)
        }
        self.largest = max(self._last.values())

    def last(self, context: int) -> int:
        """The largest batch measured at *context*."""
        return self._last[context]

    def break_even(self, batch: int, context: int) -> float:
        return self._break_evens[batch, context]

    def weight(self, contexts: Sequence[int]) -> float:
        """What a loss of 1 everywhere would sum up to."""
        return sum(1 / batch for context in contexts for batch in range(1, self.last(context) + 1))

    def loss(self, acceptance: float, contexts: Sequence[int], threshold: int, kv_tokens: int = 0) -> float:
        """What the decisions of a gate with these thresholds lose against the better mode, summed."""
        total = 0.0
        for context in contexts:
            for batch in range(1, self.last(context) + 1):
                gain = math.log(acceptance / self.break_even(batch, context))  # of speculation
                closed = batch >= threshold or (kv_tokens and batch * context >= kv_tokens)
                total += max(0.0, gain if closed else -gain) / batch
        return round(total, 9)

    def threshold(self, acceptance: float, contexts: Sequence[int]) -> int:
        """The number of requests from which on closing loses least; one more than the largest batch for never."""
        last = max(self.last(context) for context in contexts)
        best = min(range(1, last + 2), key=lambda number: (self.loss(acceptance, contexts, number), number))
        return best if best <= last else self.largest + 1


def _why(surface: _Surface, acceptance: float, contexts: Sequence[int], threshold: int, kv_tokens: int) -> str:
    first, shortest = contexts[0], f"at {contexts[0]} tokens of context"
    low, high = surface.break_even(1, first), surface.break_even(surface.last(first), first)
    ends = (
        f"{shortest} a step must yield {low:.2f} tokens to pay at 1 request, {high:.2f} at {surface.last(first)}; "
        f"the prompts gave {acceptance:.2f}"
    )
    if threshold > surface.largest and not kv_tokens:
        return f"speculation always wins up to the {surface.largest} requests measured: the gate never closes; {ends}"
    if threshold == 1:
        return f"speculation always loses: the gate is closed from 1 request on; {ends}"
    also = f" or {kv_tokens} KV tokens" if kv_tokens else ""
    return f"speculation pays below {threshold} requests{also}: {ends}"


async def calibrate(endpoint: Endpoint, prompts: Sequence[Prompt], *, budget: float, **options: Any) -> dict[str, Any]:
    """Calibrate the server at *endpoint*; *options* and the document are those of ``calibrate_server``."""
    try:
        # A batch's answer is silent until the batch is aborted.
        async with api_client(endpoint, budget + ANSWER_WAIT_S) as client:
            fitting, skipped = await fit(client, (await server_info(client)).model, prompts)
            if not fitting:
                raise ServerError("no prompt fits into the model's context")
            return {"skipped_prompts": skipped} | await calibrate_server(client, fitting, budget=budget, **options)
    except ServerError as error:
        return {"ok": False, "reasons": [str(error)]}
    except asyncio.CancelledError:
        return {"ok": False, "reasons": ["interrupted before anything was measured"]}


async def calibrate_server(
    client: httpx.AsyncClient,
    prompts: Sequence[TokenPrompt],
    *,
    budget: float,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> dict[str, Any]:
    """Measure the server behind *client* within *budget* seconds; the document is ``ok`` when it has a profile.

    *prompts* are those whose acceptance counts. The document's fields are in docs/diagnostics.md. Never raises
    for a server; when it is cancelled, it gives the gate back and returns as well.
    """
    began = time.monotonic()
    document: dict[str, Any] = {"budget_s": budget, "acceptance": None, "cells": [], "left_out": []}
    document |= {"recommended": None, "why": None, "profile": None}
    reasons: list[str] = []
    sweep = Sweep(client, on_progress)
    try:
        info = await sweep.begin()
        key, limits = read_key(info), read_limits(info)
        document |= {"model": info["served_model_name"], "sglang_version": info["version"]}
        grid = plan(limits, batches, contexts)
        if not grid:
            raise SweepError(f"the server holds none of the batches and contexts that were asked for: {limits}")
        async with gate_given_back(client):
            users = min(ACCEPTANCE_CONCURRENCY, limits.requests)
            seen = await sweep.acceptance(prompts, users, timeout=budget)
            document["acceptance"] = seen
            cells = await sweep.cells(grid, stretched(prompts), limits, began + budget)
        kept, left_out = usable(cells)
        document["cells"] = [_described(cell) for cell in kept]
        document["left_out"] = [{"batch": c.batch, "context": c.context, "reason": why} for c, why in left_out]
        found = recommend(kept, seen["all"], limits.requests)
        document |= {"recommended": found.settings(), "why": found.why}
        document["profile"] = profiles.make(
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            key=key,
            cells=[profile_cell(cell) for cell in kept],
            acceptance_seen=seen["all"],
            recommended=found.settings(),
            why=found.why,
        )
    except NoRecommendation as error:
        reasons.append(f"no recommendation: {error}")
    except (SweepError, ServerError, profiles.ProfileError) as error:
        reasons.append(str(error))
    except asyncio.CancelledError:
        reasons.append("interrupted; the gate is as it was before")
    elapsed = round(time.monotonic() - began, 1)
    return document | {"elapsed_s": elapsed, "ok": not reasons, "reasons": reasons}


def read_key(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile of this server is bound to; raises ServerError for a server that does not tell."""
    key = info["internal_states"][0]["spec_gate"].get("profile_key")
    if not isinstance(key, dict):
        raise ServerError("the server does not tell what a profile is bound to: its release is older; deploy again")
    return key


def plan(
    limits: Limits, batches: Sequence[int] | None = None, contexts: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """The batches and contexts to measure: those, by default the usual ones, that the server can hold together."""
    return [
        (batch, context)
        for context in contexts or default_contexts(limits)
        for batch in batches or default_batches(limits)
        if limits.hold(batch, context)
    ]


def _described(cell: Cell) -> dict[str, Any]:
    made = profile_cell(cell)
    return made._asdict() | {
        "break_even": round(made.break_even, 4),
        "uncertainty": round(cell.uncertainty, 4),
        "pairs": len(cell.open_s),
    }
