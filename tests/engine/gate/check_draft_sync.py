"""The draft's memory while the gate is closed and after it opens: its KV rows, and what it then gets accepted."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from inprocess import CHAIN, TREE, InProcessScheduler, Output, Request

CLOSED_STEPS = 210
VERIFY_STEPS = 16
TOKENS = 320
WORKERS = {"EAGLEWorker": TREE, "EAGLEWorkerV2": CHAIN}


class Run(NamedTuple):
    """Outputs; per request its tokens, verify steps and correct drafts at each step; the draft's rows while open."""

    outputs: list[Output]
    points: list[list[tuple[int, int, int]]]
    rows: list[torch.Tensor]


def run(scheduler: InProcessScheduler, prompts: list[list[int]], tokens: int, before_step=lambda _number: None) -> Run:
    """Serve the prompts together and watch."""
    points: dict[str, list[tuple[int, int, int]]] = {}
    rows: dict[str, torch.Tensor] = {}

    def step(number: int) -> None:
        for req in scheduler.running_batch.reqs:
            if req.req_pool_idx is not None and req.output_ids:
                points.setdefault(req.rid, []).append(
                    (len(req.output_ids), req.spec_verify_ct, req.spec_num_correct_drafts)
                )
                if not scheduler.gate_closed:
                    rows[req.rid] = draft_rows(scheduler, req)
        before_step(number)

    scheduler.before_step = step
    outputs = scheduler.serve([Request(prompt, tokens) for prompt in prompts])
    order = sorted(rows, key=lambda rid: int(rid.split("-")[1]))
    return Run(outputs, [points[rid] for rid in order], [rows[rid] for rid in order])


def draft_rows(scheduler: InProcessScheduler, req) -> torch.Tensor:
    """The draft's keys and values of a running request's tokens but the latest."""
    worker = scheduler.draft_worker
    runner = worker.model_runner if hasattr(worker, "model_runner") else worker.draft_worker.draft_runner
    slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, : req.seqlen - 1].long()
    keys, values = runner.token_to_kv_pool.get_kv_buffer(0)
    return torch.stack([keys[slots], values[slots]])


def opened_at(points: list[tuple[int, int, int]]) -> int:
    """Tokens of a request when the gate opened: those after the first verify step, less what that step gained."""
    _, steps, drafts = points[CLOSED_STEPS // 2]
    first = next(point for point in points if point[1] == steps + 1)
    return first[0] - (first[2] - drafts + 1)


def gains(points: list[tuple[int, int, int]], begin: int) -> int:
    """Tokens that a request gains beyond its first `begin` in the first VERIFY_STEPS verify steps after them."""
    before = max((steps for tokens, steps, _ in points if tokens <= begin), default=0)  # 0: fresh, not seen before
    return next(tokens for tokens, steps, _ in points if steps == before + VERIFY_STEPS) - begin


@pytest.fixture(params=WORKERS, scope="module")
def worker(request):
    return WORKERS[request.param]


@pytest.fixture(scope="module")
def ungated(worker, pair, prompts):
    """The same requests with speculation all the time."""
    scheduler = InProcessScheduler(pair.target, pair.draft, **worker)
    watched = run(scheduler, prompts[:12], TOKENS)
    scheduler.close()
    return watched


def gated(worker, pair, prompts, interval) -> Run:
    """Open for six steps, closed for CLOSED_STEPS, and open again, within each request."""
    arguments = {"speculative_disable_batch_threshold": 16, "speculative_gate_sync_interval": interval}
    scheduler = InProcessScheduler(pair.target, pair.draft, **worker, **arguments)

    def force(number: int) -> None:
        closed = scheduler.spec_gate.describe()["closed_steps"]
        if number == 6 or closed == CLOSED_STEPS:
            mode = "open" if closed else "closed"
            assert scheduler.spec_gate.change_settings({"speculative_gate_force": mode})

    watched = run(scheduler, prompts[:12], TOKENS, force)
    scheduler.close()
    return watched


def accept_gains(mine: Run, worker, pair, prompts) -> tuple[list[int], list[int]]:
    """Tokens gained after the gate opened, and by fresh requests whose prompts are those requests as they were then."""
    begins = [opened_at(points) for points in mine.points]
    continued = [
        prompt + output.token_ids[: begin - 1]
        for prompt, output, begin in zip(prompts, mine.outputs, begins, strict=False)
    ]
    scheduler = InProcessScheduler(pair.target, pair.draft, **worker)
    fresh = run(scheduler, continued, TOKENS - max(begins))
    scheduler.close()
    return (
        [gains(points, begin) for points, begin in zip(mine.points, begins, strict=True)],
        [gains(points, 1) for points in fresh.points],
    )


@pytest.mark.parametrize("interval", [1, 7, 32])
def test_the_draft_remembers(worker, pair, prompts, ungated, interval):
    mine = gated(worker, pair, prompts, interval)
    assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in ungated.outputs]
    for row, other in zip(mine.rows, ungated.rows, strict=True):
        length = (
            min(row.shape[1], other.shape[1]) - 8
        )  # in the overlap loop a step is in flight: its rows are not final
        assert length > CLOSED_STEPS
        torch.testing.assert_close(row[:, :length], other[:, :length], rtol=0, atol=1e-4)
    found, expected = accept_gains(mine, worker, pair, prompts)
    assert sum(found) == pytest.approx(sum(expected), rel=0.02)


def test_without_sync_the_draft_has_forgotten(worker, pair, prompts, ungated):
    mine = gated(worker, pair, prompts, 0)
    assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in ungated.outputs]
    row, other = mine.rows[0], ungated.rows[0]
    length = min(row.shape[1], other.shape[1]) - 8
    assert (row[:, :length] - other[:, :length]).abs().max() > 1e-2
    found, expected = accept_gains(mine, worker, pair, prompts)
    assert sum(found) < 0.98 * sum(expected)
