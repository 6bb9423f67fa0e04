"""The gate by a profile in SGLang's real scheduler: real acceptance closes it, probes tell when to open it again."""

from __future__ import annotations

import itertools

import pytest
from inprocess import CHAIN, TREE, InProcessScheduler, Request, write_profile
from spec_gate.arguments import ArgumentError
from spec_gate.profile_rule import PROBE_STEPS

WORKERS = {"EAGLEWorker": TREE, "EAGLEWorkerV2": CHAIN}
# The draft gets about 3 tokens accepted of these prompts' greedy continuations, and 1.05 of tokens that are drawn
# nearly at random. Three requests of the one kind with twelve of the other are below the break-even, alone above it.
GREEDY_PROMPTS = (0, 2, 5)
RANDOM = {"temperature": 3.0}
BREAK_EVEN = 1.8
TOKENS = 480


@pytest.fixture(scope="module")
def reference(pair, prompts):
    """Greedy tokens of a server without speculation."""
    scheduler = InProcessScheduler(pair.target)
    outputs = scheduler.serve([Request(prompts[i], TOKENS) for i in GREEDY_PROMPTS])
    scheduler.close()
    return [output.token_ids for output in outputs]


@pytest.fixture(params=WORKERS, scope="module")
def scheduler(request, pair, tmp_path_factory, reference):  # the reference first: one scheduler at a time
    folder = tmp_path_factory.mktemp("profiles")
    worker = WORKERS[request.param]
    wrong = write_profile(folder, *pair, worker, {1: BREAK_EVEN}, host="another")
    with pytest.raises(ArgumentError, match=r"\(host was another and is [^;]*\): calibrate again"):
        InProcessScheduler(*pair, **worker, speculative_gate_profile=str(wrong))
    path = write_profile(folder, *pair, worker, {1: BREAK_EVEN})
    made = InProcessScheduler(*pair, **worker, speculative_gate_profile=str(path))
    assert made.spec_gate.describe()["profile"] == path.stem
    yield made
    made.close()


def test_acceptance_closes_it_and_a_probe_opens_it_when_acceptance_has_risen(scheduler, prompts, reference):
    seen = []
    scheduler.before_step = lambda _step: seen.append(scheduler.spec_gate.describe())
    requests = [Request(prompts[i], TOKENS) for i in GREEDY_PROMPTS]
    requests += [Request(prompt, 120, at=15, sampling=RANDOM) for prompt in prompts[6:18]]
    slots = scheduler.free_slots()
    outputs = scheduler.serve(requests)
    assert [output.token_ids for output in outputs[: len(GREEDY_PROMPTS)]] == reference
    assert scheduler.free_slots() == slots

    steps = [state for state in seen if state["running"]]
    closing, probe, failed, passed = (
        now for before, now in itertools.pairwise(steps) if now["transitions"] > before["transitions"]
    )
    assert closing["reason"].startswith("acceptance 1.")
    assert f"< break-even {BREAK_EVEN:.2f} at 15 requests, " in closing["reason"]
    assert probe["reason"].startswith("probe: acceptance was 1.")
    assert failed["reason"].startswith("probe: acceptance 1.")
    assert failed["open_steps"] - probe["open_steps"] == PROBE_STEPS - 1
    assert passed["reason"].startswith("probe: acceptance was 1.")
    assert passed["running"] == len(GREEDY_PROMPTS)
    last = steps[-1]
    assert (last["mode"], last["failed_probes"], last["passed_probes"]) == ("open", 1, 1)
    assert last["acceptance"] > BREAK_EVEN


def test_a_threshold_wins_at_run_time_and_null_returns_to_the_profile(scheduler, prompts):
    assert scheduler.spec_gate.change_settings({"speculative_disable_batch_threshold": 2})
    assert scheduler.spec_gate.describe()["profile"] is None
    seen = []
    scheduler.before_step = lambda _step: seen.append(scheduler.spec_gate.describe()["reason"])
    scheduler.serve([Request(prompts[i], 20) for i in GREEDY_PROMPTS])
    assert "running 3 >= threshold 2" in seen
    assert scheduler.spec_gate.change_settings({"speculative_disable_batch_threshold": None})
    state = scheduler.spec_gate.describe()
    assert state["profile"] == state["settings"]["profile"] == state["identity"]["policy"]["profile"]
    assert state["threshold"] == 0
