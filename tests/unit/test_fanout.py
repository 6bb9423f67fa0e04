"""Work on several hosts at once, and its interruption."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diagnostics.fanout import Entry, Interruptible, on_each
from diagnostics.inventory import Host

HOSTS = [cast(Host, SimpleNamespace(name=name)) for name in ("a", "b")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_interrupted_is_waited_for_and_its_result_counts(number: signal.Signals) -> None:
    interruptible = Interruptible()
    both_wait = threading.Barrier(3)

    async def until_cancelled() -> Entry:
        both_wait.wait()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)  # what it changed is put back, which takes a while
            return {"ok": False, "reasons": ["interrupted"]}
        return {"ok": True, "reasons": []}

    def signalled() -> None:
        both_wait.wait()
        time.sleep(0.3)  # until the main thread waits as well
        os.kill(os.getpid(), number)

    threading.Thread(target=signalled, daemon=True).start()
    entries = on_each(HOSTS, lambda host: interruptible.run(until_cancelled()), interruptible=interruptible)
    assert [(entry["host"], entry["reasons"]) for entry in entries] == [("a", ["interrupted"]), ("b", ["interrupted"])]


def test_a_host_without_a_result_in_time_hides_no_other() -> None:
    never = threading.Event()

    def work(host: Any) -> Entry:
        if host.name == "a":
            never.wait(30)
        return {"ok": True, "reasons": []}

    late, other = on_each(HOSTS, work, timeout=0.3)
    never.set()
    assert late == {"host": "a", "ok": False, "reasons": ["no result within 0.3 s"]}
    assert other == {"host": "b", "ok": True, "reasons": []}
