"""The gate's state over the time of a load, asked of the server twice a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from diagnostics.server import ServerError, server_info

INTERVAL_S = 0.5
MOST_SAMPLES = 1200


class GateHistory:
    """Samples of one server's gate; each costs the server one ``/server_info``, between two steps."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self._interval = INTERVAL_S

    def document(self) -> dict[str, Any]:
        """``{"interval_s", "samples": [{"t_s", "mode", "running", "open_steps", "closed_steps"}]}``.

        ``t_s`` counts from the start of the load, ``running`` is the requests that the gate counted at its last
        decision, and the steps are the server's own counters, so that no closing between two samples is lost.
        """
        return {"interval_s": self._interval, "samples": self.samples}

    async def _sample(self, client: httpx.AsyncClient) -> None:
        began = time.monotonic()
        while True:
            # An answer that does not come leaves a gap; what is wrong with the server, the requests tell.
            with contextlib.suppress(ServerError):
                gate = (await server_info(client)).gate
                if gate is None:
                    return
                self.samples.append(
                    {
                        "t_s": round(time.monotonic() - began, 3),
                        "mode": gate.mode,
                        "running": gate.running,
                        "open_steps": gate.open_steps,
                        "closed_steps": gate.closed_steps,
                    }
                )
            # A load of hours keeps its shape with half of the samples.
            if len(self.samples) > MOST_SAMPLES:
                self.samples = self.samples[::2]
                self._interval *= 2
            await asyncio.sleep(self._interval)


@contextlib.asynccontextmanager
async def gate_history(client: httpx.AsyncClient) -> AsyncIterator[GateHistory]:
    """Sample the gate of *client*'s server for the time of the block; without a gate there are no samples."""
    history = GateHistory()
    task = asyncio.create_task(history._sample(client))
    try:
        yield history
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
