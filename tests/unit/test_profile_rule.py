"""Properties of the gate's decisions by a profile, over arbitrary loads and acceptances."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_gate.policy import DEFAULT_DWELL_STEPS, Policy, Settings
from spec_gate.profile import KEY_FIELDS, Cell, Profile
from spec_gate.profile_rule import (
    MARGIN,
    MOST_HALVINGS,
    PROBE_SHARE,
    PROBE_STEPS,
    TRANSITION_STEPS,
)

MOST_ACCEPTED = 4
CONTEXT = 500


def profile(*break_evens):
    """A profile whose break-even at 1, 2, 3... requests is as given, whatever the context."""
    shape = {"num_steps": MOST_ACCEPTED - 1, "eagle_topk": 4, "num_draft_tokens": 8}
    key = dict.fromkeys(KEY_FIELDS) | {"speculative": shape}
    return Profile("0123456789ab", "now", key, [Cell(i, CONTEXT, be, 1.0) for i, be in enumerate(break_evens, 1)])


class Server:
    """A server of one policy: takes decode steps, and has the result of a verify step `lag` steps later."""

    def __init__(self, *break_evens, dwell_steps=DEFAULT_DWELL_STEPS, lag=0):
        self.policy = Policy(Settings(profile=profile(*break_evens), dwell_steps=dwell_steps))
        self.decisions = []
        self._lag = lag
        self._results = []

    def step(self, running, acceptance, kv_tokens=None):
        """One decode step of requests of which each gets `acceptance` tokens if it is a verify step."""
        while len(self._results) > self._lag or (self._results and not running):
            self.policy.observe(*self._results.pop(0))
        decision = self.policy.decide(running, running * CONTEXT if kv_tokens is None else kv_tokens)
        if running and decision.mode == "open":
            self._results.append((running, running * acceptance))
        self.decisions.append(decision)
        return decision

    def steps(self, number, running, acceptance):
        return [self.step(running, acceptance) for _ in range(number)]

    @property
    def rule(self):
        return self.policy.by_profile


acceptances = st.floats(1, MOST_ACCEPTED)
break_evens = st.lists(st.floats(0.5, 6), min_size=1, max_size=6)
# Running requests, their acceptance, and for how many steps.
phases = st.lists(st.tuples(st.integers(0, 8), acceptances, st.integers(1, 100)), max_size=12)
lags = st.integers(0, 1)


def served(break_evens, phases, dwell_steps=DEFAULT_DWELL_STEPS, lag=0):
    server = Server(*break_evens, dwell_steps=dwell_steps, lag=lag)
    loads = [(running, acceptance) for running, acceptance, number in phases for _ in range(number)]
    for load in loads:
        server.step(*load)
    return server, loads


@given(break_evens, phases, lags, st.integers(0, 60))
def test_it_stays_closed_for_the_dwell_but_for_probes(break_evens, phases, lag, dwell):
    server, loads = served(break_evens, phases, dwell, lag)
    since = None
    for (running, _), decision in zip(loads, server.decisions, strict=True):
        if decision.changed and running and decision.mode == "open" and not decision.reason.startswith("probe"):
            assert since is None or since >= dwell
        if decision.changed:
            since = 0
        if running == 0:
            since = None
        elif since is not None:
            since += 1


@given(break_evens, phases, lags, st.integers(0, 60))
def test_however_the_load_changes_probes_are_short_and_far_between(break_evens, phases, lag, dwell):
    server, loads = served(break_evens, phases, dwell, lag)
    least = max(dwell, 2 * TRANSITION_STEPS / PROBE_SHARE)
    closed = least  # the first needs no steps before it: nothing was known
    probe_steps = None
    for (running, _), decision in zip(loads, server.decisions, strict=True):
        if decision.changed and decision.mode == "open" and decision.reason.startswith("probe"):
            assert closed >= least
            closed, probe_steps = 0, 0
        if running and decision.mode == "closed":
            closed += 1
            assert probe_steps is None or not decision.reason.startswith("probe") or probe_steps == PROBE_STEPS
            probe_steps = None
        elif running and probe_steps is not None:
            probe_steps += 1


@settings(max_examples=40)
@given(st.floats(1.1, 3.5), st.integers(1, 8), lags)
def test_while_speculation_does_not_pay_probes_cost_their_share_and_at_last_a_quarter_of_it(break_even, running, lag):
    server = Server(break_even, lag=lag)
    server.steps(3000, running, 1.0)
    cost = 2 * TRANSITION_STEPS + PROBE_STEPS * (break_even - 1)
    spent = server.rule.failed_probes * cost
    assert 0 < spent <= PROBE_SHARE * server.policy.closed_steps
    assert spent <= PROBE_SHARE / 2**MOST_HALVINGS * server.policy.closed_steps + 2 * cost
    openings = 1 + server.rule.failed_probes + (server.policy.mode == "open")
    assert server.policy.open_steps <= openings * (PROBE_STEPS + lag)


@given(break_evens, phases, lags)
def test_equal_inputs_give_equal_decisions(break_evens, phases, lag):
    assert served(break_evens, phases, lag=lag)[0].decisions == served(break_evens, phases, lag=lag)[0].decisions


# Within the margin, but not so near to the break-even that rounding decides.
factors = st.floats(1 - MARGIN + 0.001, 0.999) | st.floats(1.001, 1 + MARGIN - 0.001)


@settings(max_examples=40)
@given(st.floats(1.1, 3.8), st.integers(1, 8), lags, factors)
def test_no_thrash_at_the_break_even(break_even, running, lag, factor):
    server = Server(break_even, lag=lag)
    server.steps(1500, running, break_even * factor)
    assert server.policy.transitions == 0
    server.steps(200, running, 1.0)
    transitions = server.policy.transitions
    server.steps(2000, running, break_even * factor)
    if factor >= 1:
        assert server.policy.transitions <= transitions + 3
        assert server.policy.mode == "open"
    else:
        assert server.policy.transitions - transitions <= 2 * 2000 * PROBE_SHARE / (2 * TRANSITION_STEPS)


@settings(max_examples=40)
@given(st.floats(1.3, 3), st.integers(1, 8), lags)
def test_it_closes_when_acceptance_falls_and_opens_when_it_rises(break_even, running, lag):
    server = Server(break_even, lag=lag)
    assert {d.mode for d in server.steps(500, running, MOST_ACCEPTED)} == {"open"}
    fallen = server.steps(500, running, 1.0)
    closing = next(d for d in fallen if d.changed)
    assert fallen.index(closing) < 100
    assert closing.reason.startswith("acceptance ")
    assert f"< break-even {break_even:.2f} at {running} requests, {CONTEXT} tokens" in closing.reason
    assert server.policy.mode == "closed" or server.step(running, 1.0).reason.startswith("probe")
    risen = server.steps(1500, running, MOST_ACCEPTED)
    assert risen[-1].mode == "open"
    assert server.rule.passed_probes == 1
    assert sum(d.changed for d in risen) <= 2


def test_it_opens_without_a_probe_when_the_load_falls_below_what_the_acceptance_pays_for():
    server = Server(1.5, 2.5)
    server.steps(100, 2, 2.0)
    assert server.policy.mode == "closed"
    opened = next(d for d in server.steps(DEFAULT_DWELL_STEPS, 1, 2.0) if d.changed)
    assert opened.reason == "acceptance 2.00 > break-even 1.50 at 1 requests, 500 tokens"
    assert server.policy.mode == "open"
    assert server.rule.passed_probes == server.rule.failed_probes == 0


def test_the_context_counts():
    key = dict.fromkeys(KEY_FIELDS) | {"speculative": {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}}
    policy = Policy(Settings(profile=Profile("x", "now", key, [Cell(1, 100, 1.5, 1.0), Cell(1, 1100, 2.5, 1.0)])))
    for context, mode in ((100, "open"), (1100, "closed")):
        for _ in range(50):
            decision = policy.decide(2, 2 * context)
            if decision.mode == "open":
                policy.observe(2, 4)
        assert decision.mode == mode


def test_where_no_draft_could_pay_there_are_no_probes():
    server = Server(MOST_ACCEPTED + 1)
    server.steps(2000, 3, MOST_ACCEPTED)
    assert server.policy.transitions == 1
    assert server.policy.mode == "closed"


def test_an_empty_server_opens_at_once_and_closes_again_by_what_is_known():
    server = Server(2.0)
    server.steps(40, 4, 1.0)
    assert server.policy.mode == "closed"
    for _ in range(3):
        assert server.step(0, 1.0).mode == "open"
        closing = server.step(4, 1.0)
        assert (closing.mode, closing.changed) == ("closed", True)


@pytest.mark.parametrize("burst", [2, PROBE_STEPS, DEFAULT_DWELL_STEPS + 1])
def test_short_bursts_do_not_put_off_the_probe(burst):
    server = Server(2.0)
    server.steps(40, 4, 1.0)
    for _ in range(400 // burst):
        server.step(0, 1.0)
        server.steps(burst, 4, MOST_ACCEPTED)
    assert server.policy.mode == "open"
    assert server.rule.passed_probes == 1


def test_a_threshold_wins_and_zero_returns_to_the_profile():
    server = Server(3.0)
    server.policy.settings = server.policy.settings.replace({"threshold": 5})
    assert {d.mode for d in server.steps(200, 4, 1.0)} == {"open"}
    assert server.step(5, 1.0).reason == "running 5 >= threshold 5"
    server.policy.settings = server.policy.settings.replace({"threshold": None})
    assert server.policy.settings.threshold == 0
    assert (
        server.steps(PROBE_STEPS + 1, 4, 1.0)[-1].reason
        == "probe: acceptance 1.00 < break-even 3.00 at 4 requests, 500 tokens"
    )


@pytest.mark.parametrize("forced", ["open", "closed"])
def test_forcing_acts_at_once_and_always(forced):
    server = Server(1.5, 3.0)
    server.policy.settings = server.policy.settings.replace({"forced": forced})
    for running, acceptance in ((1, 1.0), (2, 4.0), (0, 1.0), (2, 1.0)):
        assert {d.mode for d in server.steps(100, running, acceptance)} == {forced}
    server.policy.settings = server.policy.settings.replace({"forced": None})
    assert server.steps(100, 2, 1.0)[-1].mode == "closed"


def test_forced_closed_from_the_start_it_measures_when_it_is_released():
    server = Server(2.0)
    server.policy.settings = server.policy.settings.replace({"forced": "closed"})
    server.steps(50, 2, 3.0)
    server.policy.settings = server.policy.settings.replace({"forced": None})
    assert server.step(2, 3.0).reason.startswith("probe: acceptance was unknown")
    server.steps(50, 2, 3.0)
    assert server.policy.mode == "open"


# Break-even by requests, as on a GPU: verifying is nearly free with few of them.
BREAK_EVENS = {1: 1.2, 4: 1.4, 8: 1.8, 16: 2.4, 32: 3.0, 64: 3.5}
TOKENS = 1500  # of each request, of each kind of traffic in turns


def accepted(mean, requests, numbers):
    """Tokens of one verify step: each draft token is as likely to be right as the one before it, if that was right."""
    low, high = 0.0, 1.0
    for _ in range(20):
        right = (low + high) / 2
        low, high = (right, high) if sum(right**i for i in range(MOST_ACCEPTED)) < mean else (low, right)
    chances = [right ** (i - 1) * (1 - right) for i in range(1, MOST_ACCEPTED)] + [right ** (MOST_ACCEPTED - 1)]
    return sum(numbers.choices(range(1, MOST_ACCEPTED + 1), chances, k=requests))


@pytest.mark.parametrize("running", BREAK_EVENS)
@pytest.mark.parametrize("kinds", [(3.2, 1.3), (2.2, 1.5), (1.5,), (2.5,), (3.5,)])
def test_on_modelled_costs_it_comes_near_to_the_better_mode_or_beats_it(kinds, running):
    numbers = random.Random(running)
    key = dict.fromkeys(KEY_FIELDS) | {"speculative": {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8}}
    cells = [Cell(requests, CONTEXT, cost, 1.0) for requests, cost in BREAK_EVENS.items()]
    policy = Policy(Settings(profile=Profile("x", "now", key, cells)))
    gated = 0.0
    for mean in kinds * 2:
        tokens = 0
        while tokens < TOKENS * running:
            decision = policy.decide(running, running * CONTEXT)
            if decision.mode == "open":
                step = accepted(mean, running, numbers)
                policy.observe(running, step)
            else:
                step = running
            gated += (BREAK_EVENS[running] if decision.mode == "open" else 1.0) + decision.changed * TRANSITION_STEPS
            tokens += step
    opened = sum(TOKENS / mean * BREAK_EVENS[running] for mean in kinds * 2)
    closed = TOKENS * len(kinds * 2)
    assert gated <= min(opened, closed) / 0.95


def test_decision_cost_by_profile(benchmark):
    cells = [Cell(2**b, 2**c, 1.5 + b, 1.0) for b in range(9) for c in range(7, 18, 2)]
    key = dict.fromkeys(KEY_FIELDS) | {"speculative": {"num_steps": 9, "eagle_topk": 4, "num_draft_tokens": 16}}
    policy = Policy(Settings(profile=Profile("x", "now", key, cells)))

    def step():
        policy.observe(48, 75)
        return policy.decide(48, 48 * 2500)

    assert benchmark(step).mode in ("open", "closed")
