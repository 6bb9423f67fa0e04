"""Documents of made-up runs, laid out as a deploy leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Documents = dict[str, Any]

EARLIER, TIME = "20261128T101112Z", "20261129T191112Z"


def counts(answered: int, lost: int = 0) -> dict[str, int]:
    return {"sent": answered + lost, "answered": answered, "failed": 0, "lost": lost, "unreached": 0}


def percentiles(middle: float) -> dict[str, float]:
    return {"p50": middle, "p90": middle * 2, "p95": middle * 3, "p99": middle * 4}


def figures(rate: float = 800.0) -> Documents:
    return {
        "requests": counts(50),
        "errors": [],
        "elapsed_s": 4.5,
        "prompt_tokens": 9000,
        "output_tokens": 3600,
        "output_tokens_per_s": rate,
        "accept_length": 3.5,
        "time_to_first_token_s": percentiles(0.02),
        "inter_token_s": percentiles(0.01),
        "end_to_end_s": percentiles(0.5),
    }


def history() -> Documents:
    """Open for 2 s, closed for 3 s, open again."""
    samples, opened, closed = [], 0, 0
    for number in range(13):
        mode = "closed" if 4 <= number < 10 else "open"
        opened, closed = opened + 20 * (mode == "open"), closed + 40 * (mode == "closed")
        samples.append(
            {
                "t_s": number / 2,
                "mode": mode,
                "running": 9 if mode == "closed" else 2,
                "open_steps": opened,
                "closed_steps": closed,
            }
        )
    return {"interval_s": 0.5, "samples": samples}


def document(schema: str, **entry: Any) -> Documents:
    return {"schema": schema, "ok": entry.get("ok", True), "hosts": [{"host": "gpu-1", "reasons": [], **entry}]}


def deploy(
    threshold: int = 5, cpu_engine: bool = False, simulation: dict[str, str] | None = None
) -> dict[str, Documents]:
    """The documents of a deploy in which all went well."""
    link = {"name": "worker", "claimed": "EAGLEWorker", "seen": "rank 0", "where": "log", "state": "proved"}
    speculation = {"speculative-algorithm": "EAGLE3", "speculative-disable-batch-threshold": threshold}
    smoke = {
        "sent": {"messages": [{"role": "user", "content": "How is bread made?"}]},
        "got": {"text": "In an oven.", "output_tokens": 64, "seconds": 0.12, "finish_reason": "length"},
        "accept_length": 3.76,
        "limits": [],
    }
    gate = {
        "threshold": threshold,
        "transitions": 2,
        "open_steps": 140,
        "closed_steps": 240,
        "after": "open",
        "history": history(),
    }
    load = figures() | {
        "plan": {"concurrency": 10, "rate": None},
        "client": {"lag_s": percentiles(0.001), "cpu": 0.2},
        "kinds": {"chat": figures(), "code": figures()},
        "limits": [{"name": "requests without an answer", "found": 0, "rule": "at most", "allowed": 0, "kept": True}],
        "gate": gate,
    }
    return {
        "run": {"schema": "specgate.run/1", "host": "gpu-1", "cpu_engine": cpu_engine},
        "outcome": {"schema": "specgate.outcome/1", "host": "gpu-1", "ok": True, "reason": None},
        "deployment": {
            "schema": "specgate.deployment/1",
            "id": f"d{threshold}",
            "release": "r1",
            "sglang_version": "0.5.12.post1",
            "series": "s1",
            "threshold": threshold,
            "profile": None,
            "simulation": simulation or {},
            "server_arguments": {"model-path": "/m"} | speculation,
            "tp_size": 1,
            "address": "127.0.0.1",
            "port": 30000,
        },
        "verify-worker": document(
            "specgate.verdict/1", verdict="proved", reason="its one rank runs it", worker="EAGLEWorker", links=[link]
        ),
        "smoke": document("specgate.smoke/1", ok=True, **smoke),
        "load": document("specgate.load/1", ok=True, **load),
    }


def comparison(arms: tuple[str, ...] = ("gated", "plain", "plain-no-overlap", "tree", "chain")) -> Documents:
    spread = {"median": 100.0, "min": 95.0, "max": 104.0, "rounds": 3}
    names = ("output_tokens_per_s", "time_to_first_token_p95_s", "inter_token_p95_s", "end_to_end_p95_s")
    return document(
        "specgate.comparison/1",
        ok=True,
        plan={"rounds": 3, "arms": list(arms), "concurrency": [1, 4, 10]},
        arms=[{"name": arm, "what": f"what {arm} is", "proof": "proved: it runs"} for arm in arms],
        summary=[
            {"arm": arm, "concurrency": level, "accept_length": None} | dict.fromkeys(names, spread)
            for level in (1, 4, 10)
            for arm in arms
        ],
        differences=[
            {"concurrency": level, "arm": arms[0], "against": arm, "best": arm == arms[1], "ratio": 1.3,
             "interval": [1.1, 1.5], "says": "faster"}
            for level in (1, 4, 10)
            for arm in arms[1:]
        ],
    )  # fmt: skip


def profile() -> Documents:
    return {
        "schema": "specgate.profile/1",
        "id": "abcdefabcdef",
        "made": "2026-11-29T18:00:00+00:00",
        "cells": [
            {
                "batch": batch,
                "context": context,
                "open_step_s": 0.02,
                "closed_step_s": 0.01,
                "break_even": 1 + batch / 8,
            }
            for batch in (1, 8, 32)
            for context in (512, 8192)
        ],
        "acceptance_seen": 2.9,
        "recommended": {"threshold": 9, "low_mark": 7, "kv_token_threshold": None},
        "why": "speculation pays below 9 requests",
    }


def write(root: Path, host: str, time: str, documents: dict[str, Documents | str]) -> Path:
    """Write a run's documents; a text is written as it is."""
    folder = root / host / time
    folder.mkdir(parents=True)
    for name, content in documents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder
