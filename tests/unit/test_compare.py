"""A comparison on a host that is made up: its order, its figures, and its way back from whatever fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diagnostics.arms import Arm
from diagnostics.compare import ArmFailed, Bench, Comparison, compare
from diagnostics.load import Plan
from diagnostics.prompts import Prompt

DEPLOYMENT = {"id": "former", "threshold": 5, "server_arguments": {"speculative-algorithm": "EAGLE3"}}
ARMS = (
    Arm("gated", "as deployed", None, "EAGLEWorker"),
    Arm("plain", "no speculation", {"model-path": "/m"}, None),
    Arm("chain", "a chain", {"model-path": "/m"}, "EAGLEWorkerV2"),
)
PROMPTS = [Prompt(f"p{number}", "chat", ({"role": "user", "content": "x"},), 8) for number in range(4)]
RATES = {"gated": 110.0, "plain": 100.0, "chain": 90.0}


class Fake(Bench):
    """A host on which each arm has its rate; *at* is called before what it names: ``activate chain``, ``measure``..."""

    def __init__(self, at: Callable[[str], None] = lambda what: None) -> None:
        self.active = "former"
        self.did: list[str] = []
        self.plans: list[Plan] = []
        self.orders: list[tuple[str, ...]] = []
        self._at = at

    def _do(self, what: str) -> None:
        self.did.append(what)
        self._at(what)

    def write(self, arms: Sequence[Arm], deployment: Any) -> dict[str, str]:
        self._do("write")
        return {arm.name: "former" if arm.server_arguments is None else arm.name for arm in arms}

    def activate(self, deployment_id: str) -> None:
        self._do(f"activate {deployment_id}")
        self.active = deployment_id

    def remove(self) -> None:
        self._do("remove")

    def prove(self, speculation: bool) -> tuple[str, str, str | None]:
        self._do(f"prove {self.active}")
        worker = {"former": "EAGLEWorker", "chain": "EAGLEWorkerV2"}.get(self.active)
        return ("proved" if speculation == (worker is not None) else "refuted"), "as it should be", worker

    def measure(self, plan: Plan, prompts: Sequence[Prompt]) -> dict[str, Any]:
        self._do(f"measure {self.active}")
        self.plans.append(plan)
        self.orders.append(tuple(prompt.name for prompt in prompts))
        arm = "gated" if self.active == "former" else self.active
        noise = 1 + len(self.orders) % 3 / 1000
        times = {"p50": 0.1, "p95": 0.2}
        return {
            "ok": True,
            "reasons": [],
            "requests": {"sent": 5, "answered": 5},
            "elapsed_s": 1.0,
            "output_tokens": 100,
            "output_tokens_per_s": RATES[arm] * (plan.concurrency or 0) * noise,
            "accept_length": None if arm == "plain" else 3.0,
            "time_to_first_token_s": times,
            "inter_token_s": times,
            "end_to_end_s": times,
            "client": {},
            "gate": {"transitions": 2, "open_steps": 3, "closed_steps": 4, "history": {}} if arm == "gated" else None,
        }


def run(bench: Fake, rounds: int = 3, steps: list[str] | None = None, **plan: Any) -> dict[str, Any]:
    comparison = Comparison(arms=ARMS, levels=[1, 4], rounds=rounds, load=Plan(**plan))
    seen = steps if steps is not None else []
    return compare(bench, comparison, DEPLOYMENT, PROMPTS, seen.append)


def test_arms_take_turns_and_the_former_deployment_is_back_and_proved() -> None:
    bench, steps = Fake(), []
    entry = run(bench, steps=steps)
    assert (entry["ok"], entry["reasons"]) == (True, [])
    starts = [what.removeprefix("activate ") for what in bench.did if what.startswith("activate")]
    assert starts == [
        *("former", "plain", "chain"),
        *("plain", "chain", "former"),
        *("chain", "former", "plain"),
        "former",
    ]
    assert all(bench.did[at + 1] == f"prove {what.removeprefix('activate ')}" for at, what in enumerate(bench.did)
               if what.startswith("activate"))  # fmt: skip
    assert bench.did[-2:] == ["prove former", "remove"]
    assert entry["restored"] == {"deployment": "former", "proof": "proved: as it should be"}
    assert len(steps) == 3 * 3 * 3 + 1  # a start and two levels for each arm and round, and the way back


def test_all_arms_of_a_round_get_the_same_requests() -> None:
    bench = Fake()
    run(bench)
    by_round = [set(bench.orders[first : first + 6]) for first in range(0, 18, 6)]
    assert all(len(orders) == 1 for orders in by_round)
    assert len(set.union(*by_round)) > 1
    assert {(plan.concurrency, plan.requests, plan.warm_up) for plan in bench.plans} == {(1, 5, 1), (4, 20, 4)}


def test_figures_and_differences() -> None:
    entry = run(Fake())
    row = next(row for row in entry["summary"] if (row["arm"], row["concurrency"]) == ("chain", 4))
    assert row["output_tokens_per_s"]["rounds"] == 3
    assert (
        row["output_tokens_per_s"]["min"] <= row["output_tokens_per_s"]["median"] <= row["output_tokens_per_s"]["max"]
    )
    assert row["output_tokens_per_s"]["median"] == pytest.approx(360, rel=0.01)
    plain = next(row for row in entry["summary"] if row["arm"] == "plain")
    assert plain["accept_length"] is None
    told = {(row["against"], row["concurrency"]): (row["says"], row["best"]) for row in entry["differences"]}
    assert told == dict.fromkeys([("plain", 1), ("plain", 4)], ("faster", True)) | dict.fromkeys(
        [("chain", 1), ("chain", 4)], ("faster", False)
    )
    gates = {found["arm"]: found["gate"] for found in entry["measurements"]}
    assert gates["gated"] == {"transitions": 2, "open_steps": 3, "closed_steps": 4}
    assert gates["plain"] is None


def test_one_round_calls_no_difference() -> None:
    assert {row["says"] for row in run(Fake(), rounds=1)["differences"]} == {"too few rounds"}


def fail_at(what: str, how: Callable[[], None]) -> Callable[[str], None]:
    """Do *how* the first time that *what* is to be done."""
    left = [what]

    def at(now: str) -> None:
        if now in left:
            left.remove(now)
            how()

    return at


def no_start() -> None:
    raise ArmFailed("activate.yml failed: no answer")


@pytest.mark.parametrize("what", ["write", "activate plain", "measure chain"])
def test_after_a_failure_the_former_deployment_serves(what: str) -> None:
    bench = Fake(fail_at(what, no_start))
    entry = run(bench)
    assert entry["ok"] is False
    assert entry["reasons"] == ["activate.yml failed: no answer"]
    assert bench.did[-3:] == ["activate former", "prove former", "remove"]
    assert entry["restored"]["proof"].startswith("proved")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_goes_back_and_keeps_what_was_measured(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def interrupt() -> None:
        os.kill(os.getpid(), number)

    bench = Fake(fail_at("activate chain", interrupt))
    entry = run(bench)
    assert entry["reasons"] == ["interrupted after 4 measurements"]
    assert len(entry["measurements"]) == 4
    assert bench.active == "former"
    assert signal.getsignal(number) == before


def test_a_second_interrupt_does_not_end_the_way_back() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    first = fail_at("activate chain", interrupt)

    def at(what: str) -> None:
        first(what)
        if "activate chain" in bench.did and what == "activate former":
            interrupt()

    bench = Fake(at)
    assert run(bench)["restored"]["proof"].startswith("proved")
    assert bench.did[-2:] == ["prove former", "remove"]


def test_an_arm_that_is_not_proved_is_not_measured() -> None:
    class Refuted(Fake):
        def prove(self, speculation: bool) -> tuple[str, str, str | None]:
            found = super().prove(speculation)
            return ("unknown", "it is still loading", None) if self.active == "plain" else found

    bench = Refuted()
    entry = run(bench)
    assert entry["reasons"] == ["arm plain is not proved (unknown): it is still loading"]
    assert "measure plain" not in bench.did
    assert bench.active == "former"


def test_an_arm_with_another_worker_than_meant_is_not_measured() -> None:
    class Other(Fake):
        def prove(self, speculation: bool) -> tuple[str, str, str | None]:
            found = super().prove(speculation)
            return (*found[:2], "EAGLEWorker") if self.active == "chain" else found

    entry = run(Other())
    assert entry["reasons"] == ["arm chain runs EAGLEWorker, and EAGLEWorkerV2 was meant"]


def test_a_load_with_a_lost_request_ends_the_comparison() -> None:
    class Lossy(Fake):
        def measure(self, plan: Plan, prompts: Sequence[Prompt]) -> dict[str, Any]:
            found = super().measure(plan, prompts)
            return found | {"ok": False, "reasons": ["1 of 5 requests lost"]} if self.active == "plain" else found

    entry = run(Lossy())
    assert entry["reasons"] == ["round 1 of 3, arm plain, C=1: 1 of 5 requests lost"]
    assert entry["restored"]["proof"].startswith("proved")


def test_a_client_that_was_too_slow_is_told_and_its_figures_are_left_out() -> None:
    class Late(Fake):
        def measure(self, plan: Plan, prompts: Sequence[Prompt]) -> dict[str, Any]:
            found = super().measure(plan, prompts)
            late = ["the client was too slow"]
            return found | {"ok": False, "reasons": late, "invalid": late} if len(self.plans) == 2 else found

    entry = run(Late())
    assert entry["ok"] is False
    assert entry["reasons"] == entry["invalid"] == ["round 1 of 3, arm gated, C=4: the client was too slow"]
    assert len(entry["measurements"]) == 18
    rounds = {(row["arm"], row["concurrency"]): row["output_tokens_per_s"]["rounds"] for row in entry["summary"]}
    assert rounds["gated", 4] == 2
    assert rounds["gated", 1] == 3
    told = {(row["against"], row["concurrency"]): row["says"] for row in entry["differences"]}
    assert told["plain", 4] == "too few rounds"
    assert told["plain", 1] == "faster"


def test_a_way_back_that_fails_says_how_to_go_it_by_hand() -> None:
    def at(what: str) -> None:
        if what == "activate plain" or (what == "activate former" and "activate plain" in bench.did):
            no_start()

    bench = Fake(at)
    entry = run(bench)
    assert entry["ok"] is False
    assert "GOING BACK FAILED" in entry["reasons"][-1]
    assert entry["reasons"][-1].endswith("ansible-playbook playbooks/rollback.yml -e rollback_to=former")
    assert entry["restored"]["proof"] == "unknown"
    assert "remove" not in bench.did  # one of them may serve


def test_what_was_written_for_the_arms_and_could_not_be_removed_is_told() -> None:
    entry = run(Fake(fail_at("remove", no_start)))
    assert entry["ok"] is False
    assert entry["reasons"] == ["the deployments of the arms are still there: activate.yml failed: no answer"]
    assert entry["restored"]["proof"].startswith("proved")
