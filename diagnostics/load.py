"""The load test of one host: warm-up, load, what the gate did meanwhile, and whether the limits were kept."""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from diagnostics.gate_history import gate_history
from diagnostics.limits import Limit, LoadLimits
from diagnostics.prompts import Prompt
from diagnostics.server import (
    Endpoint,
    Gate,
    ServerError,
    ServerInfo,
    api_client,
    context_length,
    gate_given_back,
    server_info,
    set_gate,
    tokenise,
)
from diagnostics.traffic import OUTCOMES, Result, Run, TokenPrompt, closed_loop, open_loop, percentiles, summarise

REOPEN_WAIT_S = 10.0
POLL_S = 0.5
ARMS = ("gate", "open", "closed")
ARM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to send, and what to hold the result to.

    One of ``concurrency`` (requests in flight) and ``rate`` (requests a second) is set, and one of ``requests`` and
    ``duration`` (seconds); ``timeout`` (seconds) bounds a request, and ``warm_up`` counts requests.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    duration: float | None = None
    warm_up: int = 0
    seed: int = 0
    timeout: float = 120.0
    expect_transitions: bool = False
    limits: LoadLimits = field(default_factory=LoadLimits)

    def traffic(self, client: httpx.AsyncClient, prompts: Sequence[TokenPrompt]) -> Callable[..., Awaitable[Run]]:
        """Return the loop that sends *prompts* as planned; it takes ``requests`` or ``duration``, and ``on_result``."""
        if self.rate is not None:
            return functools.partial(open_loop, client, prompts, rate=self.rate, seed=self.seed, timeout=self.timeout)
        return functools.partial(closed_loop, client, prompts, concurrency=self.concurrency or 1, timeout=self.timeout)


async def load(
    endpoint: Endpoint, plan: Plan, prompts: Sequence[Prompt], on_result: Callable[[Result], None] = lambda result: None
) -> dict[str, Any]:
    """Run *plan* at *endpoint*; the returned document says ``ok`` only if the limits were kept.

    The gate, where the server has one, must be open again afterwards; with ``expect_transitions`` it must also have
    closed. *on_result* sees each measured result as it comes. ``invalid`` says why the figures are not the server's,
    where the client was too slow. A cancelled load returns what it has, with the reason.
    """
    measurement = _Measurement(plan, prompts, on_result)
    try:
        async with api_client(endpoint, plan.timeout) as client:
            await measurement.take(client)
    except ServerError as error:
        measurement.reasons.append(str(error))
    except asyncio.CancelledError:
        measurement.interrupted()
    return measurement.document()


class _Measurement:
    """One load as it goes; what there is of it can be told at any time."""

    def __init__(self, plan: Plan, prompts: Sequence[Prompt], on_result: Callable[[Result], None]) -> None:
        self._plan, self._prompts, self._on_result = plan, prompts, on_result
        self._results: list[Result] = []
        self._facts: dict[str, Any] = {"plan": asdict(plan)}
        self._limits: list[Limit] = []
        self._client_faults: list[str] = []
        self.reasons: list[str] = []

    def document(self) -> dict[str, Any]:
        """What is known, and the verdict on it."""
        invalid = [f"the client was too slow, these figures are not the server's: {why}" for why in self._client_faults]
        problems = [problem for limit in self._limits if (problem := limit.problem())]
        reasons = [*self.reasons, *problems, *invalid]
        return self._facts | {
            "limits": [limit.document() for limit in self._limits],
            "invalid": invalid,
            "ok": not reasons,
            "reasons": reasons,
        }

    def interrupted(self) -> None:
        """Note the end before the end, with what had come by then."""
        self._facts |= summarise(self._results)
        self.reasons.append(f"interrupted after {len(self._results)} requests; those in flight were given up")

    async def take(self, client: httpx.AsyncClient) -> None:
        """Measure as far as the server lets it; raises ServerError where it does not."""
        plan = self._plan
        info = await server_info(client)
        fitting, skipped = await fit(client, info.model, self._prompts)
        self._facts |= {"model": info.model, "sglang_version": info.version, "skipped_prompts": skipped}
        if not fitting:
            raise ServerError("no prompt fits into the model's context")
        traffic = plan.traffic(client, fitting)
        warm = await traffic(requests=plan.warm_up)
        self._facts["warm_up"] = summarise(warm.results)["requests"]
        self.reasons += _shortfalls(warm, " in the warm-up")
        before = await server_info(client)
        async with gate_history(client) as history:
            run = await traffic(requests=plan.requests, duration=plan.duration, on_result=self._note)
        self._judge(run, [prompt.kind for prompt in fitting])
        after, reopened = await _settled(client)
        gate, problems = gate_report(before.gate, after.gate, reopened, plan.expect_transitions)
        self._facts["gate"] = gate and gate | {"history": history.document()}
        self.reasons += problems
        if plan.limits.throughput_loss is not None and not (self.reasons or self._client_faults):
            await self._compare_arms(client, traffic, plan.limits.throughput_loss)

    def _note(self, result: Result) -> None:
        self._results.append(result)
        self._on_result(result)

    def _judge(self, run: Run, kinds: Sequence[str]) -> None:
        """Summarise *run* and hold it to the limits; with a client that was too slow only counts can be judged."""
        figures = summarise(run.results)
        self._facts |= figures | {
            "client": {"lag_s": percentiles(run.client_lags), "cpu": round(run.client_cpu, 3)},
            "kinds": {
                kind: summarise([result for result in run.results if result.kind == kind])
                for kind in dict.fromkeys(kinds)
            },
        }
        counts = figures["requests"]
        errors = counts["sent"] - counts["answered"]
        parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES[1:] if counts[outcome])
        self._limits.append(
            Limit("requests without an answer", errors, "at most", self._plan.limits.errors, detail=parts)
        )
        self.reasons += [run.gave_up] if run.gave_up else []
        if fault := run.client_fault():
            self._client_faults.append(fault)
        elif self._plan.limits.ttft_p95 is not None:
            ttft = figures["time_to_first_token_s"]
            self._limits.append(
                Limit(
                    "95th percentile of the time to the first token",
                    ttft and ttft["p95"],
                    "at most",
                    self._plan.limits.ttft_p95,
                    " s",
                )
            )

    async def _compare_arms(
        self, client: httpx.AsyncClient, traffic: Callable[..., Awaitable[Run]], allowed_loss: float
    ) -> None:
        """Measure the gate against itself held open and held closed, in turns, on the same running server."""
        gate = (await server_info(client)).gate
        if gate is not None and gate.mode == "off":
            raise ServerError(
                "the gate is off (threshold 0) and has no arms to compare: leave the throughput limit out"
            )
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        async with gate_given_back(client):
            for turn in range(ARM_ROUNDS):
                for arm in (*ARMS[turn % len(ARMS) :], *ARMS[: turn % len(ARMS)]):
                    await set_gate(client, speculative_gate_force=None if arm == "gate" else arm)
                    run = await traffic(requests=self._plan.requests, duration=self._plan.duration)
                    problems = _shortfalls(run, f" while the throughput of {arm!r} was measured")
                    if problems:
                        self.reasons += problems
                        return
                    if fault := run.client_fault():
                        self._client_faults.append(fault)
                        return
                    rates[arm].append(summarise(run.results)["output_tokens_per_s"])
        medians = {arm: statistics.median(found) for arm, found in rates.items()}
        better = max(ARMS[1:], key=medians.__getitem__)
        loss = 100 * (1 - medians["gate"] / medians[better])
        self._facts["arms"] = {
            "output_tokens_per_s": rates,
            "medians": medians,
            "better": better,
            "loss_percent": round(loss, 2),
        }
        self._limits.append(
            Limit(
                f"loss of throughput against the gate held {better}",
                round(loss, 2),
                "at most",
                allowed_loss,
                " %",
                f"{medians['gate']:.1f} against {medians[better]:.1f} tok/s",
            )
        )


async def fit(
    client: httpx.AsyncClient, model: str, prompts: Sequence[Prompt]
) -> tuple[list[TokenPrompt], list[dict[str, Any]]]:
    """Tokenise *prompts* with the model's chat template; what its context does not hold, answer included, is noted.

    The notes are ``{"name", "kind", "tokens", "limit"}``.
    """
    limit = await context_length(client)
    fitting, skipped = [], []
    for prompt in prompts:
        tokens = await tokenise(client, model, prompt)
        needed = len(tokens) + prompt.max_tokens
        if needed < limit:
            fitting.append(TokenPrompt(prompt.name, prompt.kind, tuple(tokens), prompt.max_tokens))
        else:
            skipped.append({"name": prompt.name, "kind": prompt.kind, "tokens": needed, "limit": limit})
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
    report: dict[str, Any] = {
        "threshold": after.threshold,
        "profile": after.profile,
        "forced": after.forced,
        "before": before.mode,
        "after": after.mode,
    }
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
        held = ", because something holds it closed" if after.forced == "closed" else ""
        problems.append(
            f"the gate is still closed {REOPEN_WAIT_S:g} s after the load ({after.running} requests running){held}"
        )
    if expect_transitions and not closed:
        by = f"profile {after.profile}" if after.profile else f"threshold {after.threshold}"
        problems.append(f"the gate did not close under this load ({by})")
    return report, problems
