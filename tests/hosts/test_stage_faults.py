"""Each stage of a deploy, and what may happen in the middle of it: the same deploy once more converges.

    STAGE_FAULTS=all pytest tests/hosts/test_stage_faults.py      all of them (docs/faults.md), about an hour

Without it one for each fault is run. A deploy runs until it begins the task of a stage; then the fault comes, and what
the deploy still does is waited for.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from deploy_target import ROOT, Target, eventually, plain
from rehearsal_commands import BIN, REPOSITORY

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]

# Stage to the task that is under way when the fault comes; and to that before it, from which on the disk is full.
STAGES = {
    "build": ("release : Install the locked packages", "release : Create the virtual environment"),
    "patch": ("spec_gate : Apply the series", "spec_gate : Look at the files that the series patches"),
    "seal": ("release : Import the server with the release's own interpreter",) * 2,
    "model": ("model : Copy the models", "model : Create the models' folders"),
    "service": ("service : Write the unit", "service : Create the service's user"),
    "switch": ("service : Restart the service", "service : Compare the units"),
    "acceptance": ("acceptance : Run the diagnostics on the controller",) * 2,
}
# Where a stage writes, for a full disk.
WRITES = {"model": "/srv/models", "switch": "/etc/systemd/system", "acceptance": "/var/lib/sglang"}
FAULTS = ("kill", "power-off", "full-disk", "network-cut")
IN_CI = {("patch", "kill"), ("switch", "power-off"), ("service", "full-disk"), ("acceptance", "network-cut")}
CELLS = sorted(itertools.product(STAGES, FAULTS) if os.environ.get("STAGE_FAULTS") == "all" else IN_CI)
NUMBERS = itertools.count(2)


def variables(stage: str, target: Target) -> dict[str, Any]:
    """Makes the deploy have something to do in the stage, and in the later ones."""
    number = next(NUMBERS)
    given: dict[str, Any] = {"threshold": number + 3}
    if stage in {"build", "patch", "seal"}:
        given["release_plugins"] = ["files/cpu_engine"] * number
    if stage == "model":
        source = (target.rehearsal.directory / "model").resolve() / "draft"
        given["model_sources"] = [{"src": str(source), "dest": f"/srv/models/copy-{number}"}]
    return given


class Deploy:
    """A deploy that is under way, as a process group of its own."""

    def __init__(self, target: Target, given: dict[str, Any]) -> None:
        command = [BIN / "ansible-playbook", "deploy.yml", "--skip-tags", "load", "-e", json.dumps(given)]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=target.rehearsal.environment, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.output = ""

    def run_until(self, task: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if line.startswith(f"TASK [{task}"):
                return
        raise AssertionError(f"the deploy ended before the task '{task}':\n{self.output}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        self.output += self.process.communicate(timeout=600)[0]
        return self.process.returncode


@contextmanager
def full_disk(target: Target, folder: str) -> Iterator[None]:
    """A file system with the folder's content, in which nothing more can be written."""
    target.sh(
        "mkdir -p /mnt/full && mount -t tmpfs -o size=256k tmpfs /mnt/full && mkdir /mnt/full/upper /mnt/full/work "
        f"&& mount -t overlay -o lowerdir={folder},upperdir=/mnt/full/upper,workdir=/mnt/full/work overlay {folder} "
        "&& (cat /dev/zero >/mnt/full/fill 2>/dev/null || true)"
    )
    try:
        yield
    finally:
        target.sh(f"umount --lazy {folder} /mnt/full; systemctl daemon-reload")


@contextmanager
def cut_network(target: Target) -> Iterator[None]:
    """Nothing passes between this machine and the host; neither is told."""
    address = target.sh("hostname --all-ip-addresses").split()[0]
    rules = (
        "table ip specgate_cut { chain output { type filter hook output priority 0; "
        f"ip daddr {address} drop; }} chain input {{ type filter hook input priority 0; ip saddr {address} drop; }} }}"
    )
    subprocess.run(["sudo", "nft", "--file", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["sudo", "nft", "delete", "table", "ip", "specgate_cut"], check=True)


def power_off(target: Target) -> None:
    """Without a shutdown, as when the current fails."""
    target.rehearsal.ssh("sudo systemctl poweroff --force --force")
    eventually(lambda: " down" in target.rehearsal.rehearsal("list").stdout)


@pytest.mark.parametrize(("stage", "fault"), CELLS)
def test_a_deploy_that_met_a_fault_converges_when_it_is_run_again(target: Target, stage: str, fault: str) -> None:
    before = target.state()
    given = variables(stage, target)
    deploy = Deploy(target, given)
    task, earlier = STAGES[stage]
    try:
        if fault == "full-disk":
            deploy.run_until(earlier)
            with full_disk(target, WRITES.get(stage, ROOT)):
                status = deploy.end()
        else:
            deploy.run_until(task)
            with cut_network(target) if fault == "network-cut" else nullcontext():
                if fault == "kill":
                    deploy.kill()
                if fault == "power-off":
                    power_off(target)
                status = deploy.end()
    finally:
        if deploy.process.poll() is None:
            deploy.kill()
    if fault == "power-off":
        assert target.rehearsal.rehearsal("up").returncode == 0
    if (stage, fault) != ("acceptance", "full-disk"):  # a server that serves writes nothing, so nothing fails
        assert status != 0, deploy.output

    # Nothing is lost: what served does so still, or again; from the switch on it may be the new deployment.
    eventually(target.is_healthy, seconds=180)
    if stage not in {"switch", "acceptance"}:
        after = target.state()
        assert after.deployment == before.deployment
        assert fault == "power-off" or after.main_pid == before.main_pid

    done = target.deploy("--skip-tags", "load", **given)
    assert done.returncode == 0, done.stdout
    assert "proof proved" in plain(done.stdout)
    assert target.deployed()["threshold"] == given["threshold"]
    assert target.is_healthy()
    assert target.sh("systemctl is-enabled sglang") == "enabled"
