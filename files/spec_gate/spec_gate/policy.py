"""When the gate closes and when it opens again. Pure Python: it needs neither torch nor SGLang.

Closed means that speculation is off. The decision depends only on the number of running requests, on their resident
KV tokens, on what verify steps have accepted, and on the decisions before it. Every tensor-parallel rank sees the same
numbers, so all ranks decide alike; time and measurements of a GPU, which differ between ranks, have no place here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from spec_gate.profile import Profile
from spec_gate.profile_rule import ProfileRule

Mode = Literal["open", "closed", "off"]

DEFAULT_DWELL_STEPS = 32


class SettingsError(ValueError):
    """A setting has a value that is not allowed. The message says what was given, what is allowed and what to do."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting} {message}")
        self.setting = setting
        self.message = message


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the operator chose.

    threshold: close at this many running requests; 0 leaves the decision to the profile, and without one switches the
        gate off: then it never closes.
    low_mark: open again below this many running requests, 1 to `threshold`; None takes three quarters of the
        threshold, rounded up. Where speculation stops paying, the two modes cost about the same, and a quarter below
        that they are still close: staying closed there costs little, while a load that hovers at the threshold does
        not switch at each request that finishes.
    dwell_steps: decode steps between two transitions, at least. A transition costs about as much as one step (the
        draft model catches up in one forward), so 32 bounds what switching can cost to about 3 %.
    kv_token_threshold: close at this many resident KV tokens too, whatever the number of requests; 0 leaves this
        trigger out. It opens again below three quarters of it.
    forced: hold the gate "open" or "closed" whatever the load; None leaves the decision to the load.
    profile: close and open by the acceptance of late and this host's break-even (see ProfileRule); None leaves that
        out. Not used while there is a threshold.
    """

    threshold: int = 0
    low_mark: int | None = None
    dwell_steps: int = DEFAULT_DWELL_STEPS
    kv_token_threshold: int = 0
    forced: Literal["open", "closed"] | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        _check_count("threshold", self.threshold, "0 leaves it out")
        _check_count("dwell_steps", self.dwell_steps, "0 lets it switch at every step")
        _check_count("kv_token_threshold", self.kv_token_threshold, "0 leaves this trigger out")
        highest = max(self.threshold, 1)
        if self.low_mark is not None and not (_is_count(self.low_mark) and 1 <= self.low_mark <= highest):
            raise SettingsError(
                "low_mark",
                f"is {self.low_mark!r}; allowed is an integer from 1 to the threshold ({self.threshold}): "
                "lower it, raise the threshold, or leave it out to take three quarters of the threshold",
            )
        if self.forced not in (None, "open", "closed"):
            raise SettingsError(
                "forced", f"is {self.forced!r}; allowed are 'open', 'closed' and None: use None to let the load decide"
            )
        if self.threshold == 0:
            for name in ("low_mark", "kv_token_threshold", "forced"):
                if getattr(self, name) and not (name == "forced" and self.gated):
                    raise SettingsError(
                        name,
                        f"is {getattr(self, name)!r} while threshold is 0; it is allowed with a threshold of 1 "
                        f"or more: set a threshold, or leave {name} out",
                    )

    @property
    def gated(self) -> bool:
        """Whether there is anything by which the gate could close."""
        return self.threshold > 0 or self.profile is not None

    @property
    def needs_kv_tokens(self) -> bool:
        """Whether decisions depend on the resident KV tokens."""
        return self.kv_token_threshold > 0 or (self.threshold == 0 and self.profile is not None)

    @property
    def open_below(self) -> int:
        """Running requests below which the gate opens again."""
        return self.low_mark if self.low_mark is not None else self.threshold - self.threshold // 4

    @property
    def open_below_kv_tokens(self) -> int:
        """Resident KV tokens below which the gate opens again; 0 without that trigger."""
        return self.kv_token_threshold - self.kv_token_threshold // 4

    def replace(self, changes: Mapping[str, object]) -> Settings:
        """These settings with `changes` (field name to value; None for the default).

        Raises SettingsError for an unknown name or a value that is not allowed; these settings are then unchanged.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in changes:
            if name not in defaults:
                raise SettingsError(name, f"is no setting of the gate; known are {', '.join(defaults)}: correct it")
        values = {name: defaults[name] if value is None else value for name, value in changes.items()}
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]  # __post_init__ checks the values

    def describe(self) -> dict[str, object]:
        """The settings in force, defaults filled in and the profile by its id, for the identity evidence."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"low_mark": self.open_below, "profile": self.profile.id if self.profile else None}


class Decision(NamedTuple):
    """The mode for the next step, why it is so, and whether it was closed and no longer is, or the other way round."""

    mode: Mode
    changed: bool
    reason: str


class Policy:
    """The gate's state machine: one `decide` before each decode step, one `observe` for each result of a verify step.

    A transition is a change between closed and not closed. The gate closes at once, and does not open within
    `dwell_steps` steps of that, except that forcing and threshold 0 act at once, that probes have a rhythm of their own
    (see ProfileRule), and that a server without requests opens at once and forgets its last transition: it takes no
    steps, so a dwell in steps would keep the next single request slow.

    Only opening waits, as the two mistakes do not cost alike: a step that speculates with many requests takes as long
    as several plain ones, a plain step with few loses less than one token per request.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings  # may be replaced between two decisions, the profile excepted; the next one obeys
        self.by_profile = ProfileRule(settings.profile) if settings.profile else None
        self.mode: Mode = "open" if settings.gated else "off"
        self.reason = "start" if settings.gated else "threshold 0"
        self.transitions = 0
        self.open_steps = 0  # decided open, or off
        self.closed_steps = 0
        self._dwelt: int | None = None  # steps since the last transition; None when nothing is to be waited for

    @property
    def steps(self) -> int:
        """Decode steps decided so far."""
        return self.open_steps + self.closed_steps

    def observe(self, requests: int, tokens: int) -> None:
        """Take in the result of one verify step: `tokens` accepted by it for `requests`, bonus tokens included."""
        if self.by_profile is not None:
            self.by_profile.observe(requests, tokens)

    def decide(self, running: int, kv_tokens: int = 0) -> Decision:
        """Decide the mode of the next decode step.

        running: unfinished requests of the decode batch; with 0 no step follows, and none is counted.
        kv_tokens: KV tokens resident for them, in all.
        """
        mode, reason = self._wanted(running, kv_tokens)
        changed = (mode == "closed") != (self.mode == "closed")
        if changed:
            self.transitions += 1
            self._dwelt = 0
        self.mode, self.reason = mode, reason
        if running == 0:
            self._dwelt = None
        else:
            if self._dwelt is not None:
                self._dwelt += 1
            if mode == "closed":
                self.closed_steps += 1
            else:
                self.open_steps += 1
        return Decision(mode, changed, reason)

    def _wanted(self, running: int, kv_tokens: int) -> tuple[Mode, str]:
        s = self.settings
        if not s.gated:
            return "off", "threshold 0"
        if s.forced is not None:
            return s.forced, f"forced {s.forced}"
        if running == 0:
            return "open", "no requests"
        closed = self.mode == "closed"
        held = closed and self._dwelt is not None and self._dwelt < s.dwell_steps
        if s.threshold == 0 and self.by_profile is not None:
            closes, reason = self.by_profile.wanted(closed, held, s.dwell_steps, running, kv_tokens)
            return ("closed" if closes else "open"), reason
        if held:
            return "closed", f"dwell of {s.dwell_steps} steps"
        if not closed:
            if running >= s.threshold:
                return "closed", f"running {running} >= threshold {s.threshold}"
            if s.kv_token_threshold and kv_tokens >= s.kv_token_threshold:
                return "closed", f"KV tokens {kv_tokens} >= threshold {s.kv_token_threshold}"
            return "open", f"below threshold {s.threshold}"
        if running >= s.open_below:
            return "closed", f"running not below low mark {s.open_below}"
        if s.kv_token_threshold and kv_tokens >= s.open_below_kv_tokens:
            return "closed", f"KV tokens not below low mark {s.open_below_kv_tokens}"
        return "open", f"running {running} < low mark {s.open_below}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_count(name: str, value: object, zero: str) -> None:
    if not _is_count(value):
        raise SettingsError(name, f"is {value!r}; allowed is an integer of 0 or more ({zero}): correct it")
