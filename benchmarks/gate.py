"""Output tokens per second without speculation, with it, and behind the gate, on one GPU.

    python benchmarks/gate.py --output DIR --run ID --plan tree:10:2.5 --plan chain2:4:1.5 -- <arguments of all servers>

A plan is a shape of speculation, the gate's threshold, and the acceptance that SGLang simulates (0: real verification).
Simulated, every token is the same, so the figures say what a step costs, never what a draft earns. The arguments after
`--` are SGLang's, those of the model and its draft included.

All servers are started at once and the arms take turns at each level: a machine that grows warm then favours none. An
idle server takes no GPU time. One gated server gives three arms: forced closed, forced open, and by its threshold.
`--alone` starts the gated servers first, one after the other: the time and the memory that each rank logs for the gate
are then no other server's.
`--no-extend` adds an arm that is closed and whose draft never sees the prompts: what deferring that could gain at most.

Each worker of a closed loop sends 256 random tokens, waits for 128, and sends again; all send equally many requests. A
round is all levels, and the ramps if there are any. With `--tp-size N` among SGLang's arguments each server takes N
GPUs.
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
from typing import NamedTuple

import httpx

INPUT, OUTPUT, VOCABULARY = 256, 128, 120000


def shape(*, steps: int, topk: int, draft_tokens: int) -> list[str]:
    """SGLang's arguments for a shape of speculation."""
    values = {"num-steps": steps, "eagle-topk": topk, "num-draft-tokens": draft_tokens}
    return [part for name, value in values.items() for part in (f"--speculative-{name}", str(value))]


SHAPES = {
    "tree": shape(steps=5, topk=4, draft_tokens=16),
    "chain2": shape(steps=3, topk=1, draft_tokens=4),
}
HOOKS = Path(__file__).resolve().parent / "hooks"  # a sitecustomize for the servers' processes
RAMP = [1, 4, 8, 12, 16, 32, 16, 12, 8, 4, 1]
GATE = "--speculative-disable-batch-threshold"
SPECULATIVE = ("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-attention-backend")


class Server:
    """A server on this machine."""

    def __init__(self, name: str, port: int, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = output / f"{name}.log"
        # SGLang's own choice for its process group, a port that is free at that moment, can be another server's.
        ports = ["--port", str(port), "--nccl-port", str(port + 500)]
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", *ports]
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
    """A closed loop of `concurrency` workers for `seconds`, whole requests; or the levels of a `ramp` one by one."""
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

        rounds = 0

        async def worker(end: float) -> None:
            nonlocal rounds
            sent = 0
            # All send equally many: a last wave that some have no part in would count as a slow one.
            while sent < rounds or time.perf_counter() < end:
                sent += 1
                rounds = max(rounds, sent)
                await request()

        started = time.perf_counter()
        for workers in ramp or [concurrency]:
            rounds = 0
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


def wait_for(pids: str) -> None:
    """Wait until the processes of these ids, comma-separated, have ended."""
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids.split(",") if pid):
        time.sleep(0.5)


def ranks(arguments: list[str]) -> int:
    """The number of tensor-parallel ranks that the servers are to have."""
    return int(arguments[arguments.index("--tp-size") + 1]) if "--tp-size" in arguments else 1


class Plan(NamedTuple):
    """A shape of speculation, the threshold of its gated server, and the simulated tokens per verify step (0: none)."""

    name: str
    threshold: int
    acc: float

    @classmethod
    def parse(cls, text: str) -> Plan:
        """From "tree:10:2.5"; raises ValueError."""
        name, threshold, acc = text.split(":")
        if name not in SHAPES:
            raise ValueError(f"the plan {name!r} is none of {', '.join(SHAPES)}")
        return cls(name, int(threshold), float(acc))


class Bench:
    """The servers of a run, and the records of its measurements."""

    def __init__(
        self,
        output: Path,
        run: str,
        *,
        plans: list[Plan],
        skip: set[str],
        patched: Path | None,
        arguments: list[str],
        port: int,
        no_extend: bool,
        alone: bool,
        fields: dict[str, object],
    ) -> None:
        self.output, self.run, self.skip, self.fields = output, run, skip, fields
        self.modes = ("", "-closed", "-open", "-gated", *(["-noextend"] if no_extend else []))
        self.plans = {plan.name: plan for plan in plans}
        self.records: list[dict] = []
        plain = without_speculation(arguments)
        configured: dict[str, tuple[list[str], dict[str, str]]] = {
            "base": (plain, {}),
            "basenoov": ([*plain, "--disable-overlap-schedule"], {}),
        }
        path = [*([str(patched.absolute())] if patched else []), os.environ.get("PYTHONPATH", "")]
        for plan in plans:
            acc = {"SGLANG_SIMULATE_ACC_LEN": str(plan.acc)} if plan.acc else {}
            shaped = [*arguments, *SHAPES[plan.name]]
            configured[plan.name] = (shaped, acc)
            gated = [*shaped, GATE, str(plan.threshold)]
            configured[f"{plan.name}-gate"] = (gated, acc | {"PYTHONPATH": ":".join(path)})
            hooked = {"PYTHONPATH": ":".join([str(HOOKS), *path]), "WITHOUT_PROMPT_EXTEND": "1"}
            configured[f"{plan.name}-noextend"] = (gated, acc | hooked)
        names = [name for name in configured if name in map(self.server_name, self.arms())]
        self.servers: dict[str, Server] = {}
        for name in sorted(names, key=lambda name: "-" not in name) if alone else names:
            began = time.monotonic()
            server_arguments, environment = configured[name]
            self.servers[name] = Server(name, port + len(self.servers), server_arguments, output, environment)
            if alone and "-" in name and self.servers[name].wait(300):
                print(f"{name} is up, alone, after {time.monotonic() - began:.0f} s", flush=True)

    def arms(self) -> list[str]:
        """The names of the arms, in the order in which they take turns."""
        gated = [f"{plan}{mode}" for plan in self.plans for mode in self.modes]
        return [arm for arm in ("base", "basenoov", *gated) if arm not in self.skip]

    @staticmethod
    def server_name(arm: str) -> str:
        """The server that an arm is measured on."""
        plan, _, mode = arm.partition("-")
        return f"{plan}-noextend" if mode == "noextend" else f"{plan}-gate" if mode else plan

    def measure(
        self, arm: str, concurrency: int, seconds: float, ramp: list[int] | None = None, **more: object
    ) -> None:
        """One level on one arm: measure, record, print."""
        plan, _, mode = arm.partition("-")
        server = self.servers[self.server_name(arm)]
        before = None
        if mode:
            server.set(speculative_gate_force={"gated": None, "noextend": "closed"}.get(mode, mode))
            before = server.gate()
        result = asyncio.run(level(server.url, concurrency, seconds, ramp))
        if before:
            after = server.gate()
            result |= {name: after[name] - before[name] for name in ("transitions", "open_steps", "closed_steps")}
        acc = self.plans[plan].acc if plan in self.plans else None
        self.records.append({"arm": arm, **result, "acc": acc, "run": self.run, **self.fields, **more})
        print(json.dumps(self.records[-1]), flush=True)
        (self.output / "results.json").write_text(json.dumps(self.records, indent=0))


def main() -> None:
    """Run the command line; prints a JSON line per level and writes results.json into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plan", type=Plan.parse, action="append", required=True, help="SHAPE:THRESHOLD:ACCEPTANCE")
    parser.add_argument("--run", required=True, help="the id of this run in the records")
    parser.add_argument("--concurrency", default="1,4,8,10,16,32,64")
    parser.add_argument("--seconds", type=float, default=3, help="per level")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--skip", default="", help="arms to leave out, comma-separated")
    parser.add_argument(
        "--repeat", choices=SHAPES, action="append", default=[], help="five turns of SHAPE, SHAPE-open at 1, 4, 8"
    )
    parser.add_argument(
        "--ramp", choices=SHAPES, action="append", default=[], help="in each round, a ramp on base, SHAPE, SHAPE-gated"
    )
    parser.add_argument("--ramp-seconds", type=float, default=1, help="of each level of a ramp")
    parser.add_argument("--no-extend", action="store_true", help="the arm SHAPE-noextend as well")
    parser.add_argument("--alone", action="store_true", help="start the gated servers first, one after the other")
    parser.add_argument("--port", type=int, default=30100, help="of the first server; the others follow")
    parser.add_argument("--machine", help="recorded with each level, as is the number of ranks")
    parser.add_argument(
        "--patched", type=Path, help="folder with the patched sglang and spec_gate, for gated servers only"
    )
    parser.add_argument(
        "--wait-for", default="", help="process ids, comma-separated, that must end before the first level"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = [argument for argument in options.arguments if argument != "--"]
    started = time.monotonic()
    skip = set(options.skip.split(","))
    bench = Bench(
        options.output,
        options.run,
        plans=options.plan,
        skip=skip,
        patched=options.patched,
        arguments=arguments,
        port=options.port,
        no_extend=options.no_extend,
        alone=options.alone,
        fields={"machine": options.machine, "tp": ranks(arguments)} if options.machine else {},
    )
    try:
        up = [server.wait(300) for server in bench.servers.values()]
        if not all(up):
            sys.exit(1)
        print(f"all servers are up after {time.monotonic() - started:.0f} s", flush=True)
        wait_for(options.wait_for)
        for server in bench.servers.values():
            asyncio.run(level(server.url, 64, 0.1))
        print(f"measuring from {time.monotonic() - started:.0f} s on", flush=True)
        for number in range(options.rounds):
            for concurrency in map(int, options.concurrency.split(",")):
                for arm in bench.arms():
                    bench.measure(arm, concurrency, options.seconds, round=number)
            for shape in options.ramp:
                for arm in (arm for arm in ("base", shape, f"{shape}-gated") if arm in bench.arms()):
                    bench.measure(arm, max(RAMP), options.ramp_seconds, RAMP, round=number)
        for shape in options.repeat:
            for repeat in range(5):
                for concurrency in (1, 4, 8):
                    for arm in (shape, f"{shape}-open"):
                        bench.measure(arm, concurrency, 1.5, repeat=repeat)
    finally:
        for server in bench.servers.values():
            server.stop()


if __name__ == "__main__":
    main()
