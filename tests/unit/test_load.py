"""The load test's document and verdict, against a real HTTP server with a gate that closes and opens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, listening, prompt, server_info

from diagnostics import gate_history, traffic
from diagnostics import load as load_module
from diagnostics.fanout import Interruptible
from diagnostics.limits import LoadLimits
from diagnostics.load import Plan, load
from diagnostics.server import Endpoint
from diagnostics.traffic import Result


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """These loads share their process with the server: what they think of the client depends on the machine."""
    monkeypatch.setattr(traffic, "HARMLESS_LAG_S", 60.0)
    monkeypatch.setattr(traffic, "CPU_SHARE", 60.0)


class GatedServer(ChatServer):
    """Its gate closes at *closes_at* requests in flight and opens when all have gone, unless it *sticks*."""

    def __init__(self, closes_at: int = 3, sticks: bool = False) -> None:
        super().__init__()
        self.closes_at, self.sticks = closes_at, sticks

    @property
    def gate(self) -> dict[str, Any]:
        gate: dict[str, Any] = self.info["internal_states"][0]["spec_gate"]
        return gate

    async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
        self.move("closed" if self.running >= self.closes_at else self.gate["mode"])
        await super().generate(body, writer)
        if self.running == 1 and not self.sticks:
            self.move("open")

    def move(self, mode: str) -> None:
        self.gate["transitions"] += mode != self.gate["mode"]
        self.gate["mode"] = mode
        self.gate[f"{mode}_steps"] += 6


def run(folder: Path, server: ChatServer, behaviours: tuple[str, ...] = ("plain",), **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "concurrency": 4,
        "requests": 12,
        "duration": None,
        "warm_up": 1,
        "seed": 0,
        "timeout": 30.0,
        "expect_transitions": False,
    }

    async def scenario() -> dict[str, Any]:
        async with listening(server, folder) as socket:
            return await load(socket, Plan(**settings | changes), [prompt(behaviour) for behaviour in behaviours])

    return asyncio.run(scenario())


def test_the_gate_closes_and_opens_again(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), expect_transitions=True)
    assert document["reasons"] == []
    assert document["ok"] is True
    assert document["requests"] == {"sent": 12, "answered": 12, "failed": 0, "lost": 0, "unreached": 0}
    assert document["warm_up"] == {"sent": 1, "answered": 1, "failed": 0, "lost": 0, "unreached": 0}
    assert document["gate"]["closed_steps"] > 0
    assert document["gate"]["transitions"] >= 2
    assert document["gate"]["after"] == "open"
    assert document["model"] == "tiny"


def test_the_gate_is_watched_over_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_history, "INTERVAL_S", 0.01)
    document = run(tmp_path, GatedServer(), requests=40)
    history = document["gate"]["history"]
    assert [sample["t_s"] for sample in history["samples"]] == sorted(sample["t_s"] for sample in history["samples"])
    assert {sample["mode"] for sample in history["samples"]} == {"open", "closed"}
    assert history["samples"][-1]["closed_steps"] > history["samples"][0]["closed_steps"]


def test_a_long_history_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_history, "INTERVAL_S", 0.001)
    monkeypatch.setattr(gate_history, "MOST_SAMPLES", 8)
    history = run(tmp_path, GatedServer(), requests=60)["gate"]["history"]
    assert len(history["samples"]) <= 8
    assert history["interval_s"] > 0.001


def test_expected_transitions_that_did_not_come_fail(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(closes_at=99), expect_transitions=True)
    assert document["reasons"] == ["the gate did not close under this load (threshold 5)"]
    assert document["ok"] is False


def test_a_gate_that_need_not_close_is_no_failure(tmp_path: Path) -> None:
    assert run(tmp_path, GatedServer(closes_at=99))["ok"] is True


def test_a_gate_that_stays_closed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "REOPEN_WAIT_S", 0.1)
    monkeypatch.setattr(load_module, "POLL_S", 0.02)
    document = run(tmp_path, GatedServer(sticks=True))
    assert document["ok"] is False
    assert document["reasons"] == ["the gate is still closed 0.1 s after the load (0 requests running)"]


def test_expected_transitions_need_a_gate(tmp_path: Path) -> None:
    server = ChatServer(server_info(gate=None))
    assert run(tmp_path, server)["ok"] is True
    document = run(tmp_path, server, expect_transitions=True)
    assert document["reasons"] == ["transitions were expected, but the server has no gate: it runs without the patch"]


def test_a_restart_during_the_load_is_told(tmp_path: Path) -> None:
    class Restarted(GatedServer):
        async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
            await super().generate(body, writer)
            if len(self.bodies) > 8:
                self.gate["identity"]["pid"] = 101

    document = run(tmp_path, Restarted())
    assert document["requests"]["answered"] == 12
    assert document["ok"] is False
    assert document["reasons"] == [
        "the server was restarted during the load: its scheduler is another process (fab logs)"
    ]


def test_each_request_without_an_answer_counts_against_the_load(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), ("plain", "refused", "reset"), warm_up=0)
    assert document["requests"] == {"sent": 12, "answered": 4, "failed": 4, "lost": 4, "unreached": 0}
    assert document["reasons"] == ["requests without an answer: 8 (4 failed, 4 lost); allowed is at most 0"]
    assert sum(error["count"] for error in document["errors"]) == 8


def test_a_loss_in_the_warm_up_counts_too(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), ("reset", "plain"), warm_up=1, requests=2, concurrency=1)
    assert "1 of 1 requests lost in the warm-up" in document["reasons"]


def test_a_server_that_dies_in_the_warm_up_is_told_with_its_losses(tmp_path: Path) -> None:
    class Dying(GatedServer):
        dead = False

        async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
            self.dead = self.dead or path == "/generate"
            if self.dead:
                writer.transport.abort()
            else:
                await super().answer(method, path, body, writer)

    document = run(tmp_path, Dying(), warm_up=20, concurrency=2)
    lost, stopped, silent = document["reasons"]
    assert lost == f"{document['warm_up']['lost']} of {document['warm_up']['sent']} requests lost in the warm-up"
    total = document["warm_up"]["sent"]
    rest = f"{20 - total} of 20 were not sent any more"
    assert stopped == f"stopped after {total} requests without an answer in a row; {rest} in the warm-up"
    assert silent.startswith("GET /server_info: RemoteProtocolError")
    assert document["ok"] is False


def test_prompts_that_do_not_fit_the_context_are_left_out_and_named(tmp_path: Path) -> None:
    long = "x" * 94  # the server takes a character for a token, its context is 100, and the answer needs 6
    document = run(tmp_path, GatedServer(), ("plain", long))
    assert document["skipped_prompts"] == [{"name": long, "kind": "chat", "tokens": 100, "limit": 100}]
    assert document["requests"]["answered"] == 12
    assert document["ok"] is True


def test_no_fitting_prompt_is_a_failure(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), ("x" * 200,))
    assert document["reasons"] == ["no prompt fits into the model's context"]
    assert document["ok"] is False


def test_kinds_are_measured_apart(tmp_path: Path) -> None:
    server = GatedServer()

    async def scenario() -> dict[str, Any]:
        plan = Plan(concurrency=2, requests=10)
        async with listening(server, tmp_path) as socket:
            return await load(socket, plan, [prompt("plain", "chat"), prompt("refused", "code")])

    kinds = asyncio.run(scenario())["kinds"]
    assert {kind: figures["requests"]["answered"] for kind, figures in kinds.items()} == {"chat": 5, "code": 0}
    assert kinds["code"]["end_to_end_s"] is None


def test_without_a_server_the_document_says_so(tmp_path: Path) -> None:
    plan = Plan(concurrency=2, requests=10, timeout=5.0)
    document = asyncio.run(load(Endpoint(str(tmp_path / "none")), plan, [prompt("plain")]))
    assert document["ok"] is False
    assert len(document["reasons"]) == 1
    assert document["reasons"][0].startswith("GET /server_info: ConnectError")


def test_a_client_that_is_too_slow_makes_the_load_invalid_and_not_the_server_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "CPU_SHARE", 0.0)
    document = run(tmp_path, GatedServer(), limits=LoadLimits(ttft_p95=0.000001, throughput_loss=5.0))
    assert document["ok"] is False
    assert document["reasons"] == document["invalid"]
    (reason,) = document["reasons"]
    assert reason.startswith("the client was too slow, these figures are not the server's: it used ")
    assert [limit["name"] for limit in document["limits"]] == ["requests without an answer"]
    assert "arms" not in document


def test_limits_are_told_with_what_was_found(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), limits=LoadLimits(ttft_p95=0.000001))
    errors, first_token = document["limits"]
    assert errors == {
        "name": "requests without an answer", "found": 0, "rule": "at most", "allowed": 0, "kept": True,
    }  # fmt: skip
    assert first_token["kept"] is False
    assert document["reasons"] == [
        f"95th percentile of the time to the first token: {first_token['found']:.4g} s; allowed is at most 1e-06 s"
    ]
    assert run(tmp_path, GatedServer(), limits=LoadLimits(ttft_p95=30.0))["ok"] is True


def test_some_requests_without_an_answer_may_be_allowed(tmp_path: Path) -> None:
    document = run(tmp_path, GatedServer(), ("plain", "refused"), warm_up=0, limits=LoadLimits(errors=6))
    assert (document["requests"]["failed"], document["ok"]) == (6, True)
    assert run(tmp_path, GatedServer(), ("plain", "refused"), warm_up=0, limits=LoadLimits(errors=5))["ok"] is False


def test_a_first_token_that_never_came_keeps_no_limit(tmp_path: Path) -> None:
    limits = LoadLimits(errors=12, ttft_p95=30.0)
    document = run(tmp_path, GatedServer(), ("refused",), warm_up=0, limits=limits)
    assert document["reasons"] == [
        "95th percentile of the time to the first token: not measured; allowed is at most 30 s"
    ]


class ForcedServer(GatedServer):
    """Its gate, when nothing holds it, loses half of the throughput; it remembers how it was held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[str | None] = []

    def set_internal_state(self, changes: dict[str, Any]) -> list[bool]:
        self.held.append(changes["speculative_gate_force"])
        return super().set_internal_state(changes)

    async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
        if self.gate["settings"]["forced"] is None and self.held:
            await asyncio.sleep(0.2)
        await super().generate(body, writer)


def test_the_gate_is_measured_against_the_better_arm_and_given_back(tmp_path: Path) -> None:
    server = ForcedServer()
    document = run(tmp_path, server, limits=LoadLimits(throughput_loss=20.0))
    arms = document["arms"]
    assert {arm: len(rates) for arm, rates in arms["output_tokens_per_s"].items()} == {
        "gate": 3,
        "open": 3,
        "closed": 3,
    }
    assert arms["better"] in ("open", "closed")
    (reason,) = document["reasons"]
    assert reason.startswith(f"loss of throughput against the gate held {arms['better']}: ")
    assert reason.endswith("allowed is at most 20 %")
    # In turns, each first once, and given back at the end.
    assert server.held[:-1] == [None, "open", "closed", "open", "closed", None, "closed", None, "open"]
    assert server.held[-1] is None
    assert run(tmp_path, ForcedServer(), limits=LoadLimits(throughput_loss=99.0))["ok"] is True


def test_a_loss_while_an_arm_is_measured_gives_the_gate_back(tmp_path: Path) -> None:
    class Breaking(ForcedServer):
        async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
            if self.gate["settings"]["forced"] == "closed":
                writer.transport.abort()
            else:
                await super().generate(body, writer)

    server = Breaking()
    document = run(tmp_path, server, limits=LoadLimits(throughput_loss=20.0))
    assert "12 of 12 requests lost while the throughput of 'closed' was measured" in document["reasons"]
    assert server.gate["settings"]["forced"] is None


def test_a_gate_that_is_off_has_no_arms_to_measure(tmp_path: Path) -> None:
    server = ChatServer(server_info(mode="off", threshold=0))
    document = run(tmp_path, server, limits=LoadLimits(throughput_loss=20.0))
    assert document["reasons"] == [
        "the gate is off (threshold 0) and has no arms to compare: leave the throughput limit out"
    ]


def test_without_a_gate_there_are_no_arms_to_measure(tmp_path: Path) -> None:
    document = run(tmp_path, ChatServer(server_info(gate=None)), limits=LoadLimits(throughput_loss=20.0))
    assert document["reasons"] == ["the server has no gate to hold: it runs without the patch"]


def test_a_server_that_does_not_let_go_of_its_gate_is_told(tmp_path: Path) -> None:
    class Sticking(ForcedServer):
        def set_internal_state(self, changes: dict[str, Any]) -> list[bool]:
            if self.held and changes["speculative_gate_force"] is None:
                return [False]
            return super().set_internal_state(changes)

    document = run(tmp_path, Sticking(), limits=LoadLimits(throughput_loss=20.0))
    assert document["ok"] is False
    assert "the server refused {'speculative_gate_force': None}" in document["reasons"][0]


@pytest.mark.parametrize("when", ["load", "arms"])
def test_an_interrupted_load_tells_what_it_has_and_gives_the_gate_back(tmp_path: Path, when: str) -> None:
    server = ForcedServer()
    work = Interruptible()

    def count(result: Result) -> None:
        if when == "load":
            work.interrupt()

    def interrupt_when_held(changes: dict[str, Any]) -> list[bool]:
        if changes["speculative_gate_force"] == "closed":
            work.interrupt()
        return ForcedServer.set_internal_state(server, changes)

    server.set_internal_state = interrupt_when_held  # type: ignore[method-assign]

    async def scenario() -> dict[str, Any]:
        plan = Plan(concurrency=2, requests=12, limits=LoadLimits(throughput_loss=20.0))
        async with listening(server, tmp_path) as socket:
            return await load(socket, plan, [prompt("plain")], count)

    document = work.run(scenario())
    assert document["ok"] is False
    answered = document["requests"]["answered"]
    assert document["reasons"] == [f"interrupted after {answered} requests; those in flight were given up"]
    assert answered == 12 if when == "arms" else 0 < answered < 12
    assert server.gate["settings"]["forced"] is None
    assert server.held == ([] if when == "load" else [None, "open", "closed", None])
