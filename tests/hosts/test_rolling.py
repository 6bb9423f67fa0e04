"""Two hosts behind SGLang's router, under load all the time: no deploy and no roll-back may cost a request.

The tests share the hosts and run in this order: each finds what the last one left. rehearsal-1 is the tests' own host,
rehearsal-2 serves beside it, and the router is on rehearsal-3.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_target import ROOT, PlaybookUnderWay, State, Target, cut_network, eventually, plain
from rehearsal_commands import BIN, REPOSITORY, Rehearsal
from steady_traffic import Traffic, steady_traffic

from rehearsal import engine

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]

INVENTORY = "--inventory=inventory/rehearsal-router"
CLIENTS = 6
ROUTER_PORT = 30080
CONTROL_KEY = "rehearsal-router-key"  # the inventory's
# A step takes 40 ms, most of it asleep: requests are in flight all the time, and leave the processors to the deploy.
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_ENGINE_FORWARD_MS": "40,0.1"}


class Fleet:
    """The three hosts, as the person who deploys to them sees them."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.first, self.second, self.router = (Target(rehearsal, f"rehearsal-{number}") for number in (1, 2, 3))
        self.address = self.router.sh("hostname --all-ip-addresses").split()[0]

    def deploy(self, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        return self.first.deploy(INVENTORY, *arguments, service_environment=ENVIRONMENT, **extra)

    def roll_under_way(self, **extra: Any) -> PlaybookUnderWay:
        extra |= {"service_environment": ENVIRONMENT}
        return PlaybookUnderWay(self.first, INVENTORY, "deploy.yml", "-e", json.dumps(extra), "--skip-tags=load")

    def playbook(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.rehearsal.run_playbook(INVENTORY, *arguments)

    def states(self) -> tuple[State, State]:
        return self.first.state(), self.second.state()

    def workers(self) -> dict[str, bool]:
        """URL of each worker of the router to whether it finds it healthy; none where the router does not answer."""
        headers = f"--header 'Authorization: Bearer {CONTROL_KEY}'"
        answer = self.router.sh(f"curl --silent {headers} http://{self.address}:{ROUTER_PORT}/workers || true")
        return {worker["url"]: worker["is_healthy"] for worker in json.loads(answer or '{"workers": []}')["workers"]}

    def both_get_requests(self) -> bool:
        return list(self.workers().values()) == [True, True]

    def traffic(self) -> Any:
        return steady_traffic(self.address, ROUTER_PORT, CLIENTS)

    def recorded(self, target: Target) -> dict[str, Any]:
        """The local fact of the last deploy, as a play reads it."""
        done = self.rehearsal.run([BIN / "ansible", INVENTORY, target.host, "--module-name=ansible.builtin.setup",
                                   "--args=gather_subset=!all,!min,local"])  # fmt: skip
        assert done.returncode == 0, done.stdout
        recorded: dict[str, Any] = yaml.safe_load(done.stdout.partition("=>")[2])["ansible_facts"]["ansible_local"]
        return dict(recorded["specgate_sglang"])


@pytest.fixture(scope="module")
def fleet(rehearsal_host: Rehearsal) -> Iterator[Fleet]:
    done = rehearsal_host.rehearsal("up", "rehearsal-1", "rehearsal-2", "rehearsal-3")
    assert done.returncode == 0, done.stderr
    yield Fleet(rehearsal_host)
    done = rehearsal_host.rehearsal("remove", "rehearsal-2", "rehearsal-3")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def another_patch(fleet: Fleet) -> Fleet:
    """The same hosts, deployed to from a checkout with another patch, made as docs/gate.md says."""
    checkout = fleet.rehearsal.directory / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    for name in git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (REPOSITORY / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, checkout / name)
    series = checkout / "files/spec_gate/spec_gate/series"
    patch = series / "0.5.12.post1/sglang.srt.speculative.eagle_worker.patch"
    text = patch.read_text()
    assert text.count("@@ -1 +1,5 @@\n") == 1
    patch.write_text(text.replace("@@ -1 +1,5 @@\n", "@@ -1 +1,6 @@\n+PATCHED_OTHERWISE = True\n"))
    (site_packages,) = engine.ensure_environment().parent.parent.glob("lib/python3.*/site-packages")
    subprocess.run([sys.executable, "-m", "spec_gate.series", "build", "--site-packages", site_packages],
                   env=os.environ | {"PYTHONPATH": str(series.parents[1])}, check=True)  # fmt: skip
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all")
    git(checkout, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message=another")
    return Fleet(Rehearsal(fleet.rehearsal.directory, checkout))


def git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", checkout, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def unfailed(traffic: Traffic) -> None:
    print(traffic.answered, "requests answered")
    assert traffic.failures == []
    assert traffic.answered > CLIENTS


def test_two_hosts_are_deployed_behind_a_router(fleet: Fleet) -> None:
    done = fleet.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert fleet.both_get_requests()
    assert all("127.0.0.1" not in url and "0.0.0.0" not in url for url in fleet.workers())
    score = fleet.router.sh("systemd-analyze security --no-pager sglang-router | tail -n 1")
    assert float(re.search(r"([0-9.]+) OK", score)[1]) < 2.5, score  # type: ignore[index]
    assert fleet.rehearsal.fab("verify-worker", INVENTORY).returncode == 0
    url = f"http://{fleet.address}:{ROUTER_PORT}/workers"
    for given in ("--request GET", '--request POST --json \'{"url": "http://192.0.2.1"}\'', "--request DELETE"):
        what = f"{url}/00000000-0000-0000-0000-000000000000" if "DELETE" in given else url
        answer = fleet.router.sh(f"curl --silent --output /dev/null --write-out '%{{http_code}}' {given} {what}")
        assert answer == "401", given
    assert (
        CONTROL_KEY not in fleet.router.sh("ps -eo args; cat /etc/systemd/system/sglang-router.service") + done.stdout
    )
    assert "IPAddressAllow" in fleet.first.sh("cat /etc/systemd/system/sglang.service")


def test_a_router_that_dies_comes_back_with_the_same_hosts(fleet: Fleet) -> None:
    assert "smg_worker_health" in fleet.router.sh("curl --silent --fail http://127.0.0.1:30081/metrics")
    fleet.router.sh("systemctl kill --signal=KILL sglang-router")
    eventually(fleet.both_get_requests)
    assert fleet.router.sh("systemctl show --property=NRestarts --value sglang-router") != "0"


def test_a_second_deploy_changes_nothing(fleet: Fleet) -> None:
    before = fleet.states(), fleet.recorded(fleet.first)
    done = fleet.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert re.findall(r"changed=(\d+)", done.stdout) == ["0", "0", "0"]
    assert (fleet.states(), fleet.recorded(fleet.first)) == before


def test_a_roll_in_check_mode_says_what_it_would_do_and_does_nothing(fleet: Fleet) -> None:
    before = fleet.states()
    workers = fleet.router.sh("cat /etc/sglang-router/workers")
    done = fleet.deploy("--check", "--diff", threshold=3)
    assert done.returncode == 0, done.stdout
    assert plain(done.stdout).count("would serve on") == 2
    assert "0" not in [count for _, count in re.findall(r"(rehearsal-[12]) .* changed=(\d+)", done.stdout)]
    assert fleet.states() == before
    assert fleet.router.sh("cat /etc/sglang-router/workers") == workers
    assert fleet.both_get_requests()


def test_a_roll_to_another_patch_and_threshold_fails_no_request(fleet: Fleet, another_patch: Fleet) -> None:
    before = fleet.states()
    former = fleet.first.deployed()
    with fleet.traffic() as traffic:
        done = another_patch.deploy(threshold=3)
    assert done.returncode == 0, done.stdout
    unfailed(traffic)
    # SGLang's own stop and the router's retries hide from clients that a host was not drained.
    taken = re.findall(r"TASK \[router : Take the worker from the router\].*\n(\w+): \[(\S+)", done.stdout)
    assert taken == [("changed", "rehearsal-1"), ("changed", "rehearsal-2")]
    commit = git(another_patch.rehearsal.checkout, "rev-parse", "HEAD")
    for target, state in zip((fleet.first, fleet.second), before, strict=True):
        deployed = target.deployed()
        assert deployed["threshold"] == 3
        assert deployed["release"] != former["release"]
        assert deployed["series"] != former["series"]
        assert target.sh(f"readlink {ROOT}/previous") == f"deployments/{state.deployment}"
        recorded = fleet.recorded(target)
        assert (recorded["deployment"], recorded["commit"]) == (deployed["id"], commit)
    assert fleet.both_get_requests()


def test_a_bad_release_is_gone_back_from_on_the_canary_alone_and_fails_no_request(fleet: Fleet) -> None:
    before = fleet.states(), fleet.recorded(fleet.first)
    bad = fleet.first.server_arguments() | {"no-such-argument": True}
    with fleet.traffic() as traffic:
        done = fleet.deploy(service_server_arguments=bad)
    assert done.returncode != 0
    unfailed(traffic)
    output = plain(done.stdout)
    assert f"The former deployment {before[0][0].deployment} was activated again and is ready." in output
    assert "The routers send it requests again." in output
    assert "Not reached, and not switched: rehearsal-2." in output
    first, second = fleet.states()
    assert first.deployment == before[0][0].deployment
    assert second == before[0][1]
    assert fleet.recorded(fleet.first) == before[1]
    assert fleet.both_get_requests()


def test_a_roll_back_to_the_former_or_a_named_release_fails_no_request(fleet: Fleet) -> None:
    ids = [state.deployment for state in fleet.states()]
    release = fleet.first.deployed()["release"]
    former = [target.sh(f"readlink {ROOT}/previous").rpartition("/")[2] for target in (fleet.first, fleet.second)]
    assert set(ids).isdisjoint(former)
    with fleet.traffic() as traffic:
        for given, expected in ([], former), (["-e", f"rollback_to={release}"], ids):
            done = fleet.playbook("playbooks/rollback.yml", *given)
            assert done.returncode == 0, done.stdout
            assert [state.deployment for state in fleet.states()] == expected
            assert fleet.recorded(fleet.second)["deployment"] == expected[1]
            assert fleet.both_get_requests()
    unfailed(traffic)
    done = fleet.playbook("playbooks/rollback.yml", "-e", f"rollback_to={former[1]}")
    assert done.returncode != 0
    assert f"rehearsal-1 has no deployment '{former[1]}', and none of a release of that name" in plain(done.stdout)
    assert [state.deployment for state in fleet.states()] == ids


def test_the_last_healthy_host_is_not_drained(fleet: Fleet) -> None:
    """Neither without a router: nothing of this host is touched."""
    before = fleet.first.state()
    former = ("-e", "rollback_to=" + fleet.first.sh(f"readlink {ROOT}/previous").rpartition("/")[2])
    fleet.second.sh("systemctl stop sglang")
    eventually(lambda: sorted(fleet.workers().values()) == [False, True])
    done = fleet.playbook("playbooks/rollback.yml", "--limit=rehearsal-1", *former)
    assert done.returncode != 0
    assert "finds no other host healthy" in plain(done.stdout)
    assert f"The former deployment {before.deployment} still serves: nothing had been switched." in plain(done.stdout)
    assert fleet.first.state() == before
    fleet.second.sh("systemctl start sglang")
    fleet.router.sh("systemctl stop sglang-router")
    for command in ("deploy.yml", "-e", "threshold=5"), ("playbooks/rollback.yml", *former):
        done = fleet.playbook(*command, "--limit=rehearsal-1")
        assert done.returncode != 0
        assert "the router on rehearsal-3 does not answer" in plain(done.stdout)
        assert fleet.first.state() == before
    fleet.router.sh("systemctl start sglang-router")
    eventually(fleet.both_get_requests)


def test_a_canary_that_loses_power_fails_no_request_and_the_same_deploy_puts_it_right(fleet: Fleet) -> None:
    first, second = fleet.states()
    with fleet.traffic() as traffic, fleet.roll_under_way(threshold=4) as roll:
        roll.run_until("service : Wait for an answer of /health")
        fleet.rehearsal.ssh("sudo systemd-run --no-block systemctl poweroff --force --force")
        status = roll.end()
    output = plain(roll.output)
    assert status != 0
    unfailed(traffic)
    assert "rehearsal-1 could not be reached any more while rehearsal-1 had its turn." in output
    assert "The routers send rehearsal-1 no requests" in output
    assert "Not reached, and not switched: rehearsal-2." in output
    assert fleet.second.state() == second
    fleet.rehearsal.rehearsal("up", "rehearsal-1")
    done = fleet.deploy("--skip-tags=load", threshold=4)
    assert done.returncode == 0, done.stdout
    assert [target.deployed()["threshold"] for target in (fleet.first, fleet.second)] == [4, 4]
    assert fleet.first.sh(f"readlink {ROOT}/previous") == f"deployments/{first.deployment}"
    assert fleet.both_get_requests()


def test_a_fault_in_the_drain_or_the_put_back_loses_nothing_and_the_same_deploy_converges(fleet: Fleet) -> None:
    """The controller is killed, or cut off from the router; each time the same deploy is run again."""
    first, second = fleet.states()
    drain, put_back = "router : Wait until the router has let it go", "router : Put the worker into the list"
    for task, fault in (drain, "kill"), (drain, "cut"), (put_back, "kill"), (put_back, "cut"):
        # The clients' way to the router is the one that is cut.
        with (
            fleet.traffic() if fault == "kill" else nullcontext() as traffic,
            fleet.roll_under_way(threshold=6) as roll,
        ):
            roll.run_until(task)
            if fault == "kill":
                roll.kill()
            with cut_network(fleet.router) if fault == "cut" else nullcontext():
                status = roll.end()
        print(f"{task}, {fault}: {fleet.states()} {fleet.workers()}\n{roll.output[-3000:]}")
        assert status != 0
        if fault == "kill":
            unfailed(traffic)
        else:
            assert "rehearsal-3 could not be reached any more while rehearsal-1 had its turn." in plain(roll.output)
        assert fleet.second.state() == second
        if task == drain:
            assert fleet.first.state() == first
        else:
            assert fleet.recorded(fleet.first)["deployment"] == fleet.first.state().deployment != first.deployment
    done = fleet.deploy("--skip-tags=load", threshold=6)
    assert done.returncode == 0, done.stdout
    assert [target.deployed()["threshold"] for target in (fleet.first, fleet.second)] == [6, 6]
    assert fleet.first.sh(f"readlink {ROOT}/previous") == f"deployments/{first.deployment}"
    assert fleet.both_get_requests()


def test_a_purge_must_name_the_service_and_keeps_the_models(fleet: Fleet) -> None:
    deployed = fleet.second.deployed()
    limit = "--limit=rehearsal-2"
    for given in ([], ["-e", "purge=other"]):
        done = fleet.playbook("playbooks/purge.yml", limit, *given)
        assert done.returncode != 0
        assert "Nothing was touched" in plain(done.stdout)
    assert fleet.second.deployed() == deployed
    with fleet.traffic() as traffic:
        done = fleet.playbook("playbooks/purge.yml", limit, "-e", "purge=sglang")
    assert done.returncode == 0, done.stdout
    unfailed(traffic)
    model = deployed["server_arguments"]["model-path"]
    assert model in plain(done.stdout)
    assert fleet.second.sh(f"ls {model}/config.json")
    assert len(fleet.workers()) == 1
    done = fleet.playbook("playbooks/purge.yml", "-e", "purge=sglang")
    assert done.returncode == 0, done.stdout
    left = "find /opt /var /etc /run -name '*sglang*' -o -name '*specgate*'; getent passwd sglang || true"
    assert [target.sh(left) for target in (fleet.first, fleet.second, fleet.router)] == ["", "", ""]
    done = fleet.playbook("playbooks/purge.yml", "-e", "purge=sglang")
    assert done.returncode == 0, done.stdout
    assert re.findall(r"changed=(\d+)", done.stdout) == ["0", "0", "0"]
