"""Whether speculation pays, by the acceptance of late and a host's profile. Pure Python.

Acceptance is the number of tokens that a verify step gives a request, the bonus token included. It is the traffic's and
can only be seen while the gate is open; so a closed gate opens for a few steps now and then: a probe.
"""

from __future__ import annotations

import math

from spec_gate.profile import Profile

# Verify steps over which the acceptance is averaged (the time constant of an exponential average).
AVERAGED_STEPS = 32
# Verify steps before an acceptance is known. In the overlap loop the last result of a probe comes after its end.
MEASURED_STEPS = 7
PROBE_STEPS = 8
# How far beyond the break-even the acceptance must be for a transition. At the break-even both modes cost the same:
# waiting costs at most this share.
MARGIN = 0.03
# A transition costs about one closed step: the draft catches up, and the loops are entered anew.
TRANSITION_STEPS = 1
# What probing may cost: this share of the closed steps' time, halved with each probe that fails in a row, twice at
# most.
PROBE_SHARE = 0.05
MOST_HALVINGS = 2


class Acceptance:
    """The acceptance of late: an exponential average over verify steps, weighted by their requests.

    `value` is None until MEASURED_STEPS have been seen. After `restart` it keeps its value until as many new ones have
    been seen, which then alone make it.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.restart()

    def restart(self) -> None:
        """Leave what was seen before out of what is seen from now on."""
        self._steps, self._tokens, self._requests = 0, 0.0, 0.0

    def add(self, requests: int, tokens: int) -> None:
        """Take in a verify step of `requests` that accepted `tokens`."""
        kept = 1 - 1 / AVERAGED_STEPS
        self._steps += 1
        self._tokens = self._tokens * kept + tokens
        self._requests = self._requests * kept + requests
        if self._steps >= MEASURED_STEPS and self._requests:
            self.value = self._tokens / self._requests


class ProfileRule:
    """Closes when the acceptance of late is below the break-even of the present batch and context; opens above it.

    While closed it probes: it opens for PROBE_STEPS steps, measures, and closes again unless speculation now pays. What
    a probe has cost, in closed steps, is known afterwards: two transitions, and for each of its steps break-even less
    acceptance, as an open step takes the time of break-even closed ones and gives acceptance tokens. The next probe
    waits until that is PROBE_SHARE of the closed steps since, and for the dwell. Where not even a fully accepted draft
    would pay, there are no probes.
    """

    def __init__(self, profile: Profile) -> None:
        self.break_even: float | None = None  # as of the last decision
        self.passed_probes = 0
        self.failed_probes = 0
        self._profile = profile
        self._acceptance = Acceptance()
        self._observed = 0  # verify steps since the next probe was last put off
        self._until_probe = 0  # closed steps before the next probe
        self._probe_left: int | None = None  # steps that the running probe has left; None without one
        self._halvings = 0

    @property
    def acceptance(self) -> float | None:
        """The acceptance of late; None until enough verify steps were seen."""
        return self._acceptance.value

    def observe(self, requests: int, tokens: int) -> None:
        """Take in the result of one verify step."""
        self._observed += 1
        self._acceptance.add(requests, tokens)

    def wanted(self, closed: bool, held: bool, dwell_steps: int, running: int, kv_tokens: int) -> tuple[bool, str]:
        """Whether the gate is to be closed for the next step, and why.

        closed: whether it is now. held: whether it has been for less than `dwell_steps` steps.
        running: requests, 1 or more. kv_tokens: resident for them, in all.
        """
        context = kv_tokens / running
        self.break_even = self._profile.break_even(running, context)
        place = f"break-even {self.break_even:.2f} at {running} requests, {context:.0f} tokens"
        if closed:
            self._probe_left = None  # it was closed by force during a probe
            return self._while_closed(held, place)
        return self._while_open(dwell_steps, place)

    def _while_open(self, dwell_steps: int, place: str) -> tuple[bool, str]:
        if self._probe_left:
            self._probe_left -= 1
            return False, "probe"
        acceptance, break_even = self.acceptance, self.break_even
        assert break_even is not None
        if self._probe_left == 0:
            self._probe_left = None
            if acceptance is None or acceptance < break_even:
                self.failed_probes += 1
                self._put_off_probe(break_even, min(self._halvings + 1, MOST_HALVINGS), dwell_steps)
                return True, f"probe: acceptance {_text(acceptance)} < {place}"
            self.passed_probes += 1
        if acceptance is None:
            return False, "acceptance not yet known"
        if acceptance < break_even * (1 - MARGIN):
            # A burst that is closed at once, by what is known, must not put off the probe that would tell more.
            if self._observed >= MEASURED_STEPS:
                self._put_off_probe(break_even, 0, dwell_steps)
            return True, f"acceptance {_text(acceptance)} < {place}"
        return False, "acceptance not below break-even"

    def _while_closed(self, held: bool, place: str) -> tuple[bool, str]:
        self._until_probe -= 1
        acceptance, break_even = self.acceptance, self.break_even
        assert break_even is not None
        if not held and acceptance is not None and acceptance > break_even * (1 + MARGIN):
            return False, f"acceptance {_text(acceptance)} > {place}"
        # Not held by the dwell, which begins anew with each burst that is closed at once: short ones would never be
        # probed.
        if self._until_probe < 0 and break_even < self._profile.most_accepted:
            self._probe_left = PROBE_STEPS - 1
            self._acceptance.restart()
            return False, f"probe: acceptance was {_text(acceptance)}, {place}"
        return True, "acceptance not above break-even"

    def _put_off_probe(self, break_even: float, halvings: int, dwell_steps: int) -> None:
        self._halvings = halvings
        self._observed = 0
        lost = PROBE_STEPS * max(0.0, break_even - (self.acceptance or 1.0))
        paid_after = math.ceil((2 * TRANSITION_STEPS + lost) * 2**halvings / PROBE_SHARE)
        self._until_probe = max(paid_after, dwell_steps)


def _text(acceptance: float | None) -> str:
    return "unknown" if acceptance is None else f"{acceptance:.2f}"
