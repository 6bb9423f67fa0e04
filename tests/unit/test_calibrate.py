"""The calibration: thresholds from known costs, and a sweep of a simulated server whose costs are known."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import httpx
import pytest

from diagnostics.calibrate import NoRecommendation, calibrate_server, plan, recommend, usable
from diagnostics.inventory import UsageError
from diagnostics.options import time_span
from diagnostics.sweep import Cell, Limits
from diagnostics.traffic import TokenPrompt


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diagnostics.sweep.POLL_S", 0)


PROMPTS = [
    TokenPrompt("one", "chat", tuple(range(40)), max_tokens=16),
    TokenPrompt("two", "code", tuple(range(100, 160)), max_tokens=16),
]


def cell(batch: int, break_even: float, context: int = 512, noise: float = 0.0) -> Cell:
    """A cell of three pairs whose ratios have that relative median absolute deviation."""
    closed = (0.01, 0.01, 0.01)
    return Cell(batch, context, tuple(0.01 * break_even * (1 + shift) for shift in (-noise, 0, noise)), closed)


def costs(break_evens: dict[int, float], **more: Any) -> list[Cell]:
    return [cell(batch, value, **more) for batch, value in break_evens.items()]


ERROR = 1.4826 * 1.2533 / math.sqrt(3)  # standard error of a median of three with a median absolute deviation of 1
LINEAR = {batch: 1 + batch / 4 for batch in (1, 2, 4, 8, 16)}  # speculation pays below 4 (acceptance - 1) requests


@pytest.mark.parametrize(("acceptance", "threshold"), [(1.4, 2), (2.0, 4), (2.1, 5), (3.5, 10), (4.9, 16)])
def test_the_threshold_is_where_the_costs_cross(acceptance: float, threshold: int) -> None:
    found = recommend(costs(LINEAR), acceptance, 16)
    assert (found.threshold, found.kv_token_threshold) == (threshold, 0)
    assert f"pays below {threshold} requests" in found.why


def test_the_low_mark_is_where_speculation_gains_more_than_the_noise() -> None:
    assert recommend(costs(LINEAR), 4.0, 16).low_mark == math.ceil(4 * (4.0 / 1.03 - 1))
    assert recommend(costs(LINEAR, noise=0.09), 4.0, 16).low_mark == math.ceil(4 * (4.0 / (1 + ERROR * 0.09) - 1))


def test_speculation_that_always_wins_never_closes_the_gate() -> None:
    found = recommend(costs(LINEAR), 6.0, 16)
    assert (found.threshold, found.low_mark, found.kv_token_threshold) == (0, None, 0)
    assert "always wins up to the 16 requests measured" in found.why


def test_speculation_that_always_loses_closes_it_from_one_request_on() -> None:
    found = recommend(costs(LINEAR), 1.1, 16)
    assert (found.threshold, found.low_mark) == (1, 1)
    assert "always loses" in found.why


def test_a_break_even_that_noise_bends_gives_one_threshold() -> None:
    # Measured at 4 requests a little too cheap, at 8 a little too dear: it must not open again in between.
    bent = {1: 1.2, 2: 1.9, 4: 1.8, 8: 3.2, 16: 3.0}
    assert recommend(costs(bent), 2.5, 16).threshold == 6


def test_long_contexts_that_cross_earlier_give_a_kv_token_threshold() -> None:
    # Break-even 2 at 8192 resident tokens, whatever the batch.
    cells = [
        cell(batch, 1 + batch * context / 8192, context)
        for context in (512, 1024, 2048, 4096)
        for batch in (1, 2, 4, 8, 16)
    ]
    found = recommend(cells, 2.0, 16)
    assert found.kv_token_threshold == 8192
    assert "or 8192 KV tokens" in found.why
    # What every context shares needs no second trigger.
    same = [cell(batch, LINEAR[batch], context) for context in (512, 2048) for batch in LINEAR]
    assert recommend(same, 2.0, 16).kv_token_threshold == 0


def test_nothing_is_recommended_from_noise() -> None:
    with pytest.raises(NoRecommendation, match="by more than its noise"):
        recommend(costs({1: 1.98, 4: 2.0, 16: 2.03}, noise=0.05), 2.0, 16)
    with pytest.raises(NoRecommendation, match="at least two of different batches"):
        recommend([cell(4, 2.0), cell(4, 2.0, context=2048)], 3.0, 16)


def test_noisy_and_unmeasured_cells_are_left_out_with_the_reason() -> None:
    steady, noisy, missing = cell(1, 2.0), cell(2, 2.0, noise=0.2), Cell(4, 512, left_out="the budget was used up")
    kept, left_out = usable([steady, noisy, missing])
    assert kept == [steady]
    assert [(one.batch, reason) for one, reason in left_out] == [
        (2, "its break-even is uncertain by 21%, more than 10%"),
        (4, "the budget was used up"),
    ]
    assert noisy.uncertainty == pytest.approx(0.2 * ERROR)


def test_the_plan_holds_what_the_server_can_hold() -> None:
    limits = Limits(requests=12, kv_tokens=16384, context=4090, tokens_per_step=4)
    assert plan(limits) == [*((batch, 512) for batch in (1, 2, 4, 8, 12)), (1, 2048), (2, 2048), (4, 2048)]
    assert plan(limits, batches=[3, 100], contexts=[256]) == [(3, 256)]


class Server:
    """Answers as a patched SGLang does; its clock stands still but for steps, each of which costs what ``cost`` says.

    Ten steps pass between two requests to it.
    """

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.forced: str | None = faults.get("forced")
        self.clock, self.steps = 0.0, {"open": 0, "closed": 0}
        self.batch = 0
        self.held: list[tuple[int, int]] = []  # requests and tokens of each batch
        self.tokens_left = 0.0
        self.ended = asyncio.Event()
        self.seen_forces: list[str | None] = []
        self.readings = 0
        self.task: asyncio.Task[Any] | None = None

    def cost(self, mode: str) -> float:
        disturbed = self.held.count(self.held[-1]) == 1 and self.batch == self.faults.get("disturbed once")
        return 0.0002 if mode == "closed" else 0.0002 * (1 + self.batch / 4) * (1.5 if disturbed else 1)

    def advance(self) -> None:
        if self.batch:
            mode = self.forced or "open"
            self.steps[mode] += 10
            self.clock += 10 * self.cost(mode)
            self.tokens_left -= 10 * (3 if mode == "open" else 1)
            if self.tokens_left <= 0 or self.faults.get("ends at once"):
                self.batch = 0
                self.ended.set()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://server")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        path = request.url.path
        if path == "/server_info":
            self.readings += 1
            if self.readings == self.faults.get("dies at reading"):
                self.faults["dead"] = True
            if self.readings == self.faults.get("interrupted at") and self.task:
                self.task.cancel()
            if self.faults.get("dead"):
                raise httpx.ConnectError("connection refused")
            self.advance()
            return httpx.Response(200, json=self.info())
        if self.faults.get("dead"):
            raise httpx.ConnectError("connection refused")
        if path == "/v1/loads":
            running = self.faults.get("running", 0)
            return httpx.Response(200, json={"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]})
        if path == "/set_internal_state":
            self.forced = body["server_args"]["speculative_gate_force"]
            self.seen_forces.append(self.forced)
            return httpx.Response(200, json=[True])
        if path == "/abort_request":
            self.batch = 0
            self.ended.set()
            return httpx.Response(200)
        assert path == "/generate"
        if not isinstance(body["input_ids"][0], list):
            assert self.forced == "open"
            meta = {"completion_tokens": 16, "prompt_tokens": 40, "finish_reason": {"type": "stop"}}
            meta |= {"spec_verify_ct": 10, "spec_num_correct_drafts": 15}
            return httpx.Response(200, text=f"data: {json.dumps({'meta_info': meta})}\n\ndata: [DONE]\n\n")
        if body["sampling_params"]["max_new_tokens"] == 1:
            return httpx.Response(200, json=[])
        self.batch, self.ended = len(body["input_ids"]), asyncio.Event()
        self.held.append((self.batch, len(body["input_ids"][0])))
        self.tokens_left = body["sampling_params"]["max_new_tokens"]
        assert len({tuple(ids) for ids in body["input_ids"]}) == self.batch
        await self.ended.wait()
        return httpx.Response(200, json=[])

    def info(self) -> dict[str, Any]:
        gate = {
            "mode": "off" if self.faults.get("off") else self.forced or "open",
            "threshold": 16,
            "transitions": 0,
            "open_steps": self.steps["open"],
            "closed_steps": self.steps["closed"],
            "running": self.batch,
            "clock": self.clock,
            "settings": {"forced": self.forced},
            "identity": {"pid": 7, "start_ticks": 9 if self.readings >= self.faults.get("restarts at", 10**9) else 8},
            "profile_key": KEY,
        }
        state = {
            "effective_max_running_requests_per_dp": 16,
            "memory_usage": {"token_capacity": 16384},
            "spec_gate": None if self.faults.get("unpatched") else gate,
        }
        return {
            "served_model_name": "tiny",
            "version": "0.5.12.post1",
            "max_req_input_len": 4090,
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "internal_states": [state],
        }


KEY = {
    "host": "h",
    "devices": ["cpu"],
    "driver": None,
    "sglang_version": "0.5.12.post1",
    "series": "0.5.12.post1-0",
    "model": "/m",
    "draft": "/d",
    "tp_size": 1,
    "speculative": {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
}


def run(server: Server, **options: Any) -> dict[str, Any]:
    async def inside() -> dict[str, Any]:
        server.task = asyncio.current_task()
        async with server.client() as client:
            return await calibrate_server(client, PROMPTS, **({"budget": 30.0, "contexts": [512]} | options))

    return asyncio.run(inside())


def test_a_sweep_finds_the_costs_and_gives_the_gate_back() -> None:
    server, lines = Server(), list[str]()
    document = run(server, on_progress=lambda done, of, what: lines.append(f"{done}/{of} {what}"))
    assert document["reasons"] == []
    assert document["ok"]
    assert [(cell["batch"], round(cell["break_even"], 3)) for cell in document["cells"]] == [
        (batch, 1 + batch / 4) for batch in (1, 2, 4, 8, 16)
    ]
    assert document["acceptance"] == {"chat": 2.5, "code": 2.5, "all": 2.5}
    assert document["recommended"]["threshold"] == 6
    assert document["profile"]["cells"][0]["closed_step_s"] == pytest.approx(0.0002)
    assert document["profile"]["key"] == KEY
    assert document["profile"]["acceptance_seen"] == 2.5
    assert server.seen_forces[-1] is None
    assert {"open", "closed"} <= set(server.seen_forces)
    assert len(lines) == 5
    assert lines[-1] == "5/5 batch 16, context 512: open 1.00 ms, closed 0.20 ms a step, 5.00 tokens to pay"


def test_a_cell_that_was_disturbed_is_measured_once_more_before_longer_contexts() -> None:
    server = Server(**{"disturbed once": 16})
    document = run(server, contexts=[512, 2048], batches=[1, 4, 16])
    (short,) = {tokens for batch, tokens in server.held if batch == 16}
    (disturbed,) = [cell for cell in document["cells"] if cell["batch"] == 16]
    assert (disturbed["pairs"], disturbed["uncertainty"], round(disturbed["break_even"], 3)) == (3, 0, 5.0)
    assert server.held[:8] == [(1, short)] * 2 + [(4, short)] * 2 + [(16, short)] * 3 + [(1, server.held[7][1])]
    assert server.held[7][1] > short


@pytest.mark.parametrize("forced", ["open", "closed"])
def test_a_force_of_before_is_given_back(forced: str) -> None:
    server = Server(forced=forced)
    assert run(server, batches=[1, 8])["ok"]
    assert server.forced == forced


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"unpatched": True}, "no gate to hold open or closed: it runs without the patch"),
        ({"off": True}, "with the gate off"),
        ({"running": 3}, "serves 3 requests of others"),
        ({"restarts at": 20}, "the server was restarted during the calibration"),
        ({"dies at reading": 20}, "ConnectError: connection refused"),
        ({"ends at once": True}, "no recommendation: 0 cells tell a cost"),
    ],
)
def test_what_goes_wrong_is_told_and_gives_no_profile(faults: dict[str, Any], reason: str) -> None:
    server = Server(**faults)
    document = run(server)
    assert not document["ok"]
    assert document["profile"] is None
    assert re.search(reason, "; ".join(document["reasons"]))
    assert server.forced is None or "dead" in server.faults


def test_an_interrupted_sweep_gives_the_gate_back() -> None:
    server = Server(**{"interrupted at": 30})
    document = run(server)
    assert (document["ok"], document["profile"]) == (False, None)
    assert document["reasons"] == ["interrupted; the gate is as it was before"]
    assert server.steps["closed"] > 0
    assert server.forced is None
    assert server.batch == 0


def test_a_cell_without_time_is_left_out() -> None:
    document = run(Server(), budget=1e-6)
    assert not document["ok"]
    assert {entry["reason"] for entry in document["left_out"]} == {"the budget was used up before"}


@pytest.mark.parametrize(("given", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_a_budget_is_a_time(given: str, seconds: float) -> None:
    assert time_span("budget", given) == seconds


@pytest.mark.parametrize("given", ["", "0", "-5m", "5 minutes", "inf", "nan", "m", "0.5s"])
def test_what_is_no_time_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="allowed is a time of at least a second, such as 90s, 5m or 1h"):
        time_span("budget", given)
