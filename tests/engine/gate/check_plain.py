"""The gate in SGLang's real scheduler: the same tokens in either mode and across switches, and no slot is ever lost."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inprocess import ATTENTION, CHAIN, DEVICE, TREE, InProcessScheduler, Output, Request, write_profile
from sglang.srt.managers.io_struct import GetInternalStateReq, SetInternalStateReq
from transformers import LlamaForCausalLM

THRESHOLD = {"speculative_disable_batch_threshold": 3}
# What these requests get accepted is below one break-even and above another, so that the load switches as well.
BREAK_EVENS = {1: 1.2, 3: 2.5, 5: 3.5}
DWELL = {"speculative_gate_dwell_steps": 3}
# Small enough that requests are retracted, that prompts are prefilled in chunks, and that the prefix cache is evicted.
TIGHT = {
    "max_running_requests": 6,
    "max_total_tokens": 480,
    "chunked_prefill_size": 24,
    "speculative_gate_sync_interval": 5,
}
WORKERS = {
    "EAGLEWorker, tree": TREE | THRESHOLD,
    "EAGLEWorker, chain, page of 4, profile": CHAIN | {"disable_overlap_schedule": True, "page_size": 4},
    "EAGLEWorkerV2": CHAIN | THRESHOLD,
    "EAGLEWorkerV2, page of 4, profile": CHAIN | {"page_size": 4},
}
if ATTENTION in ("flashinfer", "fa3"):  # the only ones with which SGLang allows a tree and pages of several tokens
    WORKERS = {
        "EAGLEWorker, tree, page of 4": TREE | THRESHOLD | {"page_size": 4},
        "EAGLEWorker, tree": TREE | THRESHOLD,
    }
ROUNDING = 0.3  # of a logit in half precision; the logits' standard deviation is about ten times as much
EXAMPLES = int(os.environ.get("SPECGATE_EXAMPLES", "200"))
LENGTHS = (7, 30, 48)
TOKENS = 96
GREEDY = {
    "plain": {},
    "stop": {"stop": ["ver", " is"]},
    "grammar": {"regex": "[a-z ,]{12,40}[.?]"},
}
OTHERS = {
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "penalty": {"frequency_penalty": 0.5},
}
if DEVICE != "cpu":  # no tokenizer there
    GREEDY = {"plain": GREEDY["plain"]}
SAMPLINGS = GREEDY | OTHERS


class Judge:
    """Judges greedy outputs of half precision by the target in float32, as single tokens may hang on rounding."""

    def __init__(self, target: str) -> None:
        self._model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        self._model.to(DEVICE)

    @torch.inference_mode()
    def check(self, prompt: list[int], output: Output) -> None:
        """Each token must be the best after those before it, or as good as that but for rounding."""
        if not output.token_ids:
            return
        ids = torch.tensor([prompt + output.token_ids], device=DEVICE)
        logits = self._model(ids).logits[0, len(prompt) - 1 : -1]
        chosen = ids[0, len(prompt) :, None]
        behind = logits.max(dim=-1, keepdim=True).values - logits.gather(-1, chosen)
        assert behind.max() < ROUNDING
        if output.logprobs:
            expected = logits.log_softmax(dim=-1).gather(-1, chosen)[:, 0].tolist()
            assert output.logprobs == pytest.approx(expected[: len(output.logprobs)], abs=ROUNDING)


class Reference(NamedTuple):
    """Greedy outputs of a server without speculation, by prompt, its length and sampling; in half precision a judge."""

    outputs: dict[tuple[int, int, str], Output]
    judge: Judge | None


@pytest.fixture(scope="module")
def reference(pair, prompts):
    """Greedy tokens and log-probabilities of each prompt's prefixes from a server without speculation."""
    scheduler = InProcessScheduler(pair.target)
    keys = [(i, length, kind) for i in range(6) for length in LENGTHS for kind in GREEDY]
    requests = [Request(prompts[i][:n], TOKENS, sampling=GREEDY[kind], return_logprob=True) for i, n, kind in keys]
    outputs = scheduler.serve(requests)
    scheduler.close()
    judge = None if ATTENTION == "triton" else Judge(pair.target)
    return Reference(dict(zip(keys, outputs, strict=True)), judge)


@pytest.fixture(params=WORKERS, scope="module")
def scheduler(request, pair, reference, tmp_path_factory):  # the reference first: one scheduler at a time
    worker = WORKERS[request.param]
    if THRESHOLD.keys() - worker.keys():
        path = write_profile(tmp_path_factory.mktemp("profile"), *pair, worker, BREAK_EVENS)
        worker = worker | {"speculative_gate_profile": str(path)}
    made = InProcessScheduler(*pair, **(worker | DWELL | TIGHT))
    yield made
    made.close()


def force(scheduler: InProcessScheduler, steps: dict[int, str | None]) -> None:
    """Have the gate forced open, forced closed or released (None) before the given steps."""

    def before_step(step: int) -> None:
        if step in steps:
            assert scheduler.spec_gate.change_settings({"speculative_gate_force": steps[step]})

    scheduler.before_step = before_step


@dataclasses.dataclass(frozen=True)
class Case:
    """A request of a property test: its prompt's place in the reference and how it is asked for."""

    prompt: int
    length: int
    tokens: int
    at: int
    lives: int | None  # steps after which it is aborted
    sampling: str
    logprob: bool
    stream: bool


cases = st.builds(
    Case,
    st.integers(0, 5),
    st.sampled_from(LENGTHS),
    st.integers(1, TOKENS),
    st.integers(0, 60),
    st.none() | st.integers(0, 40),
    st.sampled_from(list(SAMPLINGS)),
    st.booleans(),
    st.booleans(),
)
switches = st.dictionaries(st.integers(0, 120), st.sampled_from(["open", "closed", None]), max_size=12)


@pytest.mark.parametrize("forced", ["open", "closed", None])
def test_outputs_are_those_of_a_server_without_speculation(scheduler, prompts, reference, forced):
    force(scheduler, {0: forced})
    outputs = scheduler.serve([Request(prompts[i][:48], TOKENS, at=9 * i) for i in range(6)])
    for i, output in enumerate(outputs):
        if reference.judge is None:
            assert output.token_ids == reference.outputs[i, 48, "plain"].token_ids
        else:
            assert len(output.token_ids) == TOKENS
            reference.judge.check(prompts[i][:48], output)
        assert (output.verify_steps == 0) == (forced == "closed") or forced is None


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(cases, min_size=1, max_size=8), forced=switches)
def test_any_mix_keeps_its_tokens_and_gives_back_its_slots(scheduler, prompts, reference, requests, forced):
    slots = scheduler.free_slots()
    force(scheduler, {0: None} | forced)
    asked = [
        Request(
            prompts[c.prompt][: c.length],
            c.tokens,
            at=c.at,
            abort_at=None if c.lives is None else c.at + c.lives,
            sampling=SAMPLINGS[c.sampling],
            return_logprob=c.logprob,
            stream=c.stream,
        )
        for c in requests
    ]
    outputs = scheduler.serve(asked)  # runs SGLang's own checks for lost slots when it is idle
    assert scheduler.free_slots() == slots
    for case, output in zip(requests, outputs, strict=True):
        aborted = output.finished["type"] == "abort"
        if case.sampling in GREEDY and reference.judge is not None:
            reference.judge.check(prompts[case.prompt][: case.length], output)
            assert aborted or len(output.token_ids) == case.tokens
        elif case.sampling in GREEDY:
            expected = reference.outputs[case.prompt, case.length, case.sampling]
            given = len(output.token_ids)
            ids = expected.token_ids[: given if aborted else case.tokens]
            if case.sampling != "plain":
                # SGLang's own: with speculation a grammar's output ends before the end token, and EAGLEWorkerV2 keeps
                # what its last step accepted behind the end.
                assert given >= len(ids) - 1
                given = min(given, len(ids))
            assert output.token_ids[:given] == ids[:given]
            assert case.sampling != "plain" or given == len(ids)
            if case.logprob:
                assert output.logprobs[:given] == pytest.approx(expected.logprobs[:given], abs=1e-4)
        else:
            assert aborted or len(output.token_ids) == case.tokens


def test_a_refused_setting_is_answered_false_and_changes_nothing(scheduler):
    def change(**settings):
        return scheduler.set_internal_state(SetInternalStateReq(server_args=settings)).updated

    before = scheduler.spec_gate.describe()["settings"]
    assert not change(speculative_disable_batch_threshold=-1)
    assert not change(speculative_gate_low_mark=before["threshold"] + 1)
    assert not change(unknown=1)
    assert scheduler.spec_gate.describe()["settings"] == before
    assert change(speculative_disable_batch_threshold=5)
    state = scheduler.get_internal_state(GetInternalStateReq()).internal_state
    assert state["spec_gate"]["threshold"] == state["speculative_disable_batch_threshold"] == 5
    assert change(speculative_disable_batch_threshold=before["threshold"])
