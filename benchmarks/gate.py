"""Output tokens per second of one model without speculation, with it, and behind the gate, on the same GPU.

    python benchmarks/gate.py --output DIR --plan tree --threshold 10 --acc 2.5 --run ID -- <arguments of every server>

The arguments after `--` are SGLang's, those of the model and its draft included. All servers of a plan are started at once
and measured one after the other, so that one start's noise is shared; an idle server takes a core and no GPU time. One gated
server gives three arms: forced closed, forced open, and by its threshold. Acceptance is simulated by SGLang: every token is
the same, so the figures say what a step costs, never what a draft earns.

Each worker of a closed loop sends 256 random tokens, waits for 128, and sends again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

INPUT, OUTPUT, VOCABULARY = 256, 128, 120000
TREE = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16".split()
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4".split()
GATE = "--speculative-disable-batch-threshold"
SPECULATIVE = ("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-attention-backend")
NEVER = 100000


class Server:
    """A server on this machine."""

    def __init__(self, name: str, port: int, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = output / f"{name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> bool:
        """Whether it answers before `seconds` are over; a server that died prints the end of its log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=10).status_code == 200:
                    return True
            time.sleep(0.5)
        print(f"{self.name} did not start:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-40:]))
        return False

    def set(self, **settings: object) -> None:
        """Change settings of the gate; raises when they are refused."""
        answer = httpx.post(self.url + "/set_internal_state", json={"server_args": settings}, timeout=30)
        if answer.json() != [True]:
            raise RuntimeError(f"{self.name} refused {settings}: {answer.text}")

    def gate(self) -> dict:
        """The gate's block of /server_info."""
        return httpx.get(self.url + "/server_info", timeout=30).json()["internal_states"][0]["spec_gate"]

    def stop(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


async def level(url: str, concurrency: int, seconds: float, ramp: list[int] | None = None) -> dict:
    """A closed loop of `concurrency` workers for `seconds`, whole requests; or the levels of a `ramp` one after the other."""
    numbers = random.Random(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        done: list[tuple[float, dict]] = []

        async def request() -> None:
            body = {
                "input_ids": [numbers.randrange(1000, VOCABULARY) for _ in range(INPUT)],
                "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True},
            }
            begun = time.perf_counter()
            meta = (await client.post(url + "/generate", json=body)).json()["meta_info"]
            done.append((time.perf_counter() - begun, meta))

        async def worker(end: float) -> None:
            while time.perf_counter() < end:
                await request()

        started = time.perf_counter()
        for workers in ramp or [concurrency]:
            end = time.perf_counter() + seconds
            await asyncio.gather(*(worker(end) for _ in range(workers)))
        wall = time.perf_counter() - started
    verify = sum(meta.get("spec_verify_ct") or 0 for _, meta in done)
    drafts = sum(meta.get("spec_num_correct_drafts") or 0 for _, meta in done)
    return {
        "concurrency": "ramp" if ramp else concurrency,
        "requests": len(done),
        "tok_s": round(OUTPUT * len(done) / wall, 1),
        "latency_p50_s": round(statistics.median(latency for latency, _ in done), 4),
        "accept_len": round(1 + drafts / verify, 3) if verify else None,
    }


def without_speculation(arguments: list[str]) -> list[str]:
    """The common arguments without those of the draft."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in SPECULATIVE:
            kept.append(argument)
        skip = not skip and argument in SPECULATIVE
    return kept


def main() -> None:
    """Run the command line; prints a JSON line per level and writes results.json into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plan", choices=["tree", "chain2"], required=True)
    parser.add_argument("--threshold", type=int, required=True, help="for the arm -gated; 0 leaves it out")
    parser.add_argument("--acc", type=float, help="simulated tokens per verify step; absent: real verification")
    parser.add_argument("--run", required=True, help="the id of this run in the records")
    parser.add_argument("--concurrency", default="1,4,8,10,16,32,64")
    parser.add_argument("--seconds", type=float, default=4, help="per level")
    parser.add_argument("--arms", default="base,basenoov,PLAN,PLAN-closed,PLAN-open,PLAN-gated")
    parser.add_argument("--repeats", type=int, default=0, help="interleaved repeats of PLAN and PLAN-open at 1, 4 and 8")
    parser.add_argument("--ramp", action="store_true", help="ramps 1..32..1 on base, PLAN and PLAN-gated")
    parser.add_argument("--patched", type=Path, help="folder with the patched sglang and spec_gate, for the gated server only")
    parser.add_argument("--start-seconds", type=float, default=240)
    parser.add_argument("--wait-for", default="", help="process ids, comma-separated, that must end before the first level")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    plan, common = options.plan, [a for a in options.arguments if a != "--"]
    speculation = TREE if plan == "tree" else CHAIN
    arms = options.arms.replace("PLAN", plan).split(",")
    asked = {
        "base": without_speculation(common),
        "basenoov": [*without_speculation(common), "--disable-overlap-schedule"],
        plan: [*common, *speculation],
        f"{plan}-gate": [*common, *speculation, GATE, str(options.threshold or NEVER)],
    }
    needed = {f"{plan}-gate" if arm.startswith(f"{plan}-") else arm for arm in arms}
    output = options.output
    records: list[dict] = []

    def record(arm: str, result: dict) -> None:
        records.append({"arm": arm, **result, "acc": options.acc, "run": options.run})
        print(json.dumps(records[-1]), flush=True)
        (output / "results.json").write_text(json.dumps(records, indent=0))

    environment = {"SGLANG_SIMULATE_ACC_LEN": str(options.acc)} if options.acc else {}
    path = {"PYTHONPATH": f"{options.patched.absolute()}:{os.environ.get('PYTHONPATH', '')}"} if options.patched else {}
    servers = {
        name: Server(name, 30100 + i, arguments, output, environment | (path if name.endswith("-gate") else {}))
        for i, (name, arguments) in enumerate(asked.items())
        if name in needed
    }
    try:
        started = time.monotonic()
        alive = {name for name, server in servers.items() if server.wait(options.start_seconds)}
        print(f"started {sorted(alive)} in {time.monotonic() - started:.0f} s", flush=True)
        gated = servers.get(f"{plan}-gate")

        def arm_url(arm: str) -> str | None:
            """The server of an arm, made ready for it."""
            name = f"{plan}-gate" if arm.startswith(f"{plan}-") else arm
            if name not in alive:
                return None
            if name == f"{plan}-gate":
                force = {f"{plan}-closed": "closed", f"{plan}-open": "open"}.get(arm)
                gated.set(speculative_gate_force=force)
            return servers[name].url

        while any(Path(f"/proc/{pid}").exists() for pid in options.wait_for.split(",") if pid):
            time.sleep(0.5)
        print(f"measuring from {time.monotonic() - started:.0f} s on", flush=True)
        for arm in arms:
            if url := arm_url(arm):
                asyncio.run(level(url, 64, 0.1))  # warm
        for arm in arms:
            if url := arm_url(arm):
                for concurrency in map(int, options.concurrency.split(",")):
                    record(arm, asyncio.run(level(url, concurrency, options.seconds)))
        for repeat in range(options.repeats):
            for concurrency in (1, 4, 8):
                for arm in (plan, f"{plan}-open"):
                    if url := arm_url(arm):
                        record(arm, asyncio.run(level(url, concurrency, 1.5)) | {"repeat": repeat})
        if options.ramp:
            steps = [1, 2, 4, 8, 12, 16, 24, 32, 24, 16, 12, 8, 4, 2, 1]
            for arm in ("base", plan, f"{plan}-gated"):
                if url := arm_url(arm):
                    before = gated.gate() if arm.endswith("gated") else None
                    result = asyncio.run(level(url, 32, 1.0, steps))
                    if before:
                        after = gated.gate()
                        result["transitions"] = after["transitions"] - before["transitions"]
                        result["steps"] = sum(after[k] - before[k] for k in ("open_steps", "closed_steps"))
                    record(arm, result)
        if gated and gated.name in alive:
            print(json.dumps({k: v for k, v in gated.gate().items() if k != "identity"}), flush=True)
    finally:
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    main()
