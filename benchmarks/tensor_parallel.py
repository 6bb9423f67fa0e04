"""The gate and its proof on several ranks: whether they decide alike under load, and what the evidence says of each.

    python benchmarks/tensor_parallel.py --output DIR --plan tree:10:2.5 --patched DIR --different --kill \
        -- <arguments of the server, --tp-size N among them>

1. The evidence is gathered and judged as `fab verify-worker` does on a host without systemd.
2. For `--seconds` the load crosses the threshold both ways: closed loops at it, ramps 1..32..1, one request in seven
   aborted on its way. Every request must be answered or aborted. Each rank logs its decisions (hooks); they must
   be the same, step by step.
3. `--different`: a second server, one rank of which runs other code than the file has, must be refuted.
4. `--kill`: the last rank is killed under load; what becomes of the processes, the requests and the verdict.

Writes DIR/NAME.json, NAME.log, evidence/*.json (for `fab verify-worker --evidence`), and the ranks' files. Exit status
1 when a request was lost, ranks differ, or a verdict is not what it must be. The killed rank is reported, not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from gate import GATE, INPUT, OUTPUT, RAMP, SHAPES, VOCABULARY, Plan, Server, wait_for  # noqa: E402

from diagnostics.proof import collector, verdict  # noqa: E402

SERIES = REPOSITORY / "files/spec_gate/spec_gate"
ABORTED_SHARE = 1 / 7


class RankServer(Server):
    """A gated server on several ranks, whose files are in folders of its own."""

    def __init__(
        self, name: str, port: int, options: argparse.Namespace, arguments: list[str], **environment: str
    ) -> None:
        plan, output = options.plan, options.output
        self.port = port
        self.status = output / f"{name}-status"
        self.decisions = output / f"{name}-decisions"
        for folder in (self.status, self.decisions):
            folder.mkdir(parents=True)
        path = [Path(__file__).resolve().parent / "hooks", options.patched, os.environ.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": ":".join(str(part) for part in path),
            "SPEC_GATE_RUNTIME_DIRECTORY": str(self.status),
            "DECISION_LOG": str(self.decisions),
        }
        if plan.acc:
            environment["SGLANG_SIMULATE_ACC_LEN"] = str(plan.acc)
        super().__init__(name, port, [*arguments, *SHAPES[plan.name], GATE, str(plan.threshold)], output, environment)

    def processes(self) -> list[collector.Process]:
        """The living processes of the server."""
        return list(collector.descendants(self.process.pid, collector.read_processes()).values())

    def ranks(self) -> dict[int, int]:
        """Pid of each rank's scheduler."""
        return {p.tp_rank: p.pid for p in self.processes() if p.tp_rank is not None and p.state != "Z"}


def judged(server: RankServer, label: str, output: Path) -> dict[str, object]:
    """Gather the evidence about the server, keep it as `label`, and say the verdict."""
    manifests = [json.loads(path.read_text()) for path in sorted((SERIES / "series").glob("*/manifest.json"))]
    request = {
        "unit": "sglang.service",
        "deployment_path": "/opt/sglang/current/deployment.json",
        "modules": sorted({file["module"] for manifest in manifests for file in manifest["files"]}),
        "port": server.port,
        "timeout": 20,
    }
    proof = REPOSITORY / "diagnostics/proof"
    sources = {"resolve": (proof / "resolve.py").read_text(), "loaded": (SERIES / "loaded.py").read_text()}
    began = time.monotonic()
    document = collector.collect(request, sources) | {"host": label, "error": None, "reference": manifests}
    folder = output / "evidence"
    folder.mkdir(exist_ok=True)
    (folder / f"{label}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    found = verdict.judge(document)
    return {"verdict": found.verdict, "reason": found.reason, "took_s": round(time.monotonic() - began, 2)}


class Load:
    """Requests sent to a server, and what became of each."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self._numbers = random.Random(1)
        self._ids = itertools.count()

    async def request(self, client: httpx.AsyncClient, aborted_share: float) -> None:
        """Send one, and abort it on its way with the given probability."""
        rid = f"{id(self)}-{next(self._ids)}"
        body = {
            "rid": rid,
            "input_ids": [self._numbers.randrange(VOCABULARY // 1000, VOCABULARY) for _ in range(INPUT)],
            "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True},
        }
        sent = asyncio.create_task(client.post(self.url + "/generate", json=body))
        self.outcomes["sent"] += 1
        try:
            if self._numbers.random() < aborted_share:
                await asyncio.sleep(self._numbers.uniform(0.02, 0.5))
                self.outcomes["abort asked"] += 1
                await client.post(self.url + "/abort_request", json={"rid": rid})
            answer = (await sent).json()
            reason = answer["meta_info"]["finish_reason"]["type"]
            whole = len(answer["output_ids"]) == OUTPUT
            outcome = "answered" if reason == "length" and whole else "aborted" if reason == "abort" else "lost"
            if outcome == "lost":
                self.errors.append(str(answer)[:300])
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            outcome = "lost"
            self.errors.append(f"{type(error).__name__}: {error}")
        self.outcomes[outcome] += 1

    async def closed_loop(self, workers: int, seconds: float, aborted_share: float = 0) -> None:
        """Keep `workers` requests in flight for `seconds`; all are awaited, and none is sent to a dead server."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:

            async def worker() -> None:
                lost = self.outcomes["lost"]
                while time.monotonic() < end and self.outcomes["lost"] - lost < 2 * workers:
                    await self.request(client, aborted_share)

            await asyncio.gather(*(worker() for _ in range(workers)))

    async def crossing(self, threshold: int, seconds: float) -> None:
        """Closed loops at the threshold and ramps in turn."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.outcomes["lost"] < 10:
            await self.closed_loop(threshold, 4, ABORTED_SHARE)
            for workers in RAMP:
                await self.closed_loop(workers, 0.5, ABORTED_SHARE)

    def report(self) -> dict[str, object]:
        """The counts, and the first errors."""
        return {**self.outcomes, "errors": self.errors[:5]}


def compared(server: RankServer) -> dict[str, object]:
    """The decisions of the ranks, beside each other: step, mode, running requests and KV tokens of each step."""
    lines: dict[int, list[list[str]]] = {}
    for rank, pid in sorted(server.ranks().items()):
        log = server.decisions / str(pid)
        lines[rank] = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    decisions = {rank: [line[1:] for line in found] for rank, found in lines.items()}
    first = decisions[0]
    modes = [decision[1] for decision in first]
    result: dict[str, object] = {
        "steps": {rank: len(found) for rank, found in decisions.items()},
        "alike": bool(first) and all(found == first for found in decisions.values()),
        "last": {rank: found[-1:] for rank, found in decisions.items()},
        "steps_by_mode": dict(collections.Counter(modes)),
        "mode_changes": sum(a != b for a, b in itertools.pairwise(modes)),
    }
    for rank, found in decisions.items():
        differing = next((pair for pair in itertools.zip_longest(first, found) if pair[0] != pair[1]), None)
        if differing:
            result[f"rank {rank} differs first"] = differing
    # How far apart in time the ranks decide the same step.
    apart = [
        max(map(float, times)) - min(map(float, times))
        for times in zip(*([line[0] for line in found] for found in lines.values()), strict=False)
    ]
    if apart:
        apart.sort()
        spread = {"median": statistics.median(apart), "p99": apart[int(0.99 * len(apart))], "max": apart[-1]}
        result["apart_ms"] = {name: round(1000 * value, 3) for name, value in spread.items()}
    return result


def killed(server: RankServer, output: Path) -> dict[str, object]:
    """Kill the last rank under load; watch for 25 s."""
    load = Load(server.url)
    client = threading.Thread(target=lambda: asyncio.run(load.closed_loop(16, 20)))
    client.start()
    time.sleep(4)
    rank, pid = max(server.ranks().items())
    verdicts: dict[str, object] = {"before": judged(server, f"{server.name}-before-kill", output)}
    answered = load.outcomes["answered"]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    def after(label: str) -> None:
        verdicts[f"{label}, from {time.monotonic() - began:.1f} s on"] = judged(
            server, f"{server.name}-{label}-kill", output
        )

    at_once = threading.Thread(target=after, args=("at",))
    at_once.start()
    timeline: list[list[object]] = []
    seen: dict[str, object] = {}
    while time.monotonic() - began < 25:
        now: dict[str, object] = {
            f"{p.role or 'other'} {'rank ' + str(p.tp_rank) + ' ' if p.tp_rank is not None else ''}{p.pid}": p.state
            for p in server.processes()
        }
        now["main"] = "runs" if (status := server.process.poll()) is None else f"ended with {status}"
        changed = {name: now.get(name, "gone") for name in sorted(seen | now) if now.get(name) != seen.get(name)}
        if changed:
            timeline.append([round(time.monotonic() - began, 2), changed])
        seen = now
        if status is not None and not client.is_alive() and not at_once.is_alive():
            break
        time.sleep(0.05)
    at_once.join()
    after("after")
    client.join()
    return {
        "rank": rank,
        "pid": pid,
        "answered_before": answered,
        "requests": load.report(),
        "processes": timeline,
        "verdicts": verdicts,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plan", type=Plan.parse, required=True, help="SHAPE:THRESHOLD:ACCEPTANCE")
    parser.add_argument("--patched", type=Path, required=True, help="folder with the patched sglang and spec_gate")
    parser.add_argument("--port", type=int, default=30200)
    parser.add_argument("--seconds", type=float, default=120, help="of load that crosses the threshold")
    parser.add_argument("--different", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--wait-for", default="", help="process ids, comma-separated, that must end before the load")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = [argument for argument in options.arguments if argument != "--"]
    options.output, options.patched = options.output.absolute(), options.patched.absolute()
    output, plan = options.output, options.plan
    name = f"{plan.name}-ranks"
    report: dict[str, object] = {"plan": plan._asdict(), "arguments": arguments}
    failures: list[str] = []

    def say(what: str, result: dict[str, object], good: bool = True) -> None:
        report[what] = result
        if not good:
            failures.append(what)
        print(json.dumps({"server": name, what: result}), flush=True)
        (output / f"{name}.json").write_text(json.dumps(report | {"failures": failures}, indent=1) + "\n")

    def start(server: str, port: int, **environment: str) -> RankServer:
        return RankServer(server, port, options, arguments, **environment)

    servers = [start(name, options.port)]
    if options.different:
        servers.append(start(f"{name}-different", options.port + 1, DIFFERENT_RANK="1"))
    began = time.monotonic()
    try:
        server = servers[0]
        if not server.wait(300):
            sys.exit(1)
        say("start", {"seconds": round(time.monotonic() - began), "ranks": server.ranks()})
        found = judged(server, name, output)
        say("evidence", found, found["verdict"] == "proved")
        if options.different and servers[1].wait(200):
            found = judged(servers[1], servers[1].name, output)
            say("evidence with a different rank", found, found["verdict"] == "refuted")
            servers[1].stop()
        wait_for(options.wait_for)
        load = Load(server.url)
        before = server.gate()
        asyncio.run(load.crossing(plan.threshold, options.seconds))
        after = server.gate()
        counts = {key: after[key] - before[key] for key in ("transitions", "open_steps", "closed_steps")}
        say("load", load.report() | {"gate": counts | {"mode": after["mode"]}}, load.outcomes["lost"] == 0)
        time.sleep(1.5)  # the status files are written once a second
        ranks = compared(server)
        say("decisions", ranks, ranks["alike"] is True and counts["transitions"] > 1)
        found = judged(server, f"{name}-after-load", output)
        say("evidence after the load", found, found["verdict"] == "proved")
        if options.kill:
            say("killed", killed(server, output))
    finally:
        for server in servers:
            server.stop()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
