"""Real prompts at a concurrency or at a rate: each request is accounted for, with the times that its sender sees.

Requests go to SGLang's ``/generate`` with token ids, the only interface that tells how many drafts of a request were
verified and how many were right. docs/diagnostics.md says why no ready load generator is used.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import httpx

from diagnostics.server import error_message, http_error, transport_error

Outcome = Literal["answered", "failed", "lost", "unreached"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "failed", "lost", "unreached")
PERCENTILES = (50, 90, 95, 99)
FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")

LAG_SAMPLE_S = 0.01
HARMLESS_LAG_S = 0.05  # what a machine that serves as well, such as a rehearsal, adds now and then
LAG_SHARE = 0.1  # of the median time to the first token: what the client itself may add to it
CPU_SHARE = 0.9  # of one core, which is all that a Python process can use


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as the model reads it. ``ignore_eos``: answer with exactly ``max_tokens`` tokens.

    ``temperature``: 0 for the greedy answer; the higher it is, the less of the draft is accepted.
    """

    name: str
    kind: str
    input_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0


@dataclass(frozen=True)
class Result:
    """What became of one request; times in seconds, ``started`` on the monotonic clock.

    answered: the whole answer came, with a finish reason. failed: the server said an error, or broke its own
    protocol. lost: neither answer nor error; the connection broke, or nothing came in time. unreached: no connection
    was made (to the tunnel, where there is one), so that the server knows nothing of it.

    ``verify_steps`` and ``accepted_drafts`` are SGLang's own counts of this request; both are 0 where nothing was
    speculated.
    """

    prompt: str
    kind: str
    outcome: Outcome
    started: float
    end_to_end: float
    status: int | None = None
    reason: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    accepted_drafts: int = 0
    first_token: float | None = None
    token_gaps: tuple[float, ...] = ()


@dataclass
class _Answer:
    """The parts of a streamed answer as they arrive."""

    status: int | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and output tokens by then
    meta: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    complete: bool = False

    def feed(self, data: str, now: float) -> None:
        """Take the data of one server-sent event that arrived at *now*."""
        if data == "[DONE]":
            self.complete = True
            return
        try:
            event = json.loads(data)
            if "error" in event:
                self.error = error_message(event)
                return
            self.meta = event["meta_info"]
            tokens = int(self.meta["completion_tokens"])
            if tokens > (self.arrivals[-1][1] if self.arrivals else 0):
                self.arrivals.append((now, tokens))
            self.finish()
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            self.error = f"unreadable event {data[:80]!r}: {type(error).__name__}: {error}"

    def finish(self) -> None:
        """Take an end that is none: SGLang says in the finish reason why it aborted a request."""
        reason = self.meta.get("finish_reason")
        if reason and reason["type"] not in FINISHED:
            self.error = f"finish reason {reason['type']!r}: {reason.get('message') or 'no message'}"

    @property
    def finish_reason(self) -> str | None:
        reason = self.meta.get("finish_reason")
        return str(reason["type"]) if reason else None


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Seconds between output tokens; tokens that arrived together share the gap before them evenly.

    *arrivals* has, for each event, its time and the output tokens by then.
    """
    gaps: list[float] = []
    for (before, had), (now, has) in itertools.pairwise(arrivals):
        gaps += [(now - before) / (has - had)] * (has - had)
    return tuple(gaps)


def text_of(message: dict[str, Any]) -> str:
    """Text of a chat message; reasoning counts, because a thinking model may say nothing else for long."""
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def accept_length(meta: dict[str, Any]) -> float | None:
    """Tokens a verify step of the answer with this ``meta_info``, the bonus token included; None without any step.

    Not SGLang's own ``spec_accept_length``: that one divides all tokens by the verify steps, and counts the tokens of
    closed steps with them.
    """
    steps = int(meta.get("spec_verify_ct") or 0)
    return 1 + int(meta.get("spec_num_correct_drafts") or 0) / steps if steps else None


def generate_body(prompt: TokenPrompt, stream: bool) -> dict[str, Any]:
    """Return a request for ``/generate``."""
    sampling = {
        "temperature": prompt.temperature,
        "max_new_tokens": prompt.max_tokens,
        "ignore_eos": prompt.ignore_eos,
    }
    return {"input_ids": list(prompt.input_ids), "sampling_params": sampling, "stream": stream}


async def send(client: httpx.AsyncClient, prompt: TokenPrompt, timeout: float) -> Result:
    """Send one streaming request and wait at most *timeout* seconds for its whole answer; never raises for a server."""
    answer = _Answer()
    started = time.monotonic()
    lost: str | None = None
    unreached = False
    try:
        async with asyncio.timeout(timeout):
            await _stream(client, generate_body(prompt, stream=True), answer)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        unreached, lost = True, transport_error(error)
    except (TimeoutError, httpx.TimeoutException):
        lost = f"no complete answer within {timeout:g} s"
    except httpx.TransportError as error:
        lost = transport_error(error)
    ended = time.monotonic()
    outcome: Outcome
    reason: str | None
    if answer.error is not None:
        outcome, reason = "failed", answer.error
    elif lost is not None:
        outcome, reason = "unreached" if unreached else "lost", lost
    elif not answer.complete:
        outcome, reason = "lost", "the stream ended before its end was marked"
    elif answer.finish_reason is None:
        outcome, reason = "failed", "no finish reason"
    else:
        outcome, reason = "answered", None
    meta = answer.meta
    return Result(
        prompt=prompt.name,
        kind=prompt.kind,
        outcome=outcome,
        started=started,
        end_to_end=ended - started,
        status=answer.status,
        reason=reason,
        finish_reason=answer.finish_reason,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        output_tokens=int(meta.get("completion_tokens") or 0),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
        accepted_drafts=int(meta.get("spec_num_correct_drafts") or 0),
        first_token=answer.arrivals[0][0] - started if answer.arrivals else None,
        token_gaps=token_gaps(answer.arrivals),
    )


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], answer: _Answer) -> None:
    async with client.stream("POST", "/generate", json=body) as response:
        answer.status = response.status_code
        if response.status_code != httpx.codes.OK:
            answer.error = f"HTTP {response.status_code}: {http_error(await response.aread())}"
            return
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                answer.feed(line.removeprefix("data:").strip(), time.monotonic())
                if answer.complete or answer.error:
                    return


@dataclass(frozen=True)
class Run:
    """What one load gave: the results in order of their ends, and how the client itself did.

    ``gave_up`` says why it stopped early. ``client_lags`` (seconds) are samples of how late this process was, and
    ``client_cpu`` is the share of one core that it used: a client that is short of CPU sees answers later than they
    came, and all latencies grow by that.
    """

    results: tuple[Result, ...]
    gave_up: str | None
    client_lags: tuple[float, ...]
    client_cpu: float

    def client_fault(self) -> str | None:
        """Why these figures are the client's rather than the server's; None if they are not."""
        if self.client_cpu > CPU_SHARE:
            return f"it used {self.client_cpu:.0%} of the one core that a process can use (limit {CPU_SHARE:.0%})"
        lag = percentiles(self.client_lags)
        first = percentiles([r.first_token for r in self.results if r.first_token is not None])
        allowed = max(HARMLESS_LAG_S, LAG_SHARE * first["p50"] if first else 0.0)
        if lag and lag["p95"] > allowed:
            return f"it was late by {lag['p95'] * 1000:.0f} ms (95th percentile; limit {allowed * 1000:.0f} ms)"
        return None


class _Losses:
    """Counts requests that got no answer in a row: when there are too many, the server is taken for gone."""

    def __init__(self, hopeless: int) -> None:
        self.in_a_row, self.hopeless = 0, hopeless

    def count(self, result: Result) -> None:
        self.in_a_row = self.in_a_row + 1 if result.outcome in ("lost", "unreached") else 0

    @property
    def too_many(self) -> bool:
        return self.in_a_row >= self.hopeless

    def verdict(self, sent: int, planned: int | None) -> str | None:
        if not self.too_many:
            return None
        rest = f"; {planned - sent} of {planned} were not sent any more" if planned else ""
        return f"stopped after {self.in_a_row} requests without an answer in a row{rest}"


async def closed_loop(
    client: httpx.AsyncClient,
    prompts: Sequence[TokenPrompt],
    *,
    concurrency: int,
    requests: int | None = None,
    duration: float | None = None,
    timeout: float = 120.0,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Run:
    """Keep *concurrency* requests in flight until *requests* were sent or *duration* seconds have passed.

    Prompts are taken in order and again from the start. When twice the concurrency (10 at least) got no answer in a
    row, requests in flight end and no more are sent.
    """
    _require_one_end(requests, duration)
    results: list[Result] = []
    losses = _Losses(max(10, 2 * concurrency))
    tickets = iter(itertools.count() if requests is None else range(requests))
    deadline = math.inf if duration is None else time.monotonic() + duration

    async def user() -> None:
        for ticket in tickets:
            if losses.too_many or time.monotonic() >= deadline:
                return
            result = await send(client, prompts[ticket % len(prompts)], timeout)
            losses.count(result)
            results.append(result)
            on_result(result)

    async with _watched() as watch, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())
    return Run(tuple(results), losses.verdict(len(results), requests), tuple(watch.lags), watch.cpu)


async def open_loop(
    client: httpx.AsyncClient,
    prompts: Sequence[TokenPrompt],
    *,
    rate: float,
    seed: int = 0,
    requests: int | None = None,
    duration: float | None = None,
    timeout: float = 120.0,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Run:
    """Send *requests*, or for *duration* seconds, at *rate* a second on average, however many are in flight.

    When the requests of two seconds (10 at least) got no answer in a row, no more are sent. A request that was sent
    late, because this process was busy, adds to ``client_lags``.
    """
    _require_one_end(requests, duration)
    results: list[Result] = []
    losses = _Losses(max(10, math.ceil(2 * rate)))

    async def one(prompt: TokenPrompt) -> None:
        result = await send(client, prompt, timeout)
        losses.count(result)
        results.append(result)
        on_result(result)

    async with _watched() as watch, asyncio.TaskGroup() as group:
        began = time.monotonic()
        for ticket, due in enumerate(arrivals(rate, seed)):
            if ticket == requests or (duration is not None and due >= duration) or losses.too_many:
                break
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            watch.lags.append(max(0.0, time.monotonic() - began - due))
            group.create_task(one(prompts[ticket % len(prompts)]))
    return Run(tuple(results), losses.verdict(len(results), requests), tuple(watch.lags), watch.cpu)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the times (seconds from the start) of a Poisson process of *rate* a second, for ever; a seed's own."""
    random = Random(seed)
    now = 0.0
    while True:
        now += random.expovariate(rate)
        yield now


def _require_one_end(requests: int | None, duration: float | None) -> None:
    if (requests is None) == (duration is None):
        raise ValueError("give either requests or duration")


@dataclass
class _Watch:
    """How this process did: samples of its lateness (s), and its share of one core once the watch has ended."""

    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0

    async def sample(self) -> None:
        while True:
            due = time.monotonic() + LAG_SAMPLE_S
            await asyncio.sleep(LAG_SAMPLE_S)
            self.lags.append(time.monotonic() - due)


@asynccontextmanager
async def _watched() -> AsyncIterator[_Watch]:
    watch = _Watch()
    began, cpu_before = time.monotonic(), time.process_time()
    task = asyncio.create_task(watch.sample())
    try:
        yield watch
    finally:
        task.cancel()
        watch.cpu = (time.process_time() - cpu_before) / max(time.monotonic() - began, 1e-9)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles by the nearest rank, so that each is a value that occurred; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {f"p{q}": round(ranked[math.ceil(q / 100 * len(ranked)) - 1], 6) for q in PERCENTILES}


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Return counts, throughput (output tokens of answered requests a second), latencies (seconds), accept length."""
    answered = [result for result in results if result.outcome == "answered"]
    outcomes = Counter(result.outcome for result in results)
    reasons = Counter((result.outcome, result.reason) for result in results if result.reason)
    elapsed = max((r.started + r.end_to_end for r in results), default=0.0) - min(
        (r.started for r in results), default=0.0
    )
    tokens = sum(result.output_tokens for result in answered)
    steps = sum(result.verify_steps for result in answered)
    accepted = sum(result.accepted_drafts for result in answered)
    return {
        "requests": {"sent": len(results), **{outcome: outcomes[outcome] for outcome in OUTCOMES}},
        "errors": [
            {"outcome": outcome, "reason": reason, "count": count} for (outcome, reason), count in reasons.most_common()
        ],
        "elapsed_s": round(elapsed, 3),
        "prompt_tokens": sum(result.prompt_tokens for result in answered),
        "cached_prompt_tokens": sum(result.cached_tokens for result in answered),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / elapsed, 2) if elapsed else None,
        "accept_length": round(1 + accepted / steps, 4) if steps else None,
        "verify_steps": steps,
        "time_to_first_token_s": percentiles([r.first_token for r in answered if r.first_token is not None]),
        "inter_token_s": percentiles([gap for result in answered for gap in result.token_gaps]),
        "end_to_end_s": percentiles([result.end_to_end for result in answered]),
    }
