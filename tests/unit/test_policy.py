"""Properties of the gate's policy over arbitrary loads, and the refusals of its settings."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_gate.policy import DEFAULT_DWELL_STEPS, Policy, Settings, SettingsError


@st.composite
def gated_settings(draw, forced=(None,)):
    threshold = draw(st.integers(1, 40))
    return Settings(
        threshold=threshold,
        low_mark=draw(st.none() | st.integers(1, threshold)),
        dwell_steps=draw(st.integers(0, 12)),
        kv_token_threshold=draw(st.sampled_from([0, 1, 1000, 50_000])),
        forced=draw(st.sampled_from(forced)),
    )


loads = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100_000)), max_size=120)


def reaches(settings, running, kv_tokens):
    return running >= settings.threshold or 0 < settings.kv_token_threshold <= kv_tokens


def falls_below(settings, running, kv_tokens):
    return running < settings.open_below and (
        settings.kv_token_threshold == 0 or kv_tokens < settings.open_below_kv_tokens
    )


@given(gated_settings(), loads)
def test_it_stays_closed_for_the_dwell_unless_the_server_was_empty(settings, load):
    policy = Policy(settings)
    steps_since = None
    for running, kv_tokens in load:
        decision = policy.decide(running, kv_tokens)
        if decision.changed and running > 0 and decision.mode == "open":
            assert steps_since is None or steps_since >= settings.dwell_steps
        if decision.changed:
            steps_since = 0
        if running == 0:
            steps_since = None
        elif steps_since is not None:
            steps_since += 1


@given(gated_settings(), loads)
def test_each_transition_and_each_stay_is_what_the_load_asks_for(settings, load):
    policy = Policy(settings)
    closed, free_at, step = False, 0, 0
    for running, kv_tokens in load:
        if running == 0:
            wanted, free_at = False, step
        elif closed:
            wanted = step < free_at or not falls_below(settings, running, kv_tokens)
        else:
            wanted = reaches(settings, running, kv_tokens)
        if wanted != closed and running > 0:
            free_at = step + settings.dwell_steps
        decision = policy.decide(running, kv_tokens)
        assert decision.mode == ("closed" if wanted else "open")
        assert decision.changed == (wanted != closed)
        assert decision.reason
        closed = wanted
        step += running > 0
    assert policy.steps == step == sum(running > 0 for running, _ in load)


@given(loads)
def test_threshold_zero_never_closes(load):
    policy = Policy(Settings(threshold=0))
    assert {policy.decide(*point).mode for point in load} <= {"off"}
    assert policy.transitions == 0
    assert policy.closed_steps == 0


@given(gated_settings(), loads)
def test_decisions_are_a_function_of_the_sequence(settings, load):
    first, second = Policy(settings), Policy(dataclasses.replace(settings))
    assert [first.decide(*point) for point in load] == [second.decide(*point) for point in load]


@given(gated_settings(), loads, st.integers(0, 50), st.integers(0, 50), st.integers(0, 100_000))
def test_more_load_never_opens_what_less_load_closes(settings, load, some, more, kv_tokens):
    lighter, heavier = Policy(settings), Policy(settings)
    for point in load:
        lighter.decide(*point)
        heavier.decide(*point)
    if lighter.decide(some, kv_tokens).mode == "closed":
        assert heavier.decide(some + more, kv_tokens + more).mode == "closed"


@given(gated_settings(forced=("open", "closed")), loads)
def test_forcing_acts_at_once_and_always(settings, load):
    policy = Policy(settings)
    assert {policy.decide(*point).mode for point in load} <= {settings.forced}
    assert policy.transitions == (settings.forced == "closed" and bool(load))


@given(gated_settings(), loads)
def test_an_empty_server_opens_at_once_and_may_close_at_once_again(settings, load):
    policy = Policy(settings)
    for point in load:
        policy.decide(*point)
    assert policy.decide(0).mode == "open"
    assert policy.decide(settings.threshold).mode == "closed"


def test_new_settings_are_obeyed_by_the_next_decision():
    policy = Policy(Settings(threshold=5))
    assert policy.decide(6).mode == "closed"
    policy.settings = policy.settings.replace({"threshold": 0})
    assert policy.decide(6) == ("off", True, "threshold 0")
    policy.settings = policy.settings.replace({"threshold": 5, "forced": "closed"})
    assert policy.decide(1) == ("closed", True, "forced closed")
    policy.settings = policy.settings.replace({"forced": None})
    assert policy.decide(1).mode == "closed", "released from forcing, the dwell holds"


def test_load_that_hovers_at_the_threshold_switches_once():
    policy = Policy(Settings(threshold=8))
    for step in range(1000):
        policy.decide((8, 7, 6, 7)[step % 4])
    assert policy.transitions == 1


def test_a_load_that_swings_over_both_marks_is_held_back_by_the_dwell():
    policy = Policy(Settings(threshold=8))
    for step in range(1000):
        policy.decide(8 if step % 2 else 1)
    assert policy.transitions <= 2 * (1000 // DEFAULT_DWELL_STEPS + 1)


def test_a_dip_between_two_waves_of_requests_costs_one_open_step():
    policy = Policy(Settings(threshold=8))
    for running in [64] * 100 + [5] + [64] * 100:
        policy.decide(running)
    assert policy.open_steps == 1


def test_open_steps_and_closed_steps_are_counted_apart():
    policy = Policy(Settings(threshold=2, dwell_steps=0))
    for running in (1, 1, 2, 3, 0, 0, 1):
        policy.decide(running)
    assert (policy.open_steps, policy.closed_steps, policy.transitions) == (3, 2, 2)


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ({"threshold": -1}, ["threshold", "-1", "0 or more"]),
        ({"threshold": 5.5}, ["threshold", "5.5", "integer"]),
        ({"threshold": "5"}, ["threshold", "'5'", "integer"]),
        ({"threshold": True}, ["threshold", "True", "integer"]),
        ({"threshold": 5, "low_mark": 6}, ["low_mark", "6", "1 to the threshold (5)"]),
        ({"threshold": 5, "low_mark": 0}, ["low_mark", "0", "1 to the threshold (5)"]),
        ({"threshold": 5, "dwell_steps": -3}, ["dwell_steps", "-3", "0 or more"]),
        ({"threshold": 5, "kv_token_threshold": -1}, ["kv_token_threshold", "-1", "0 or more"]),
        ({"threshold": 5, "forced": "shut"}, ["forced", "'shut'", "'open', 'closed'"]),
        ({"forced": "closed"}, ["forced", "threshold is 0", "set a threshold"]),
        ({"kv_token_threshold": 9}, ["kv_token_threshold", "threshold is 0", "set a threshold"]),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_was_given_and_what_is_allowed(given_values, words):
    with pytest.raises(SettingsError) as refusal:
        Settings(**given_values)
    for word in words:
        assert word in str(refusal.value)


def test_an_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match=r"treshold is no setting.*threshold, low_mark"):
        Settings().replace({"treshold": 5})


def test_the_defaults_are_described_as_they_act():
    assert Settings(threshold=5).describe() == {
        "threshold": 5,
        "low_mark": 4,
        "dwell_steps": 32,
        "kv_token_threshold": 0,
        "forced": None,
        "profile": None,
    }


def test_decision_cost(benchmark):
    policy = Policy(Settings(threshold=48, kv_token_threshold=256_000))
    assert benchmark(policy.decide, 64, 64 * 2048).mode == "closed"
