"""threshold=auto on a rehearsal host whose engine has the costs of a GPU: faults first, then the whole way, then again.

The tests share the host with test_deploy.py and leave its deployment as they found it. They run in this order: each
finds what the last one left.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from deploy_target import ROOT, Target, eventually, plain, recap
from rehearsal_commands import BIN, REPOSITORY

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

COST_SHAPE = "20,1"  # speculation pays below about 8 requests
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_ENGINE_FORWARD_MS": COST_SHAPE,
}


@pytest.fixture(scope="module")
def target(target: Target) -> Iterator[Target]:
    former = target.state().deployment
    yield target
    done = target.rehearsal.run_playbook("playbooks/rollback.yml", "-e", f"rollback_to={former}")
    assert done.returncode == 0, done.stdout


def auto(target: Target, *arguments: str, **differing: Any) -> list[str]:
    variables = {
        "threshold": "auto",
        "calibration_budget": "120s",
        "service_environment": ENVIRONMENT,
        "service_server_arguments": target.server_arguments() | {"enable-metrics": True},
    } | differing
    return ["deploy.yml", "-e", json.dumps(variables), *arguments]


def gate(target: Target) -> dict[str, Any]:
    info = json.loads(target.sh("curl --silent --max-time 20 http://127.0.0.1:30000/server_info"))
    state: dict[str, Any] = info["internal_states"][0]["spec_gate"]
    return state


def held(target: Target) -> bool:
    return gate(target)["settings"]["forced"] is not None


def test_an_interrupted_calibration_gives_the_gate_back_and_stores_nothing(target: Target) -> None:
    before = target.state()
    process = target.rehearsal.popen_fab("calibrate", "--json")
    try:
        eventually(lambda: held(target))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    (entry,) = json.loads(output)["hosts"]
    assert process.returncode == 1
    assert entry["reasons"] == ["interrupted; the gate is as it was before"]
    assert not held(target)
    assert target.state() == before
    assert target.sh(f"ls {ROOT}/profiles 2>/dev/null || true") == ""


def test_a_server_that_dies_while_it_is_calibrated_brings_the_former_deployment_back(target: Target) -> None:
    before = target.state()
    process = subprocess.Popen(
        [BIN / "ansible-playbook", *auto(target)], cwd=REPOSITORY, env=target.rehearsal.environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        eventually(lambda: target.state().deployment != before.deployment)
        eventually(lambda: target.is_healthy() and held(target))
        target.sh(f"kill -KILL {gate(target)['identity']['pid']}")
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "`fab calibrate` ended with status 1" in plain(output)
    assert f"The former deployment {before.deployment} was activated again and is ready" in plain(output)
    assert target.state().deployment == before.deployment
    assert target.is_healthy()
    assert not held(target)


def test_auto_calibrates_stores_the_profile_and_deploys_by_it(target: Target) -> None:
    former = target.state().deployment
    done = target.rehearsal.run_playbook(*auto(target))
    assert done.returncode == 0, done.stdout
    deployed = target.deployed()
    path = f"{ROOT}/profiles/{deployed['profile']}.json"
    assert target.sh(f"stat --format='%U %a' {path}") == "root 644"
    profile = json.loads(target.sh(f"cat {path}"))
    assert 1 < profile["recommended"]["threshold"] <= 16
    assert (deployed["threshold"], deployed["server_arguments"]["speculative-gate-profile"]) == (0, path)
    assert gate(target)["settings"]["profile"] == profile["id"]
    assert not held(target)
    output = plain(done.stdout)
    assert f"gate decides by profile {profile['id']}" in output
    assert f"threshold {profile['recommended']['threshold']} would be the number" in output
    assert "speculation pays below" in output
    assert f"SGLANG_CPU_ENGINE_FORWARD_MS={COST_SHAPE}: the figures are not this machine's" in output
    assert re.search(r"load (\d+) of \1 requests answered", output)
    # What a roll-back goes to is what served before, and not the deployment that was calibrated.
    assert target.sh(f"readlink {ROOT}/previous") == f"deployments/{former}"


def test_the_profiles_gate_is_in_the_metrics(target: Target) -> None:
    def metric(name: str, label: str = "") -> float:
        text = target.sh("curl --silent --fail --max-time 20 http://127.0.0.1:30000/metrics")
        (value,) = re.findall(rf"^sglang:spec_gate_{name}{{.*{label}.*}} (\S+)$", text, re.MULTILINE)
        return float(value)

    # They are a second behind, and an idle server sleeps: asking for its state wakes it.
    eventually(lambda: metric("break_even") == gate(target)["break_even"])
    state = gate(target)
    assert state["break_even"] > 1
    assert metric("acceptance") == state["acceptance"] > 1
    for outcome in ("passed", "failed"):
        assert metric("probes_total", f'outcome="{outcome}"') == state[f"{outcome}_probes"]


def test_a_second_deploy_takes_the_stored_profile_and_changes_nothing(target: Target) -> None:
    before = target.state()
    done = target.rehearsal.run_playbook(*auto(target, "--skip-tags", "load"))
    assert done.returncode == 0, done.stdout
    assert recap(done.stdout)["changed"] == 0
    assert target.state() == before
    assert "speculation pays below" in plain(done.stdout)


def test_a_profile_of_another_server_is_not_used_and_the_reason_is_told(target: Target) -> None:
    """In check mode, which would otherwise measure again: what differs is the depth of speculation, and its costs."""
    arguments = target.server_arguments() | {"speculative-num-steps": 2, "speculative-num-draft-tokens": 6}
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "SGLANG_CPU_ENGINE_FORWARD_MS"}
    done = target.rehearsal.run_playbook(
        *auto(target, "--check", service_server_arguments=arguments, service_environment=environment)
    )
    assert done.returncode == 0, done.stdout
    output = plain(done.stdout)
    assert "gate decides by profile yet to be measured" in output
    assert f'devices was ["cpu, SGLANG_CPU_ENGINE_FORWARD_MS={COST_SHAPE}"] and is ["cpu"]' in output
    assert re.search(r"not used.*speculative was .*\"num_steps\": 3.* and is .*\"num_steps\": 2", output)
