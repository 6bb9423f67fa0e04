"""Each request against a real HTTP server is answered, failed or lost, and counted once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import TOKENS_PER_EVENT, ChatServer, listening, prompt

from diagnostics.server import Endpoint, api_client
from diagnostics.traffic import Result, Run, closed_loop, percentiles, send, summarise

TOKENS = sum(TOKENS_PER_EVENT)


def one(folder: Path, behaviour: str, timeout: float = 30.0) -> Result:
    async def scenario() -> Result:
        async with listening(ChatServer(), folder) as socket, api_client(socket, timeout) as client:
            return await send(client, "tiny", prompt(behaviour), seed=0, timeout=timeout)

    return asyncio.run(scenario())


def loop(folder: Path, behaviours: list[str], server: ChatServer | None = None, **settings: Any) -> Run:
    async def scenario() -> Run:
        async with listening(server or ChatServer(), folder) as socket, api_client(socket, 30.0) as client:
            return await closed_loop(client, "tiny", [prompt(behaviour) for behaviour in behaviours], **settings)

    return asyncio.run(scenario())


def test_an_answer_tells_its_text_tokens_and_times(tmp_path: Path) -> None:
    result = one(tmp_path, "plain")
    assert (result.outcome, result.status, result.finish_reason, result.reason) == ("answered", 200, "length", None)
    assert result.text == "word word word "
    assert (result.prompt_tokens, result.output_tokens) == (7, TOKENS)
    assert result.first_token is not None
    assert 0 < result.first_token < result.end_to_end


def test_tokens_that_come_together_share_the_gap_before_them(tmp_path: Path) -> None:
    gaps = one(tmp_path, "plain").token_gaps
    _, second, third = TOKENS_PER_EVENT
    assert len(gaps) == second + third  # none before the first event
    assert len(set(gaps[:second])) == 1
    assert len(set(gaps[second:])) == 1
    # The server waits 10 ms between events: a gap counted per event would be 10 ms, one per token is a share of it.
    assert sum(gaps[:second]) >= 0.009


@pytest.mark.parametrize(
    ("behaviour", "outcome", "reason"),
    [
        ("refused", "failed", "HTTP 400: too long"),
        ("broken", "failed", "HTTP 500: Internal Server Error"),
        ("error event", "failed", "out of memory"),
        ("aborted", "failed", "finish reason 'abort'"),
        ("no reason", "failed", "finish reason None"),
        ("garbage", "failed", "unreadable event '{not json'"),
        ("no end", "lost", "the stream ended before its end was marked"),
        ("hang up", "lost", "RemoteProtocolError"),
        ("reset", "lost", "RemoteProtocolError"),
    ],
)
def test_a_request_without_an_answer_is_failed_or_lost_with_the_reason(
    tmp_path: Path, behaviour: str, outcome: str, reason: str
) -> None:
    result = one(tmp_path, behaviour)
    assert result.outcome == outcome
    assert result.reason is not None
    assert result.reason.startswith(reason)


@pytest.mark.parametrize("behaviour", ["silent", "stall"])
def test_a_server_that_goes_silent_loses_the_request_when_its_time_is_up(tmp_path: Path, behaviour: str) -> None:
    result = one(tmp_path, behaviour, timeout=0.3)
    assert (result.outcome, result.reason) == ("lost", "no complete answer within 0.3 s")


def test_without_a_server_the_request_is_lost(tmp_path: Path) -> None:
    async def scenario() -> Result:
        async with api_client(Endpoint(str(tmp_path / "none")), 5.0) as client:
            return await send(client, "tiny", prompt("plain"), seed=0, timeout=5.0)

    result = asyncio.run(scenario())
    assert result.outcome == "lost"
    assert (result.reason or "").startswith("ConnectError")


def test_the_loop_keeps_the_concurrency_and_counts_each_request_once(tmp_path: Path) -> None:
    server = ChatServer()
    run = loop(tmp_path, ["plain", "refused", "reset"], server, concurrency=4, requests=20)
    counts = summarise(run.results)["requests"]
    assert counts == {"sent": 20, "answered": 7, "failed": 7, "lost": 6}
    assert len(server.bodies) == 20
    assert server.most_running == 4
    assert run.gave_up is None


def test_no_connection_is_used_twice(tmp_path: Path) -> None:
    server = ChatServer()
    loop(tmp_path, ["plain"], server, concurrency=2, requests=6)
    assert server.connections == 6


def test_seeds_make_each_request_its_own(tmp_path: Path) -> None:
    server = ChatServer()
    loop(tmp_path, ["plain"], server, concurrency=1, requests=3, seed=40)
    assert [body["seed"] for body in server.bodies] == [40, 41, 42]


def test_a_server_that_is_gone_ends_the_loop_early(tmp_path: Path) -> None:
    run = loop(tmp_path, ["hang up"], concurrency=3, requests=10_000)
    assert run.gave_up == f"stopped after {len(run.results)} requests lost in a row"
    assert 10 <= len(run.results) <= 12  # ten in a row, and those in flight beside the tenth
    assert all(result.outcome == "lost" for result in run.results)


def test_a_duration_ends_the_loop(tmp_path: Path) -> None:
    run = loop(tmp_path, ["plain"], concurrency=2, duration=0.2)
    assert len(run.results) >= 2
    last_start = max(result.started for result in run.results)
    assert last_start - min(result.started for result in run.results) < 0.2


@pytest.mark.parametrize("settings", [{}, {"requests": 1, "duration": 1.0}])
def test_the_loop_wants_one_end(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either requests or duration"):
        loop(tmp_path, ["plain"], concurrency=1, **settings)


def test_a_client_that_is_late_is_told(tmp_path: Path) -> None:
    def block(result: Result) -> None:
        time.sleep(0.2)

    assert max(loop(tmp_path, ["plain"], concurrency=1, requests=5, on_result=block).client_lags) > 0.1


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def result(outcome: str, started: float, seconds: float, tokens: int, reason: str | None = None) -> Result:
    return Result("p", "chat", outcome, started, seconds, reason=reason, output_tokens=tokens, first_token=0.1)  # type: ignore[arg-type]


def test_throughput_counts_answered_tokens_over_the_whole_time() -> None:
    summary = summarise(
        [
            result("answered", 10.0, 2.0, 30),
            result("answered", 11.0, 4.0, 20),
            result("lost", 11.0, 9.0, 50, "reset"),
            result("lost", 12.0, 1.0, 0, "reset"),
        ]
    )
    assert summary["elapsed_s"] == 10.0
    assert summary["output_tokens"] == 50
    assert summary["output_tokens_per_s"] == 5.0
    assert summary["errors"] == [{"outcome": "lost", "reason": "reset", "count": 2}]
    assert summary["end_to_end_s"] == {"p50": 2.0, "p95": 4.0, "p99": 4.0}


def test_nothing_measured_is_no_figure() -> None:
    summary = summarise([])
    assert summary["requests"] == {"sent": 0, "answered": 0, "failed": 0, "lost": 0}
    assert summary["output_tokens_per_s"] is None
    assert summary["time_to_first_token_s"] is None
