"""Speed and memory of the log parser against `LC_ALL=C grep -cE` with the parser's own markers.

    .venv/bin/python benchmarks/log_parser.py [--gigabytes 5] [--repeats 3]

Writes a log of that size to a temporary folder: a real start of a server (tests/data/logs), a gate's identity line,
then the decode, prefill and access lines of that log in random order, with echoed requests and, rarely, transitions
among them. Both programs read it from a warm page cache, in turns. Wall time counts; CPU time is shown because a busy
machine disturbs wall time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from diagnostics.proof import logs  # noqa: E402 - found by the line above

GIGABYTE = 1_000_000_000
BLOCK_BYTES = 64_000_000


def write_log(path: Path, size: int) -> None:
    """Write a realistic log of at least `size` bytes."""
    chance = random.Random(5)
    lines = (REPOSITORY / "tests/data/logs/0.5.12.post1-h200-v1.log").read_bytes().splitlines(keepends=True)
    ready = next(number for number, line in enumerate(lines) if logs.READY_MARKER in line)
    start, traffic = lines[: ready + 1], lines[ready + 1 :]
    stamp = b"[2026-11-29 14:25:31] "
    start.insert(ready, stamp + b'spec_gate identity {"schema": "spec_gate.identity/1", "tp_rank": 0, "pid": 1}\n')
    decode = b"Decode batch, #running-req: %d, #token: %d, token usage: 0.03, accept len: 2.41, accept rate: 0.10, "
    decode += b"cuda graph: True, gen throughput (token/s): %d.76, #queue-req: 0\n"
    block: list[bytes] = []
    length = 0
    while length < BLOCK_BYTES:
        kind = chance.random()
        if kind < 0.5:
            line = stamp + decode % (chance.randrange(64), chance.randrange(99999), chance.randrange(9999))
        elif kind < 0.99:
            line = chance.choice(traffic)
        elif kind < 0.9999:
            line = (
                stamp
                + b'Receive: obj=GenerateReqInput(text="'
                + b"what is a spec_gate for? " * chance.randrange(99)
                + b'")\n'
            )
        else:
            line = stamp + b'spec_gate transition {"to": "closed", "step": 5, "running": 5, "reason": "threshold"}\n'
        block.append(line)
        length += len(line)
    with path.open("wb") as file:
        file.writelines(start)
        while file.tell() < size:
            file.writelines(block)


def grep(path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of grep. Its output goes to a pipe: into /dev/null it would stop at the first match."""
    pattern = "|".join(re.escape(marker.decode()) for marker in logs.MARKERS)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(
        ["grep", "-cE", pattern, path], env={**os.environ, "LC_ALL": "C"}, stdout=subprocess.PIPE, check=True
    )
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parser(path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of the parser, in a process of its own."""
    program = (
        f"from diagnostics.proof import logs; print(logs.parse(logs.open_log({str(path)!r})).current.transitions > 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    answer = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    wall = time.perf_counter() - started
    if answer.stdout.strip() != b"True":
        raise SystemExit("the parser did not find the transitions that were written")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print one line per program."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gigabytes", type=float, default=5)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="specgate-") as folder:
        path = Path(folder, "server.log")
        write_log(path, int(given.gigabytes * GIGABYTE))
        size = path.stat().st_size / GIGABYTE
        times: dict[str, list[tuple[float, float]]] = {"grep": [], "parser": []}
        for program in (grep, parser):
            program(path)  # warms the page cache
        for _ in range(given.repeats):
            times["grep"].append(grep(path))
            times["parser"].append(parser(path))
    rates = {}
    for name, pairs in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        rates[name] = (size / wall, size / cpu)
        print(f"{name:7} {size / wall:5.2f} GB/s wall, {size / cpu:5.2f} GB/s CPU (median of {len(pairs)})")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    wall, cpu = (mine / other for mine, other in zip(rates["parser"], rates["grep"], strict=True))
    print(f"parser / grep: {wall:.2f} wall, {cpu:.2f} CPU over {size:.2f} GB; peak memory of either: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
