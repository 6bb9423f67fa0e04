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

    The threads are daemons, so that Ctrl-C ends the program at once and not after the slowest host. A bug in *work* is
    raised here.
    """
    entries: dict[str, Entry] = {}
    bugs: list[BaseException] = []

    def one(host: Host) -> None:
        try:
            entries[host.name] = {"host": host.name, **work(host)}
        except HostUnreachable as error:
            entries[host.name] = {"host": host.name, "ok": False, "reasons": [str(error)]}
        except BaseException as error:
            bugs.append(error)

    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if bugs:
        raise bugs[0]
    return [entries[host.name] for host in hosts]
