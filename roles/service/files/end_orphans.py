"""Ends what a former run of the service left behind, and tells who else holds GPU memory. Run before each start.

An orphan is a process of the service's user that is a server's or holds GPU memory, and that no service of systemd
looks after: it was started by hand, left the unit's control group, or outlived the final SIGKILL in it (a hung driver).
The next start would run out of the memory that it holds, minutes later. Other users' processes are only named.

Exit status: 0 when none is left, 1 when one cannot be ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WAIT_S = 30.0


def control_group(process: Path) -> str:
    """systemd's path for a process; the last line is that of version 2, or of systemd's own hierarchy."""
    return (process / "cgroup").read_text().splitlines()[-1].split(":", 2)[2]


def looked_after(group: str, own_group: str) -> bool:
    """Whether the processes of this control group belong to a running service.

    Those in the group of this very start do not: nothing but this program has been started in it yet.
    """
    return group != own_group and group.endswith(".service")


def is_servers(command: str) -> bool:
    """Whether a command line is one of SGLang's main process or, replaced by a title, of its children."""
    return command.startswith("sglang::") or "sglang.launch_server" in command.split()


def orphans(memory: dict[int, str], proc: Path = Path("/proc")) -> dict[int, str]:
    """Process id to command line of each orphan; ``memory`` is that of ``gpu_memory``."""
    own_group, found = control_group(proc / "self"), {}
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            pid, zombie = int(process.name), (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if zombie or pid == os.getpid() or process.stat().st_uid != os.getuid():
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (is_servers(command) or pid in memory) and not looked_after(control_group(process), own_group):
                found[pid] = command
    return found


def gpu_memory() -> dict[int, str]:
    """Process id to GPU memory (MiB, as the driver says it); empty without NVIDIA's driver."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(",") for line in answer.splitlines() if line.count(",") == 1)
    return {int(pid): used.strip() for pid, used in rows if pid.strip().isdigit()}


def main() -> int:
    memory = gpu_memory()
    ended = orphans(memory)
    for pid, command in ended.items():
        held = f", which holds {memory[pid]} MiB of GPU memory" if pid in memory else ""
        print(f"ending process {pid} of a former run ({command[:100]}){held}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    # The driver frees the memory of a process a moment after its end.
    while left := ended.keys() & (orphans(memory).keys() | memory.keys()):
        if time.monotonic() > deadline:
            print(f"cannot end {sorted(left)}: the driver may hang; reset the GPUs or restart the host", flush=True)
            return 1
        time.sleep(0.2)
        memory = gpu_memory()
    for pid, used in memory.items():
        print(f"process {pid} of somebody else holds {used} MiB of GPU memory, which this start lacks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
