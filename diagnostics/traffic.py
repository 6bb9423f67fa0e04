"""Real prompts at a concurrency: each request is accounted for, and its times are those that a user of the API sees.

SGLang's and others' load generators were not used: they count tokens with the model's tokenizer, which the controller
does not have, and fold an answer that never came into their error rate.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from diagnostics.prompts import Prompt
from diagnostics.server import error_message, http_error, transport_error

Outcome = Literal["answered", "failed", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "failed", "lost")
PERCENTILES = (50, 95, 99)
LAG_SAMPLE_S = 0.05
FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter")


@dataclass(frozen=True)
class Result:
    """What became of one request; times in seconds, ``started`` on the monotonic clock.

    answered: the whole answer came, with a finish reason. failed: the server said an error, or broke its own
    protocol. lost: neither answer nor error; the connection broke, or nothing came in time.
    """

    prompt: str
    kind: str
    outcome: Outcome
    started: float
    end_to_end: float
    status: int | None = None
    reason: str | None = None
    finish_reason: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    token_gaps: tuple[float, ...] = ()


@dataclass
class _Answer:
    """The parts of a streamed answer as they arrive."""

    status: int | None = None
    pieces: list[str] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and output tokens by then
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    complete: bool = False

    def feed(self, data: str, now: float) -> None:
        """Take the data of one server-sent event that arrived at *now*."""
        if data == "[DONE]":
            self.complete = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = error_message(chunk)
                return
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices", []):
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                if piece := text_of(choice.get("delta", {})):
                    self.pieces.append(piece)
                    self.arrivals.append((now, int(self.usage.get("completion_tokens") or len(self.pieces))))
        except (ValueError, AttributeError, TypeError) as error:
            self.error = f"unreadable event {data[:80]!r}: {error}"

    def token_gaps(self) -> tuple[float, ...]:
        """Seconds between output tokens; tokens that arrived together share the gap before them evenly."""
        gaps: list[float] = []
        for (before, had), (now, has) in itertools.pairwise(self.arrivals):
            new = max(1, has - had)
            gaps += [(now - before) / new] * new
        return tuple(gaps)


def text_of(message: dict[str, Any]) -> str:
    """Text of a chat message or delta; reasoning counts, because a thinking model may say nothing else for long."""
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def chat_body(model: str, prompt: Prompt, seed: int, stream: bool) -> dict[str, Any]:
    """Return a greedy request for ``/v1/chat/completions``.

    The usage in each event tells how many tokens it carries: with speculation they come several at a time.
    """
    body = {
        "model": model,
        "messages": list(prompt.messages),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "seed": seed,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


async def send(client: httpx.AsyncClient, model: str, prompt: Prompt, seed: int, timeout: float) -> Result:
    """Send one streaming request and wait at most *timeout* seconds for its whole answer; never raises for a server."""
    answer = _Answer()
    started = time.monotonic()
    lost: str | None = None
    try:
        async with asyncio.timeout(timeout):
            await _stream(client, chat_body(model, prompt, seed, stream=True), answer)
    except (TimeoutError, httpx.TimeoutException):
        lost = f"no complete answer within {timeout:g} s"
    except httpx.TransportError as error:
        lost = transport_error(error)
    ended = time.monotonic()
    outcome: Outcome
    reason: str | None
    if answer.error is not None:
        outcome, reason = "failed", answer.error
    elif lost is None and not answer.complete:
        outcome, reason = "lost", "the stream ended before its end was marked"
    elif lost is not None:
        outcome, reason = "lost", lost
    elif answer.finish_reason not in FINISHED:
        outcome, reason = "failed", f"finish reason {answer.finish_reason!r}"
    else:
        outcome, reason = "answered", None
    return Result(
        prompt=prompt.name,
        kind=prompt.kind,
        outcome=outcome,
        started=started,
        end_to_end=ended - started,
        status=answer.status,
        reason=reason,
        finish_reason=answer.finish_reason,
        text="".join(answer.pieces),
        prompt_tokens=int(answer.usage.get("prompt_tokens") or 0),
        output_tokens=int(answer.usage.get("completion_tokens") or len(answer.pieces)),
        first_token=answer.arrivals[0][0] - started if answer.arrivals else None,
        token_gaps=answer.token_gaps(),
    )


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], answer: _Answer) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
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
    """The results of one closed loop, in order of their ends.

    ``gave_up`` says why it stopped early. ``client_lags`` (seconds) are samples of how late this process itself was: a
    client that is short of CPU sees answers later than they came, and all latencies grow by that.
    """

    results: tuple[Result, ...]
    gave_up: str | None
    client_lags: tuple[float, ...]


async def closed_loop(
    client: httpx.AsyncClient,
    model: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    requests: int | None = None,
    duration: float | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Run:
    """Keep *concurrency* requests in flight until *requests* were sent or *duration* seconds have passed.

    Prompts are taken in order and again from the start. When twice the concurrency (10 at least) are lost in a row, the
    server is taken for gone: requests in flight end, no more are sent.
    """
    if (requests is None) == (duration is None):
        raise ValueError("give either requests or duration")
    results: list[Result] = []
    losses = 0
    hopeless = max(10, 2 * concurrency)
    todo: Iterable[int] = itertools.count() if requests is None else range(requests)
    tickets = iter(todo)
    deadline = math.inf if duration is None else time.monotonic() + duration

    async def user() -> None:
        nonlocal losses
        for ticket in tickets:
            if losses >= hopeless or time.monotonic() >= deadline:
                return
            result = await send(client, model, prompts[ticket % len(prompts)], seed + ticket, timeout)
            losses = losses + 1 if result.outcome == "lost" else 0
            results.append(result)
            on_result(result)

    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(lags))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
    finally:
        watch.cancel()
    gave_up = f"stopped after {losses} requests lost in a row" if losses >= hopeless else None
    return Run(tuple(results), gave_up, tuple(lags))


async def _watch_lag(lags: list[float]) -> None:
    """Sleep again and again and note by how much each waking was late."""
    while True:
        due = time.monotonic() + LAG_SAMPLE_S
        await asyncio.sleep(LAG_SAMPLE_S)
        lags.append(time.monotonic() - due)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles 50, 95 and 99 by the nearest rank, so that each is a value that occurred; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {f"p{q}": round(ranked[math.ceil(q / 100 * len(ranked)) - 1], 6) for q in PERCENTILES}


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Return counts, throughput (output tokens of answered requests a second) and latencies (seconds)."""
    answered = [result for result in results if result.outcome == "answered"]
    outcomes = Counter(result.outcome for result in results)
    reasons = Counter((result.outcome, result.reason) for result in results if result.reason)
    elapsed = max((r.started + r.end_to_end for r in results), default=0.0) - min(
        (r.started for r in results), default=0.0
    )
    tokens = sum(result.output_tokens for result in answered)
    return {
        "requests": {"sent": len(results), **{outcome: outcomes[outcome] for outcome in OUTCOMES}},
        "errors": [
            {"outcome": outcome, "reason": reason, "count": count} for (outcome, reason), count in reasons.most_common()
        ],
        "elapsed_s": round(elapsed, 3),
        "prompt_tokens": sum(result.prompt_tokens for result in answered),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / elapsed, 2) if elapsed else None,
        "time_to_first_token_s": percentiles([r.first_token for r in answered if r.first_token is not None]),
        "inter_token_s": percentiles([gap for result in answered for gap in result.token_gaps]),
        "end_to_end_s": percentiles([result.end_to_end for result in answered]),
    }
