"""Each request against a real HTTP server is answered, failed, lost or unreached, and counted once."""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import TOKENS_PER_EVENT, ChatServer, listening

from diagnostics.server import Endpoint, api_client
from diagnostics.traffic import (
    Result,
    Run,
    TokenPrompt,
    accept_length,
    arrivals,
    closed_loop,
    generate_body,
    open_loop,
    percentiles,
    send,
    summarise,
    token_gaps,
)

TOKENS = sum(TOKENS_PER_EVENT)


def prompt(behaviour: str) -> TokenPrompt:
    """Token ids that make the server behave as *behaviour* names."""
    return TokenPrompt(behaviour, "chat", tuple(map(ord, behaviour)), 6)


def one(folder: Path, behaviour: str, timeout: float = 30.0) -> Result:
    async def scenario() -> Result:
        async with listening(ChatServer(), folder) as socket, api_client(socket, timeout) as client:
            return await send(client, prompt(behaviour), timeout)

    return asyncio.run(scenario())


def loop(folder: Path, behaviours: list[str], server: ChatServer | None = None, **settings: Any) -> Run:
    async def scenario() -> Run:
        traffic = open_loop if "rate" in settings else closed_loop
        async with listening(server or ChatServer(), folder) as socket, api_client(socket, 30.0) as client:
            return await traffic(client, [prompt(behaviour) for behaviour in behaviours], **settings)

    return asyncio.run(scenario())


def test_an_answer_tells_its_tokens_drafts_and_times(tmp_path: Path) -> None:
    result = one(tmp_path, "plain")
    assert (result.outcome, result.status, result.finish_reason, result.reason) == ("answered", 200, "length", None)
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (7, 1, TOKENS)
    assert (result.verify_steps, result.accepted_drafts) == (2, 4)
    assert result.first_token is not None
    assert 0 < result.first_token < result.end_to_end


def test_a_request_is_greedy_unless_its_prompt_says_otherwise() -> None:
    sampled = replace(prompt("plain"), temperature=3.0)
    found = [generate_body(given, stream=True)["sampling_params"] for given in (prompt("plain"), sampled)]
    assert [sampling["temperature"] for sampling in found] == [0, 3.0]


def test_tokens_that_come_together_share_the_gap_before_them(tmp_path: Path) -> None:
    assert token_gaps([(5.0, 2), (5.6, 5), (5.7, 6)]) == pytest.approx([0.2, 0.2, 0.2, 0.1])
    assert token_gaps([(5.0, 2)]) == ()
    assert len(one(tmp_path, "plain").token_gaps) == TOKENS - TOKENS_PER_EVENT[0]


@pytest.mark.parametrize(
    ("behaviour", "outcome", "reason"),
    [
        ("refused", "failed", "HTTP 400: too long"),
        ("broken", "failed", "HTTP 500: Internal Server Error"),
        ("error event", "failed", "out of memory"),
        ("aborted", "failed", "finish reason 'abort': out of memory"),
        ("no reason", "failed", "no finish reason"),
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


def test_without_a_tunnel_the_request_is_unreached(tmp_path: Path) -> None:
    async def scenario() -> Result:
        async with api_client(Endpoint(str(tmp_path / "none")), 5.0) as client:
            return await send(client, prompt("plain"), timeout=5.0)

    result = asyncio.run(scenario())
    assert result.outcome == "unreached"
    assert (result.reason or "").startswith("ConnectError")


def test_a_client_without_file_descriptors_is_not_taken_for_a_lost_request(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> Result:
        async with listening(ChatServer(), tmp_path) as socket, api_client(socket, 5.0) as client:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                return await send(client, prompt("plain"), timeout=5.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    result = asyncio.run(scenario())
    assert result.outcome == "unreached"
    assert "Too many open files" in (result.reason or "")


def test_the_loop_keeps_the_concurrency_and_counts_each_request_once(tmp_path: Path) -> None:
    server = ChatServer()
    run = loop(tmp_path, ["plain", "refused", "reset"], server, concurrency=4, requests=20)
    counts = summarise(run.results)["requests"]
    assert counts == {"sent": 20, "answered": 7, "failed": 7, "lost": 6, "unreached": 0}
    assert len(server.bodies) == 20
    assert server.most_running == 4
    assert run.gave_up is None


def test_no_connection_is_used_twice(tmp_path: Path) -> None:
    server = ChatServer()
    loop(tmp_path, ["plain"], server, concurrency=2, requests=6)
    assert server.connections == 6


def test_a_server_that_is_gone_ends_the_loop_early(tmp_path: Path) -> None:
    run = loop(tmp_path, ["hang up"], concurrency=3, requests=10_000)
    total = len(run.results)
    rest = f"{10_000 - total} of 10000 were not sent any more"
    assert run.gave_up == f"stopped after {total} requests without an answer in a row; {rest}"
    assert 10 <= len(run.results) <= 12  # ten in a row, and those in flight beside the tenth
    assert all(result.outcome == "lost" for result in run.results)


def test_a_duration_ends_the_loop(tmp_path: Path) -> None:
    run = loop(tmp_path, ["plain"], concurrency=2, duration=0.2)
    assert len(run.results) >= 2
    last_start = max(result.started for result in run.results)
    assert last_start - min(result.started for result in run.results) < 0.2


@pytest.mark.parametrize("pace", [{"concurrency": 1}, {"rate": 1.0}])
@pytest.mark.parametrize("settings", [{}, {"requests": 1, "duration": 1.0}])
def test_the_loop_wants_one_end(tmp_path: Path, pace: dict[str, Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either requests or duration"):
        loop(tmp_path, ["plain"], **pace, **settings)


def test_arrivals_are_a_poisson_process_of_the_seeds_own() -> None:
    times = list(itertools.islice(arrivals(5.0, seed=1), 20_000))
    assert times == list(itertools.islice(arrivals(5.0, seed=1), 20_000))
    assert times != list(itertools.islice(arrivals(5.0, seed=2), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    class Waiting(ChatServer):
        async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
            while self.most_running < 12:  # no answer before all requests are there
                await asyncio.sleep(0.001)
            await super().generate(body, writer)

    run = loop(tmp_path, ["plain"], Waiting(), rate=500.0, requests=12)
    assert [result.outcome for result in run.results] == ["answered"] * 12


def test_an_open_loop_starts_requests_at_their_arrivals_and_ends_after_its_duration(tmp_path: Path) -> None:
    run = loop(tmp_path, ["plain"], rate=100.0, seed=3, duration=0.3)
    due = list(itertools.takewhile(lambda time: time < 0.3, arrivals(100.0, seed=3)))
    started = sorted(result.started for result in run.results)
    assert len(started) == len(due)
    spread = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert sum(spread) >= due[-1] - due[0] - max(run.client_lags) - 0.001


def test_an_open_loop_stops_when_the_server_is_gone(tmp_path: Path) -> None:
    run = loop(tmp_path, ["hang up"], rate=100.0, requests=1_000_000)
    assert "requests without an answer in a row" in (run.gave_up or "")
    assert len(run.results) < 1_000_000


def test_a_client_that_is_late_is_told(tmp_path: Path) -> None:
    def block(result: Result) -> None:
        time.sleep(0.2)

    run = loop(tmp_path, ["plain"], concurrency=1, requests=5, on_result=block)
    assert max(run.client_lags) > 0.1
    assert (run.client_fault() or "").startswith("it was late by ")


def test_the_clients_use_of_its_core_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", time.monotonic)  # as if it never waited for anything
    run = loop(tmp_path, ["plain"], concurrency=1, requests=2)
    assert run.client_cpu == pytest.approx(1, abs=0.01)
    assert (run.client_fault() or "").startswith("it used 100% of the one core")


@pytest.mark.parametrize(
    ("lags", "cpu", "fault"),
    [
        ([0.001] * 90 + [0.3] * 10, 0.1, "it was late by 300 ms (95th percentile; limit 50 ms)"),
        ([0.04] * 100, 0.1, None),  # a tenth of the time to the first token is 50 ms
        ([0.0] * 100, 0.95, "it used 95% of the one core that a process can use (limit 90%)"),
    ],
)
def test_the_clients_fault_is_measured_against_what_it_measures(lags: list[float], cpu: float, fault: str) -> None:
    answered = Result("p", "chat", "answered", 0.0, 2.0, first_token=0.5)
    assert Run((answered,), None, tuple(lags), cpu).client_fault() == fault


def test_a_harmless_lag_is_no_fault_even_where_answers_are_quick() -> None:
    answered = Result("p", "chat", "answered", 0.0, 0.1, first_token=0.01)
    assert Run((answered,), None, (0.015,) * 100, 0.1).client_fault() is None


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p95": 3.0, "p99": 3.0}
    hundred = [float(n) for n in range(100, 0, -1)]
    assert percentiles(hundred) == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


def test_the_accept_length_leaves_tokens_of_closed_steps_out() -> None:
    # 90 tokens, of which 10 verify steps gave 30: SGLang's own spec_accept_length says 9.
    meta = {"completion_tokens": 90, "spec_verify_ct": 10, "spec_num_correct_drafts": 20, "spec_accept_length": 9.0}
    assert accept_length(meta) == 3.0
    assert accept_length({"completion_tokens": 90}) is None


def result(outcome: str, started: float, seconds: float, tokens: int, reason: str | None = None) -> Result:
    return Result(
        "p", "chat", outcome, started, seconds, reason=reason, output_tokens=tokens, first_token=0.1,  # type: ignore[arg-type]
        verify_steps=tokens // 5, accepted_drafts=tokens // 2,
    )  # fmt: skip


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
    assert summary["end_to_end_s"] == {"p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0}
    assert summary["accept_length"] == 1 + 25 / 10


def test_nothing_measured_is_no_figure() -> None:
    summary = summarise([])
    assert summary["requests"] == {"sent": 0, "answered": 0, "failed": 0, "lost": 0, "unreached": 0}
    assert summary["output_tokens_per_s"] is None
    assert summary["time_to_first_token_s"] is None
