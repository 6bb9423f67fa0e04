"""The gate's Prometheus metrics, named and labelled as SGLang's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

INTERVAL_S = 1.0


class Metrics:
    """Made after SGLang has set up Prometheus in this process. `labels` are those of SGLang's own metrics."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Gauge  # reads at import where the processes' values are gathered

        def gauge(name: str, documentation: str) -> Gauge:
            made = Gauge(f"sglang:spec_gate_{name}", documentation, labels, multiprocess_mode="mostrecent")
            return made.labels(**labels)

        def counter(name: str, documentation: str, key: str, values: tuple[str, ...]) -> dict[str, Counter]:
            made = Counter(f"sglang:spec_gate_{name}", documentation, [*labels, key])
            return {value: made.labels(**labels, **{key: value}) for value in values}

        self._closed = gauge("closed", "1 while speculation is off, 0 while it is on.")
        self._threshold = gauge("threshold", "Running requests at which speculation goes off.")
        self._pending = gauge("pending_sync_steps", "Steps that the draft model has yet to catch up with.")
        self._accept_length = gauge(
            "accept_length_since_open", "Tokens per verify step since speculation last came on."
        )
        self._acceptance = gauge("acceptance", "Tokens per verify step of late, as the profile is applied to them.")
        self._break_even = gauge("break_even", "Tokens per verify step above which speculation pays, by the profile.")
        self._transitions = counter("transitions", "Switches of speculation.", "to", ("closed", "open"))
        self._probes = counter("probes", "Short openings to measure the acceptance.", "outcome", ("failed", "passed"))
        self._steps = counter("steps", "Decode steps.", "mode", ("closed", "open"))
        synced = Counter("sglang:spec_gate_synced_tokens", "Tokens that the draft model caught up with.", labels)
        seconds = Counter("sglang:spec_gate_sync_seconds", "Seconds spent on launching that.", labels)
        self._synced_tokens, self._sync_seconds = synced.labels(**labels), seconds.labels(**labels)
        self._seen: dict[str, float] = {}
        self._next = 0.0

    def update(self, state: Callable[[], Mapping[str, object]]) -> None:
        """Bring the metrics up to the gate's `state`, once in INTERVAL_S at most."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        now = state()
        self._closed.set(now["mode"] == "closed")
        self._threshold.set(now["threshold"])
        self._pending.set(now["pending_sync_steps"])
        self._accept_length.set(now["accept_length_since_open"] or 0)
        self._acceptance.set(now["acceptance"] or 0)
        self._break_even.set(now["break_even"] or 0)
        # The gate starts open, and each second transition opens it.
        self._count(self._transitions["closed"], "to_closed", (now["transitions"] + 1) // 2)
        self._count(self._transitions["open"], "to_open", now["transitions"] // 2)
        self._count(self._probes["passed"], "passed_probes", now["passed_probes"])
        self._count(self._probes["failed"], "failed_probes", now["failed_probes"])
        self._count(self._steps["closed"], "closed_steps", now["closed_steps"])
        self._count(self._steps["open"], "open_steps", now["open_steps"])
        self._count(self._synced_tokens, "synced_tokens", now["synced_tokens"])
        self._count(self._sync_seconds, "sync_seconds", now["sync_seconds"])

    def _count(self, counter: object, name: str, total: float) -> None:
        counter.inc(total - self._seen.get(name, 0))
        self._seen[name] = total
