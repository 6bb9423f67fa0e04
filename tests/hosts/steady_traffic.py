"""Clients that never stop asking: what they did not get is what a deploy has broken."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What became of the requests so far; ``failures`` has one sentence for each that was not answered whole."""

    address: str
    port: int
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, prompt: str) -> None:
        """One streamed chat request, on a connection of its own."""
        body = {
            "model": "rehearsal",
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": 96,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection(self.address, self.port, timeout=120)
        failure = None
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                failure = f"status {response.status}: {text[:200]}"
            elif not text.rstrip().endswith("data: [DONE]") or '"finish_reason":"length"' not in text:
                failure = f"cut off: ...{text[-200:]}"
        except (OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        with self._lock:
            if failure is None:
                self.answered += 1
            else:
                self.failures.append(failure)

    def _client(self, number: int) -> None:
        for turn in itertools.count():
            if self._over.is_set():
                return
            self.ask(f"Client {number} tells story {turn}.")


@contextmanager
def steady_traffic(address: str, port: int, clients: int) -> Iterator[Traffic]:
    """`clients` requests in flight at any time until the end of the block, and then until each is over."""
    traffic = Traffic(address, port)
    threads = [threading.Thread(target=traffic._client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield traffic
    finally:
        traffic._over.set()
        for thread in threads:
            thread.join()
