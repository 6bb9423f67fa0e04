"""The rule by which two arms are called different is right as often as it says, with noise that is known."""

from __future__ import annotations

from random import Random

import pytest

from diagnostics.noise import difference

TRIALS = 4000


def calls(true_ratio: float, noise: float, rounds: int, drift: float = 0.0) -> dict[str, float]:
    """How often each word is said of two arms, whose rounds share *drift* and have *noise* of their own."""
    random = Random(1)
    said: dict[str, int] = {}
    for _ in range(TRIALS):
        shared = [random.lognormvariate(0, drift) for _ in range(rounds)]
        a = [100 * true_ratio * level * random.lognormvariate(0, noise) for level in shared]
        b = [100 * level * random.lognormvariate(0, noise) for level in shared]
        word = difference(a, b).says
        said[word] = said.get(word, 0) + 1
    return {word: count / TRIALS for word, count in said.items()}


@pytest.mark.parametrize("rounds", [3, 5, 40])
@pytest.mark.parametrize("noise", [0.001, 0.05, 0.3])
def test_equal_arms_are_called_different_once_in_twenty(rounds: int, noise: float) -> None:
    said = calls(1.0, noise, rounds)
    assert 0.03 < said["faster"] + said["slower"] < 0.07
    assert said["within the noise"] > 0.93


def test_a_difference_well_above_the_noise_is_called_and_in_the_right_direction() -> None:
    assert calls(1.2, 0.02, 3)["faster"] > 0.95
    assert calls(1 / 1.2, 0.02, 3)["slower"] > 0.95


def test_a_difference_below_the_noise_is_seldom_called() -> None:
    assert calls(1.01, 0.05, 3)["within the noise"] > 0.9


def test_what_a_round_does_to_both_arms_does_not_count() -> None:
    """Ranges that overlap, because the machine was slower in one round, hide no difference that each round shows."""
    assert calls(1.2, 0.02, 3, drift=0.5)["faster"] > 0.95


def test_the_interval_is_told() -> None:
    found = difference([110.0, 121.0, 100.0], [100.0, 100.0, 100.0])
    assert found.ratio == pytest.approx(1.1, rel=1e-6)
    assert found.interval is not None
    low, high = found.interval
    # By hand: logs 0.0953, 0.1906, 0; mean 0.0953, standard deviation 0.0953, half width 4.303 * 0.0953 / sqrt(3).
    assert (low, high) == (pytest.approx(0.868, abs=1e-3), pytest.approx(1.394, abs=1e-3))
    assert found.says == "within the noise"


def test_two_rounds_call_nothing() -> None:
    found = difference([200.0, 200.0], [100.0, 100.0])
    assert (found.ratio, found.interval, found.says) == (pytest.approx(2.0), None, "too few rounds")
