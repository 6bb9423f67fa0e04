"""How long a deploy with nothing to do takes, in tasks and SSH round trips too, and how it grows with the hosts.

    .venv/bin/python benchmarks/deploy_time.py [--hosts 8]

One rehearsal host (rehearsal-1, up and deployed: `make deploy`) is deployed to again, without and with the load test.
Then `deploy.yml --check` is run on 1, 2, 4 and 8 fresh hosts without a release, made in a folder of their own and
removed afterwards: the same tasks but for those that need a release or a server, since eight servers do not fit into
one machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLAYBOOK = [Path(sys.executable).with_name("ansible-playbook"), "deploy.yml", "-e", "threshold=5"]


def measure(arguments: list[str], hosts: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall time in seconds without tracing; then tasks and SSH round trips, which only a traced run tells."""
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "hosts.yml"
        inventory.write_text("sglang_hosts:\n  hosts:\n" + "".join(f"    {host}:\n" for host in hosts))
        (Path(folder) / "group_vars").symlink_to(REPOSITORY / "inventory/rehearsal/group_vars")
        command = [*PLAYBOOK, f"--inventory={inventory}", *arguments]
        begin = time.monotonic()
        plain = run(command, environment)
        seconds = time.monotonic() - begin
        traced = run([*command, "-vvv"], environment)
    counts = [int(count) for count in re.findall(r"ok=(\d+)", plain.rpartition("PLAY RECAP")[2])]
    changed = sum(int(count) for count in re.findall(r"changed=(\d+)", plain.rpartition("PLAY RECAP")[2]))
    return {
        "hosts": len(hosts),
        "seconds": round(seconds, 1),
        "tasks_a_host": max(counts),
        "changed": changed,
        "round_trips_a_host": round(traced.count("SSH: EXEC") / len(hosts), 1),
    }


def run(command: list[str | Path], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-4000:] + done.stderr)
    return done.stdout


def rehearsal(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rehearsal", *arguments], cwd=REPOSITORY, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, choices=range(1, 10))
    most = parser.parse_args().hosts
    standing = os.environ.get("SPECGATE_REHEARSAL_DIR", str(REPOSITORY / ".rehearsal"))
    environment = os.environ | {"ANSIBLE_NOCOLOR": "1", "SPECGATE_REHEARSAL_DIR": standing}
    for arguments in ["--skip-tags", "load"], []:
        figures = measure(arguments, ["rehearsal-1"], environment)
        if figures["changed"]:
            sys.exit(f"The deploy changed something, so these are not the figures of one with nothing to do: {figures}")
        print("nothing to do", *arguments, figures, flush=True)
    with tempfile.TemporaryDirectory(dir=REPOSITORY) as folder:
        fresh = environment | {"SPECGATE_REHEARSAL_DIR": folder}
        names = [f"rehearsal-{number}" for number in range(1, most + 1)]
        try:
            rehearsal(fresh, "model")
            for name in names:  # one by one: together they would be asked for the disk of eight releases
                rehearsal(fresh, "up", name)
            for count in (count for count in (1, 2, 4, 8) if count <= most):
                print("check mode, fresh hosts:", measure(["--check"], names[:count], fresh), flush=True)
        finally:
            rehearsal(fresh, "remove")


if __name__ == "__main__":
    main()
