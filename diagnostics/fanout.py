"""The same work on several hosts side by side; one that fails hides no other."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from diagnostics.connect import HostUnreachable
from diagnostics.inventory import Host

Entry = dict[str, Any]

STOP_WAIT_S = 30.0


class Interruptible:
    """Work of several threads that Ctrl-C ends in an orderly way: what it changed on a server is put back first.

    Each thread's coroutine is cancelled and must return what it has.
    """

    def __init__(self) -> None:
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        self._lock = threading.Lock()
        self._interrupted = False

    def run(self, coroutine: Coroutine[Any, Any, Entry]) -> Entry:
        """Like ``asyncio.run``, in any thread."""

        async def main() -> Entry:
            task = asyncio.ensure_future(coroutine)
            with self._lock:
                self._tasks.append((asyncio.get_running_loop(), task))
                if self._interrupted:
                    task.cancel()
            return await task

        return asyncio.run(main())

    def interrupt(self) -> None:
        """Cancel what runs, and what will."""
        with self._lock:
            self._interrupted = True
            for loop, task in self._tasks:
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    loop.call_soon_threadsafe(task.cancel)


@contextlib.contextmanager
def _ends_are_interrupts() -> Iterator[None]:
    """Let the ends that a shell or a lost terminal sends count as Ctrl-C."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_each(
    hosts: Sequence[Host],
    work: Callable[[Host], Entry],
    timeout: float = math.inf,
    interruptible: Interruptible | None = None,
) -> list[Entry]:
    """Return one ``{"host", "ok", "reasons", ...}`` for each host, in order; an unreachable host is not ok.

    Nor is one on which *work* raises anything else; the reason names its type. Nor is one without a result after
    *timeout* seconds; its work is left behind. The threads are daemons, so that the program ends at once,
    on Ctrl-C too, and not after the slowest host. With *interruptible*, through which *work* then runs, Ctrl-C (or
    SIGTERM, or SIGHUP) ends the work instead, and what each host has is returned; it has 30 seconds, or until a second
    Ctrl-C.
    """
    entries: dict[str, Entry] = {}
    running = {host.name for host in hosts}
    one_ended = threading.Condition()

    def one(host: Host) -> None:
        try:
            entries[host.name] = {"host": host.name, **work(host)}
        except HostUnreachable as error:
            entries[host.name] = {"host": host.name, "ok": False, "reasons": [str(error)]}
        except Exception as error:  # a bug, or an answer that nobody thought of: the other hosts' results still count
            reason = f"unexpected {type(error).__name__}: {error}"
            entries[host.name] = {"host": host.name, "ok": False, "reasons": [reason]}
        finally:
            with one_ended:
                running.discard(host.name)
                one_ended.notify()

    for host in hosts:
        threading.Thread(target=one, args=(host,), daemon=True).start()

    # Not Thread.join(): in Python 3.11 one that Ctrl-C interrupts takes the thread for ended from then on.
    def join(seconds: float) -> None:
        with one_ended:
            one_ended.wait_for(lambda: not running, min(seconds, threading.TIMEOUT_MAX))

    if interruptible is None:
        join(timeout)
    else:
        with _ends_are_interrupts():
            try:
                join(timeout)
            except KeyboardInterrupt:
                interruptible.interrupt()
                join(STOP_WAIT_S)
    late = {"ok": False, "reasons": [f"no result within {timeout:g} s"]}
    return [entries.get(host.name) or {"host": host.name, **late} for host in hosts]
