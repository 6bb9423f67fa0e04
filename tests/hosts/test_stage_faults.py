"""Each stage of a deploy, and what may happen in the middle of it: the same deploy once more converges.

    STAGE_FAULTS=all pytest -s tests/hosts/test_stage_faults.py      all of them (docs/faults.md), one to two hours

Without it two are run, of three minutes together. A deploy runs until it begins the task of a stage; then the fault
comes, and what the deploy still does is waited for.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from deploy_target import ROOT, PlaybookUnderWay, Target, cut_network, eventually, plain

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
WRITES = {"model": "/srv/models", "switch": "/etc/systemd/system", "acceptance": "/etc/ansible"}
FAULTS = ("kill", "power-off", "full-disk", "network-cut")
# What the deploy says of it; a controller that was killed says nothing.
SAID = {"power-off": "UNREACHABLE", "full-disk": "No space left on device", "network-cut": "UNREACHABLE"}
IN_CI = {("switch", "power-off"), ("service", "full-disk")}
CELLS = sorted(itertools.product(STAGES, FAULTS) if os.environ.get("STAGE_FAULTS") == "all" else IN_CI)
# Of thresholds that no other module deploys: a deployment that is there has nothing to be written.
NUMBERS = itertools.count(8)


def variables(stage: str, target: Target) -> dict[str, Any]:
    """Makes the deploy have something to do in the stage, and in the later ones."""
    number = next(NUMBERS)
    active = target.release()
    plugins = len(json.loads(target.sh(f"cat {active}/release.json"))["plugins"])
    given: dict[str, Any] = {"threshold": number}
    if stage in {"build", "patch", "seal"}:
        # One of two releases is active; the other one is built anew.
        target.sh(f"find {ROOT}/releases -mindepth 1 -maxdepth 1 -not -name {Path(active).name} -exec rm -r {{}} +")
        plugins = 3 - plugins
    given["release_plugins"] = ["files/cpu_engine"] * plugins
    if stage == "model":
        source = (target.rehearsal.directory / "model").resolve() / "draft"
        given["model_sources"] = [{"src": str(source), "dest": f"/srv/models/copy-{number}"}]
    return given


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


def power_off(target: Target) -> None:
    """Without a shutdown, as when the current fails."""
    target.rehearsal.ssh("sudo systemd-run --no-block systemctl poweroff --force --force")
    eventually(lambda: " down" in target.rehearsal.rehearsal("list").stdout)


@contextmanager
def met(fault: str, target: Target, deploy: PlaybookUnderWay) -> Iterator[None]:
    """The fault, until the deploy has ended; after a power-off the host boots then."""
    if fault == "kill":
        deploy.kill()
    if fault == "power-off":
        power_off(target)
    with cut_network(target) if fault == "network-cut" else nullcontext():
        yield
    if fault == "power-off":
        done = target.rehearsal.rehearsal("up")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("stage", "fault"), CELLS)
def test_a_deploy_that_met_a_fault_converges_when_it_is_run_again(target: Target, stage: str, fault: str) -> None:
    before = target.state()
    given = variables(stage, target)
    arguments = ["--skip-tags", "smoke,load", "-e", json.dumps(given)]
    task, earlier = STAGES[stage]
    with PlaybookUnderWay(target, "deploy.yml", *arguments) as deploy:
        if fault == "full-disk":
            deploy.run_until(earlier)
            with full_disk(target, WRITES.get(stage, ROOT)):
                status = deploy.end()
        else:
            deploy.run_until(task)
            with met(fault, target, deploy):
                status = deploy.end()
    assert status != 0, deploy.output
    assert SAID.get(fault, "") in plain(deploy.output)

    # Nothing is lost: what served does so still, or again. From the switch on it may be the new deployment, but not
    # where the deploy itself could still go back.
    eventually(target.is_healthy, seconds=180)
    after = target.state()
    print(f"{stage} {fault}: {before} -> {after}\n{deploy.output[-3000:]}")  # pytest -s shows it: docs/faults.md
    if stage not in {"switch", "acceptance"} or fault == "full-disk":
        assert after.deployment == before.deployment
    if stage not in {"switch", "acceptance"} and fault != "power-off":
        assert after.main_pid == before.main_pid

    done = target.deploy(*arguments)
    assert done.returncode == 0, done.stdout
    assert "proof proved" in plain(done.stdout)
    assert target.deployed()["threshold"] == given["threshold"]
    assert target.is_healthy()
    assert target.sh("systemctl is-enabled sglang") == "enabled"
