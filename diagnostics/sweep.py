"""What a decode step costs on a running server, with speculation and without it, over batch size and context length.

One batch of requests is held in decode while the gate is forced open and closed in turn; the two modes are then
compared on the same requests, minutes of drift between them included. Steps are counted by the gate and timed by the
scheduler's own clock, both read at one step boundary: nothing of the network, the prompts' prefill or the client is in
the cost, which a time derived from arriving tokens would hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from diagnostics.server import ServerError, call, running_requests, set_gate
from diagnostics.traffic import TokenPrompt, closed_loop, summarise

Mode = Literal["open", "closed"]

WINDOW_STEPS = 32  # the draft's sync comes every 32 closed steps by default: one falls into each closed window
SETTLE_STEPS = 3  # the switch itself, and the sync that opening needs, are no steps' cost
MIN_PAIRS, MAX_PAIRS = 2, 7
SURE = 0.02  # relative uncertainty of a break-even that more pairs need not lower
MOST_UNCERTAIN = 0.1  # relative uncertainty of a break-even that still counts
POLL_S = 0.02
POOL_SHARE = 0.9  # of the KV pool: SGLang keeps some back for requests that run


class SweepError(Exception):
    """The sweep cannot go on; the message says why."""


@dataclass(frozen=True)
class Limits:
    """What a server can hold: requests at once, KV tokens in all, tokens of a request, tokens a verify step can add."""

    requests: int
    kv_tokens: int
    context: int
    tokens_per_step: int

    @property
    def generated(self) -> int:
        """Tokens that a request may generate while a pair of windows is measured; hardly half of them ever are."""
        return 2 * WINDOW_STEPS * (self.tokens_per_step + 1)

    def hold(self, batch: int, context: int) -> bool:
        """Whether the server holds a batch of that many requests of that context, with what they generate."""
        length = context + self.generated
        return batch <= self.requests and length < self.context and batch * length <= int(self.kv_tokens * POOL_SHARE)


@dataclass(frozen=True)
class Reading:
    """The gate at one step boundary; ``clock`` in the scheduler's seconds, ``process`` its pid and start."""

    clock: float
    steps: Mapping[str, int]
    running: int
    process: tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """Seconds of a decode step at one batch and context, one entry a window; windows of the two modes go in pairs.

    ``context``: tokens of each request, the prompt's and those generated, about the middle of the measuring.
    ``left_out`` says why a cell has too few windows.
    """

    batch: int
    context: int
    open_s: tuple[float, ...] = ()
    closed_s: tuple[float, ...] = ()
    left_out: str | None = None

    @property
    def ratios(self) -> list[float]:
        """The break-even as each pair of windows tells it."""
        return [opened / closed for opened, closed in zip(self.open_s, self.closed_s, strict=True)]

    @property
    def uncertainty(self) -> float:
        """Standard error of the ratios' median, relative to it; from their median absolute deviation."""
        median = statistics.median(self.ratios)
        deviation = statistics.median(abs(ratio - median) for ratio in self.ratios)
        return 1.4826 * 1.2533 * deviation / math.sqrt(len(self.ratios)) / median


def read_limits(info: Mapping[str, Any]) -> Limits:
    """From ``/server_info``; raises ServerError where it lacks a field."""
    try:
        state = info["internal_states"][0]
        return Limits(
            requests=int(state["effective_max_running_requests_per_dp"]),
            kv_tokens=int(state["memory_usage"]["token_capacity"]),
            context=int(info["max_req_input_len"]),
            tokens_per_step=int(info["speculative_num_steps"]) + 1,
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"/server_info has an unexpected form ({type(error).__name__}: {error})") from error


def read_gate(info: Mapping[str, Any]) -> Reading:
    """From ``/server_info``; raises SweepError for a server that has no gate to force."""
    gate = (info.get("internal_states") or [{}])[0].get("spec_gate")
    if gate is None or gate["mode"] == "off":
        raise SweepError(
            "the server has no gate to hold open or closed: it runs "
            + ("without the patch" if gate is None else "with the gate off (threshold 0)")
            + "; deploy it with a threshold, or with threshold=auto, which calibrates by itself"
        )
    try:
        return Reading(
            clock=float(gate["clock"]),
            steps={"open": int(gate["open_steps"]), "closed": int(gate["closed_steps"])},
            running=int(gate["running"]),
            process=(int(gate["identity"]["pid"]), int(gate["identity"]["start_ticks"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"the gate's state has an unexpected form ({type(error).__name__}: {error})") from error


def default_batches(limits: Limits) -> list[int]:
    """Powers of two, and the most that the server runs."""
    powers = [1 << exponent for exponent in range(limits.requests.bit_length())]
    return sorted({*powers, limits.requests})


def default_contexts(limits: Limits) -> list[int]:
    """512 and its multiples by four, as far as a single request can be that long."""
    return [context for context in (512 << exponent for exponent in range(0, 20, 2)) if limits.hold(1, context)]


class Sweep:
    """The measurements on one server.

    ``client`` reaches it; ``on_progress`` gets a line after each cell. The gate is left as the last measurement held
    it: use it within ``server.gate_given_back``, after ``begin``.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        on_progress: Callable[[int, int, str], None] = lambda done, of, what: None,
    ) -> None:
        self._client = client
        self._on_progress = on_progress
        self._process: tuple[int, int] | None = None
        self._step_s: dict[str, float] = {}

    async def begin(self) -> Mapping[str, Any]:
        """Return ``/server_info``; raises SweepError when the server has no gate or serves others."""
        info: Mapping[str, Any] = await call(self._client, "GET", "/server_info")
        self._process = read_gate(info).process
        running, waiting = await running_requests(self._client)
        if running or waiting:
            raise SweepError(
                f"the server serves {running} requests of others, and {waiting} wait; their steps would be in the "
                "costs: take the traffic away first"
            )
        return info

    async def read(self) -> Reading:
        """The gate now; raises SweepError when the server was restarted since ``begin``."""
        reading = read_gate(await call(self._client, "GET", "/server_info"))
        if reading.process != self._process:
            raise SweepError("the server was restarted during the calibration: its scheduler is another process")
        return reading

    async def acceptance(self, prompts: Sequence[TokenPrompt], concurrency: int, timeout: float) -> dict[str, float]:
        """Tokens per verify step with speculation on, by kind and (``all``) together; each prompt is answered once.

        *timeout* (seconds) bounds each answer. Raises SweepError when one did not come or nothing was verified.
        """
        await set_gate(self._client, speculative_gate_force="open")
        run = await closed_loop(self._client, prompts, concurrency=concurrency, requests=len(prompts), timeout=timeout)
        together = summarise(run.results)
        if together["requests"]["answered"] < len(prompts):
            raise SweepError(
                f"{together['requests']['answered']} of {len(prompts)} prompts were answered: {together['errors']}"
            )
        if together["accept_length"] is None:
            raise SweepError("no draft was verified although the gate was held open: there is no acceptance to see")
        kinds = {kind: [r for r in run.results if r.kind == kind] for kind in dict.fromkeys(p.kind for p in prompts)}
        lengths = {kind: summarise(results)["accept_length"] for kind, results in kinds.items()}
        return lengths | {"all": together["accept_length"]}

    async def cells(
        self,
        grid: Sequence[tuple[int, int]],
        prompts: Callable[[int, int], list[list[int]]],
        limits: Limits,
        deadline: float,
    ) -> list[Cell]:
        """Measure each (batch, context) of *grid* until *deadline* (monotonic seconds) at most, short contexts first.

        What time is left then goes to the cells whose pairs agree least. *prompts* gives, for a batch and a number of
        tokens, as many different prompts of that length.
        """
        # All batches of the shortest context come first: beyond the largest batch measured the gate can only guess.
        cells = {place: Cell(*place) for place in sorted(grid, key=lambda place: (place[1], place[0]))}

        async def measure(place: tuple[int, int], pairs: int) -> None:
            inputs = prompts(place[0], max(1, place[1] - limits.generated // 4))
            try:
                for number in range(pairs):
                    if time.monotonic() > deadline:
                        raise _LeftOut("the budget was used up before")
                    if number == 0:
                        await self._prefill(inputs, deadline)
                    cells[place] = await self._pair(cells[place], inputs, limits.generated, deadline)
            except _LeftOut as reason:
                if len(cells[place].open_s) < MIN_PAIRS:
                    cells[place] = dataclasses.replace(cells[place], left_out=str(reason))

        for number, place in enumerate(cells):
            await measure(place, MIN_PAIRS)
            if not cells[place].left_out and cells[place].uncertainty > MOST_UNCERTAIN:
                # One of two was disturbed; a median of three does not mind it. Later the budget may be used up, and a
                # cell that does not count is one that the gate has to guess.
                await measure(place, 1)
            self._on_progress(number + 1, len(cells), _line(cells[place]))
        while time.monotonic() < deadline:
            unsure = [
                cell
                for cell in cells.values()
                if not cell.left_out and len(cell.open_s) < MAX_PAIRS and cell.uncertainty > SURE
            ]
            if not unsure:
                break
            cell = max(unsure, key=lambda cell: cell.uncertainty)
            await measure((cell.batch, cell.context), 1)
            self._on_progress(len(cells), len(cells), _line(cells[cell.batch, cell.context]))
        return list(cells.values())

    async def _prefill(self, inputs: list[list[int]], deadline: float) -> None:
        """Bring the prompts into the server's prefix cache.

        The batch then enters its decode as one. A last request that is prefilled in chunks would not: of the most that
        SGLang runs at once, it leaves one waiting until another ends.
        """
        held = self._send(inputs, 1)
        try:
            await asyncio.wait([held.request], timeout=max(0.0, deadline - time.monotonic()))
            if not held.request.done():
                raise _LeftOut("the budget was used up in the prefill of its prompts")
            held.request.result()
        finally:
            await self._end(held)

    async def _pair(self, cell: Cell, inputs: list[list[int]], generated: int, deadline: float) -> Cell:
        """Hold a batch of *inputs* in decode, and measure a window of each mode; return *cell* with them."""
        # The modes take turns in going first: what drifts weighs on both alike.
        order: tuple[Mode, Mode] = ("open", "closed") if len(cell.open_s) % 2 == 0 else ("closed", "open")
        await set_gate(self._client, speculative_gate_force=order[0])
        held = self._send(inputs, generated)
        try:
            await self._all_running(held, deadline)
            windows = {mode: await self._window(mode, held) for mode in order}
        finally:
            await self._end(held)
        return dataclasses.replace(
            cell, open_s=(*cell.open_s, windows["open"]), closed_s=(*cell.closed_s, windows["closed"])
        )

    async def _all_running(self, held: _Batch, deadline: float) -> None:
        """Wait until the whole batch decodes."""
        while True:
            reading = await self.read()
            if reading.running == held.size:
                return
            held.check()
            if time.monotonic() > deadline:
                raise _LeftOut(f"when the budget was used up, {reading.running} of {held.size} requests were running")
            await asyncio.sleep(POLL_S)

    async def _window(self, mode: Mode, held: _Batch) -> float:
        """Hold the gate at *mode*; return the seconds of a step, over WINDOW_STEPS or a few more."""
        start = await self.read()
        await set_gate(self._client, speculative_gate_force=mode)
        begin = await self._advanced(mode, start, SETTLE_STEPS, held)
        end = await self._advanced(mode, begin, WINDOW_STEPS, held)
        other: Mode = "closed" if mode == "open" else "open"
        if end.steps[other] != begin.steps[other]:
            raise _LeftOut("the gate did not stay where it was held")
        self._step_s[mode] = (end.clock - begin.clock) / (end.steps[mode] - begin.steps[mode])
        return self._step_s[mode]

    async def _advanced(self, mode: Mode, since: Reading, steps: int, held: _Batch) -> Reading:
        """Wait for *steps* more steps."""
        while True:
            reading = await self.read()
            if reading.running != held.size:
                held.check()
                raise _LeftOut(f"{reading.running} of {held.size} requests were running in a window")
            missing = steps - (reading.steps[mode] - since.steps[mode])
            if missing <= 0:
                return reading
            held.check()
            # Each reading costs the scheduler about a millisecond: few of them.
            await asyncio.sleep(max(POLL_S, min(missing * self._step_s.get(mode, 0), 1.0)))

    def _send(self, inputs: list[list[int]], generated: int) -> _Batch:
        """Send *inputs* as one batch that generates so many tokens for each."""
        ids = [f"specgate-{uuid.uuid4().hex}" for _ in inputs]
        sampling = {"temperature": 0, "max_new_tokens": generated, "ignore_eos": True}
        body = {"rid": ids, "input_ids": inputs, "sampling_params": sampling}
        return _Batch(tuple(ids), asyncio.create_task(call(self._client, "POST", "/generate", body)))

    async def _end(self, held: _Batch) -> None:
        """Abort what still runs, and wait until the server has let go of it: no request of the sweep outlives it."""
        ending = asyncio.create_task(self._abort(held))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _abort(self, held: _Batch) -> None:
        with contextlib.suppress(httpx.HTTPError):
            if not held.request.done():
                aborts = (self._client.post("/abort_request", json={"rid": rid}) for rid in held.ids)
                await asyncio.gather(*aborts)
            await asyncio.wait([held.request], timeout=30)
        held.request.cancel()
        with contextlib.suppress(ServerError, asyncio.CancelledError):
            await held.request


class _LeftOut(Exception):
    """A cell that cannot be measured; the message says why."""


@dataclass(frozen=True)
class _Batch:
    """Requests that were sent as one."""

    ids: tuple[str, ...]
    request: asyncio.Task[Any]

    @property
    def size(self) -> int:
        return len(self.ids)

    def check(self) -> None:
        """Raise when it has ended: ServerError when it was refused, _LeftOut when it has run out of tokens."""
        if self.request.done():
            self.request.result()
            raise _LeftOut("the requests reached their length before enough steps were measured")


def _line(cell: Cell) -> str:
    where = f"batch {cell.batch}, context {cell.context}: "
    if cell.left_out:
        return where + f"left out, {cell.left_out}"
    costs = [statistics.median(costs) * 1000 for costs in (cell.open_s, cell.closed_s)]
    return where + f"open {costs[0]:.2f} ms, closed {costs[1]:.2f} ms a step, {costs[0] / costs[1]:.2f} tokens to pay"


def stretched(prompts: Sequence[TokenPrompt]) -> Callable[[int, int], list[list[int]]]:
    """Return what makes prompts of a given length of real ones: one after the other, as in a long conversation.

    Each prompt of a batch begins at another place, so that no two share a prefix in the server's cache; the same call
    gives the same prompts again, and then finds them there.
    """
    text = [token for prompt in prompts for token in prompt.input_ids]

    def make(batch: int, length: int) -> list[list[int]]:
        around = text * (2 + length // len(text))
        starts = [number * len(text) // batch for number in range(batch)]
        return [around[start : start + length] for start in starts]

    return make
