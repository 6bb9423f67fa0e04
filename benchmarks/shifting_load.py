"""A load that shifts between requests of high and of low acceptance: the gate against speculation held on, held off.

    python benchmarks/shifting_load.py --limit rehearsal-1 --concurrency 1,4,16 --output DIR

The host's server must be deployed with a gate, by `deploy.yml -e threshold=auto` or with a number. The arms are that
server: its gate held open, held closed, and left to itself. Each arm answers the same requests, in closed loops of
`--concurrency`: prompts of the shipped set, answered greedily, then as many that are sampled so freely that the draft
guesses hardly anything, and so on, in `--shifts` changes. At each level the arms take turns, another one first in each
round. The last line is the summary by level: tok/s of each arm and kind, the gate's transitions, and gated / better of
the two others, of all tokens over all time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
import httpx

from diagnostics.inventory import load_hosts
from diagnostics.load import fit
from diagnostics.prompts import load_prompts
from diagnostics.server import Endpoint, api_client, gate_given_back, server_info, set_gate
from diagnostics.tasks import with_server
from diagnostics.traffic import TokenPrompt, closed_loop, summarise

ARMS: dict[str, str | None] = {"open": "open", "closed": "closed", "gated": None}
OUTPUT = 96
FREELY = 3.0  # temperature: tokens are drawn nearly at random


async def kinds(client: httpx.AsyncClient) -> dict[str, list[TokenPrompt]]:
    """Requests by kind: `greedy` ones are such as the draft was trained on, of `sampled` ones it guesses little."""
    fitting, _ = await fit(client, (await server_info(client)).model, load_prompts())
    chat = [prompt for prompt in fitting if prompt.kind == "chat"]
    return {
        kind: [replace(p, kind=kind, max_tokens=OUTPUT, ignore_eos=True, temperature=temperature) for p in chat]
        for kind, temperature in {"greedy": 0.0, "sampled": FREELY}.items()
    }


async def measure(client: httpx.AsyncClient, arm: str, concurrency: int, phases: list[list[TokenPrompt]]) -> Any:
    """One arm at one level: tokens and seconds, by kind, and what the gate did."""
    await set_gate(client, speculative_gate_force=ARMS[arm])
    await closed_loop(client, phases[0], concurrency=concurrency, requests=concurrency)
    before = (await server_info(client)).gate
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    accepted: dict[str, list[float]] = {}
    for phase in phases:
        kind, began = phase[0].kind, time.monotonic()
        run = await closed_loop(client, phase, concurrency=concurrency, requests=len(phase))
        found = summarise(run.results)
        if found["requests"]["answered"] < len(phase):
            sys.exit(f"{arm} at C={concurrency}: {found['errors']}")
        tokens[kind] = tokens.get(kind, 0) + found["output_tokens"]
        seconds[kind] = seconds.get(kind, 0.0) + time.monotonic() - began
        if found["accept_length"]:
            accepted.setdefault(kind, []).append(found["accept_length"])
    after = (await server_info(client)).gate
    assert before is not None
    assert after is not None
    return {
        "arm": arm,
        "concurrency": concurrency,
        "tok_s": round(sum(tokens.values()) / sum(seconds.values()), 1),
        "kinds": {kind: round(tokens[kind] / seconds[kind], 1) for kind in tokens},
        "accept_length": {kind: round(statistics.mean(found), 2) for kind, found in accepted.items()},
        "transitions": after.transitions - before.transitions,
        "open_steps": after.open_steps - before.open_steps,
        "closed_steps": after.closed_steps - before.closed_steps,
    }


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """By level: each arm's median tok/s, in all and by kind; the gate's transitions; gated / better static arm."""
    levels: dict[str, Any] = {}
    for concurrency in sorted({record["concurrency"] for record in records}):
        here = [record for record in records if record["concurrency"] == concurrency]
        arms = {arm: [record for record in here if record["arm"] == arm] for arm in ARMS}
        median = {arm: statistics.median(record["tok_s"] for record in found) for arm, found in arms.items()}
        by_kind = {
            arm: {kind: statistics.median(r["kinds"][kind] for r in found) for kind in found[0]["kinds"]}
            for arm, found in arms.items()
        }
        levels[str(concurrency)] = {
            "tok_s": median,
            "kinds": by_kind,
            "transitions": [record["transitions"] for record in arms["gated"]],
            "gated_to_better": round(median["gated"] / max(median["open"], median["closed"]), 3),
        }
    return levels


async def run(endpoint: Endpoint, options: argparse.Namespace) -> dict[str, Any]:
    """All levels, rounds and arms, and their summary; prints a line for each."""
    records = []
    async with api_client(endpoint, timeout=600) as client, gate_given_back(client):
        found = await kinds(client)
        for concurrency in map(int, options.concurrency.split(",")):
            each = options.requests * concurrency
            supply = {kind: itertools.cycle(prompts) for kind, prompts in found.items()}
            phases = [
                list(itertools.islice(supply[kind], each))
                for kind in itertools.islice(itertools.cycle(found), options.shifts + 1)
            ]
            for number in range(options.rounds):
                names = list(ARMS)
                for arm in names[number % 3 :] + names[: number % 3]:
                    records.append(await measure(client, arm, concurrency, phases) | {"round": number})
                    print(json.dumps(records[-1]), flush=True)
    return {"levels": summary(records), "records": records}


def main() -> None:
    """Run the command line; `DIR/shifting_load.json` has all that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", required=True, help="the host, by its name in the inventory")
    parser.add_argument("--inventory", action="append", help="default: what ansible.cfg names")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--requests", type=int, default=4, help="of each phase, times the concurrency")
    parser.add_argument("--shifts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    (host,) = load_hosts(options.inventory, options.limit)
    document = with_server(host, lambda endpoint: asyncio.run(run(endpoint, options)))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "shifting_load.json").write_text(json.dumps(document, indent=1))
    print(json.dumps({name: document[name] for name in ("simulation", "levels")}))


if __name__ == "__main__":
    main()
