"""The same work on several hosts side by side; one that fails hides no other."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from diagnostics.connect import HostUnreachable
from diagnostics.inventory import Host

Entry = dict[str, Any]


def on_each(hosts: Sequence[Host], work: Callable[[Host], Entry], timeout: float = math.inf) -> list[Entry]:
    """Return one ``{"host", "ok", "reasons", ...}`` for each host, in order; an unreachable host is not ok.

    Nor is one on which *work* raises anything else; the reason names its type. Nor is one without a result after
    *timeout* seconds; its work is left behind. The threads are daemons, so that the program ends at once,
    on Ctrl-C too, and not after the slowest host.
    """
    entries: dict[str, Entry] = {}

    def one(host: Host) -> None:
        try:
            entries[host.name] = {"host": host.name, **work(host)}
        except HostUnreachable as error:
            entries[host.name] = {"host": host.name, "ok": False, "reasons": [str(error)]}
        except Exception as error:  # a bug, or an answer that nobody thought of: the other hosts' results still count
            reason = f"unexpected {type(error).__name__}: {error}"
            entries[host.name] = {"host": host.name, "ok": False, "reasons": [reason]}

    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {"ok": False, "reasons": [f"no result within {timeout:g} s"]}
    return [entries.get(host.name) or {"host": host.name, **late} for host in hosts]
