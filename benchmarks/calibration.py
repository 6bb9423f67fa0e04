"""Calibrates a server on one GPU, and measures the gate that decides by the profile against each static arm.

    python benchmarks/calibration.py --output DIR --acceptance 2.5 --shape chain2 --patched DIR -- <SGLang's arguments>

`--acceptance` is what SGLang simulates, in tokens per verify step. The static arms (`--static`) are released servers:
`base` without speculation, `basenoov` without the overlap loop as well, and shapes of `gate.py`. A patched server of
`--shape` is calibrated by the code of `fab calibrate`, and started once more with its profile: that is the arm `gated`.
Then the arms take turns at each concurrency, in rounds, until `--until` seconds after the start. Traffic, servers and
shapes are those of `gate.py`. The last line printed is the summary: medians, their spread, and gated / best static arm.

Needs Python 3.11 and httpx beside SGLang; `diagnostics` and `files/spec_gate` are read from this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gate
import httpx

sys.path.append(str(Path(__file__).resolve().parent.parent))
from diagnostics.calibrate import calibrate_server
from diagnostics.traffic import TokenPrompt

BATCHES = [1, 2, 4, 8, 16, 32, 64]
PROFILE = "--speculative-gate-profile"


def prompts(number: int) -> list[TokenPrompt]:
    """Random prompts of the benchmark's length."""
    numbers = random.Random(0)
    return [
        TokenPrompt(
            name=str(index),
            kind="random",
            input_ids=tuple(numbers.randrange(1000, gate.VOCABULARY) for _ in range(gate.INPUT)),
            max_tokens=gate.OUTPUT,
            ignore_eos=True,
        )
        for index in range(number)
    ]


async def calibration(url: str, budget: float, batches: list[int], contexts: list[int]) -> dict[str, Any]:
    """Calibrate the server at `url`; the document of `fab calibrate`."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=budget + 30, limits=limits) as client:
        return await calibrate_server(
            client,
            prompts(16),
            budget=budget,
            batches=batches,
            contexts=contexts,
            on_progress=lambda done, of, what: print(f"{done} of {of}: {what}", flush=True),
        )


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """By concurrency: tok/s of each arm as [median, least, most], and gated / best static arm of the medians."""
    levels: dict[str, Any] = {}
    for concurrency in sorted({record["concurrency"] for record in records}):
        arms: dict[str, list[float]] = {}
        for record in records:
            if record["concurrency"] == concurrency:
                arms.setdefault(record["arm"], []).append(record["tok_s"])
        medians = {arm: statistics.median(found) for arm, found in arms.items()}
        best = max((arm for arm in medians if arm != "gated"), key=medians.__getitem__)
        levels[str(concurrency)] = {
            "arms": {arm: [medians[arm], min(found), max(found)] for arm, found in arms.items()},
            "best": best,
            "gated_to_best": round(medians["gated"] / medians[best], 3) if "gated" in medians else None,
        }
    return levels


def main() -> None:
    """Run the command line; `DIR/calibration.json` and `DIR/results.json` have all that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--acceptance", type=float, required=True, help="0: real verification")
    parser.add_argument("--shape", choices=gate.SHAPES, required=True, help="of the gated server")
    parser.add_argument("--static", default="base,tree,chain2", help="static arms, comma-separated")
    parser.add_argument("--patched", type=Path, required=True, help="folder with the patched sglang and spec_gate")
    parser.add_argument("--budget", type=float, default=60, help="seconds of the calibration")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=str(gate.INPUT + gate.OUTPUT // 2))
    parser.add_argument("--concurrency", default="1,8,16,64")
    parser.add_argument("--seconds", type=float, default=3, help="per level")
    parser.add_argument("--until", type=float, default=450, help="seconds after which no round is begun")
    parser.add_argument("--port", type=int, default=30100, help="of the first server; the others follow")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = [argument for argument in options.arguments if argument != "--"]
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    simulated = {"SGLANG_SIMULATE_ACC_LEN": str(options.acceptance)} if options.acceptance else {}
    # One path for the package alone: what the servers' environment has besides is kept.
    path = os.environ.get("PYTHONPATH", "")
    patched = simulated | {"PYTHONPATH": f"{options.patched.absolute()}:{path}"}
    shaped = [*arguments, *gate.SHAPES[options.shape]]
    plain = gate.without_speculation(arguments)
    servers: dict[str, gate.Server] = {}

    def start(name: str, server_arguments: list[str], environment: dict[str, str]) -> None:
        servers[name] = gate.Server(name, options.port + len(servers), server_arguments, options.output, environment)

    def wait() -> None:
        if not all(server.wait(300) for server in servers.values()):
            sys.exit(1)
        for server in servers.values():
            asyncio.run(gate.level(server.url, 64, 0.1))
        print(f"all servers are up after {time.monotonic() - started:.0f} s", flush=True)

    try:
        for arm in options.static.split(","):
            if arm in gate.SHAPES:
                start(arm, [*arguments, *gate.SHAPES[arm]], simulated)
            else:
                start(arm, [*plain, *(["--disable-overlap-schedule"] if arm == "basenoov" else [])], {})
        start("calibrated", [*shaped, gate.GATE, options.batches.split(",")[-1]], patched)
        wait()
        batches, contexts = (list(map(int, text.split(","))) for text in (options.batches, options.contexts))
        document = asyncio.run(calibration(servers["calibrated"].url, options.budget, batches, contexts))
        (options.output / "calibration.json").write_text(json.dumps(document, indent=1))
        if not document["ok"]:
            sys.exit(f"no profile: {document['reasons']}")
        print(f"threshold {document['recommended']['threshold']}: {document['why']}", flush=True)
        profile = options.output / "profile.json"
        profile.write_text(json.dumps(document["profile"]))
        servers.pop("calibrated").stop()
        start("gated", [*shaped, PROFILE, str(profile.absolute())], patched)
        wait()
        records: list[dict[str, Any]] = []
        number = 0
        round_s = 0.0
        while number < 2 or time.monotonic() - started + round_s < options.until:
            begun = time.monotonic()
            for concurrency in map(int, options.concurrency.split(",")):
                # Another arm goes first in each round.
                names = list(servers)
                for arm in names[number % len(names) :] + names[: number % len(names)]:
                    before = servers[arm].gate() if arm == "gated" else None
                    record = asyncio.run(gate.level(servers[arm].url, concurrency, options.seconds))
                    if before:
                        after = servers[arm].gate()
                        record |= {
                            name: after[name] - before[name] for name in ("transitions", "open_steps", "closed_steps")
                        }
                    records.append({"arm": arm, **record, "acc": options.acceptance, "round": number})
                    print(json.dumps(records[-1]), flush=True)
            (options.output / "results.json").write_text(json.dumps(records, indent=0))
            number, round_s = number + 1, time.monotonic() - begun
        print(json.dumps({"acceptance": options.acceptance, "rounds": number, "levels": summary(records)}), flush=True)
    finally:
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    main()
