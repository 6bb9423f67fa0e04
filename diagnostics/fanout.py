"""The same work on several hosts side by side; one that fails hides no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from diagnostics.connect import HostUnreachable
from diagnostics.inventory import Host

Entry = dict[str, Any]


def on_each(hosts: Sequence[Host], work: Callable[[Host], Entry]) -> list[Entry]:
    """Return one ``{"host", "ok", "reasons", ...}`` for each host, in order; an unreachable host is not ok.

    Nor is one on which *work* raises anything else; the reason names its type. The threads are daemons, so that Ctrl-C
    ends the program at once and not after the slowest host.
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
    for thread in threads:
        thread.join()
    return [entries[host.name] for host in hosts]
