"""The load test of one host: warm-up, closed loop, and what the gate did meanwhile."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from diagnostics.gate_history import gate_history
from diagnostics.prompts import Prompt
from diagnostics.server import (
    Endpoint,
    Gate,
    ServerError,
    ServerInfo,
    api_client,
    context_length,
    server_info,
    tokenise,
)
from diagnostics.traffic import OUTCOMES, Result, Run, closed_loop, percentiles, summarise

REOPEN_WAIT_S = 10.0
POLL_S = 0.5


@dataclass(frozen=True)
class Plan:
    """What to send. One of ``requests`` and ``duration`` (seconds) is set; ``timeout`` (seconds) bounds a request."""

    concurrency: int
    requests: int | None
    duration: float | None
    warm_up: int
    seed: int
    timeout: float
    expect_transitions: bool


async def load(
    endpoint: Endpoint, plan: Plan, prompts: Sequence[Prompt], on_result: Callable[[Result], None] = lambda result: None
) -> dict[str, Any]:
    """Run *plan* at *endpoint*; the returned document says ``ok`` only if every request was answered.

    The gate, where the server has one, must be open again afterwards; with ``expect_transitions`` it must also have
    closed. *on_result* sees each measured result as it comes.
    """
    document: dict[str, Any] = {"plan": asdict(plan)}
    reasons: list[str] = []
    try:
        async with api_client(endpoint, plan.timeout) as client:
            await _measure(client, plan, prompts, on_result, document=document, reasons=reasons)
    except ServerError as error:
        reasons.append(str(error))
    return document | {"ok": not reasons, "reasons": reasons}


async def _measure(
    client: httpx.AsyncClient,
    plan: Plan,
    prompts: Sequence[Prompt],
    on_result: Callable[[Result], None],
    *,
    document: dict[str, Any],
    reasons: list[str],
) -> None:
    """Fill *document* and *reasons* as far as the server lets it; raises ServerError where it does not."""
    info = await server_info(client)
    fitting, skipped = await _fitting(client, info.model, prompts)
    document |= {"model": info.model, "sglang_version": info.version, "skipped_prompts": skipped}
    if not fitting:
        raise ServerError("no prompt fits into the model's context")
    send = functools.partial(
        closed_loop, client, info.model, fitting, concurrency=plan.concurrency, timeout=plan.timeout
    )
    warm = await send(requests=plan.warm_up)
    document["warm_up"] = summarise(warm.results)["requests"]
    reasons += _shortfalls(warm, " in the warm-up")
    before = await server_info(client)
    async with gate_history(client) as history:
        run = await send(requests=plan.requests, duration=plan.duration, seed=plan.seed, on_result=on_result)
    document |= summarise(run.results) | {"client_lag_s": percentiles(run.client_lags)}
    document["kinds"] = {
        kind: summarise([result for result in run.results if result.kind == kind])
        for kind in dict.fromkeys(prompt.kind for prompt in fitting)
    }
    reasons += _shortfalls(run, "")
    after, reopened = await _settled(client)
    document["accept_length_since_start"] = after.accept_length
    document["gate"], problems = gate_report(before.gate, after.gate, reopened, plan.expect_transitions)
    if document["gate"] is not None:
        document["gate"]["history"] = history.document()
    reasons += problems


async def _fitting(
    client: httpx.AsyncClient, model: str, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Split *prompts* into those that the model's context holds, answers included, and notes on the others."""
    limit = await context_length(client)
    fitting, skipped = [], []
    for prompt in prompts:
        tokens = len(await tokenise(client, model, prompt))
        if tokens + prompt.max_tokens < limit:
            fitting.append(prompt)
        else:
            skipped.append({"name": prompt.name, "tokens": tokens + prompt.max_tokens, "limit": limit})
    return fitting, skipped


def _shortfalls(run: Run, where: str) -> list[str]:
    counts = Counter(result.outcome for result in run.results)
    reasons = [
        f"{counts[outcome]} of {len(run.results)} requests {outcome}{where}"
        for outcome in OUTCOMES
        if outcome != "answered" and counts[outcome]
    ]
    return [*reasons, *([run.gave_up + where] if run.gave_up else [])]


async def _settled(client: httpx.AsyncClient) -> tuple[ServerInfo, float | None]:
    """Wait until the gate is not closed; return the server's state and the wait in seconds (None: still closed)."""
    began = time.monotonic()
    while True:
        info = await server_info(client)
        waited = time.monotonic() - began
        if info.gate is None or info.gate.mode != "closed":
            return info, round(waited, 3)
        if waited > REOPEN_WAIT_S:
            return info, None
        await asyncio.sleep(POLL_S)


def gate_report(
    before: Gate | None, after: Gate | None, reopened_after: float | None, expect_transitions: bool
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what the gate did between the two snapshots, and what is wrong with it."""
    if before is None or after is None:
        expected = "transitions were expected, but the server has no gate: it runs without the patch"
        return None, [expected] if expect_transitions else []
    report = {"threshold": after.threshold, "before": before.mode, "after": after.mode}
    if before.processes != after.processes:
        return report, ["the server was restarted during the load: its scheduler is another process (fab logs)"]
    closed = after.closed_steps - before.closed_steps
    report |= {
        "transitions": after.transitions - before.transitions,
        "open_steps": after.open_steps - before.open_steps,
        "closed_steps": closed,
        "open_again_after_s": reopened_after,
    }
    problems = []
    if reopened_after is None:
        problems.append(
            f"the gate is still closed {REOPEN_WAIT_S:g} s after the load ({after.running} requests running)"
        )
    if expect_transitions and not closed:
        problems.append(f"the gate did not close under this load (threshold {after.threshold})")
    return report, problems
