"""Two hosts behind SGLang's router, under load all the time: no deploy and no roll-back may cost a request.

The tests share the hosts and run in this order: each finds what the last one left. rehearsal-1 is the tests' own host,
rehearsal-2 serves beside it, and the router is on rehearsal-3.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from deploy_target import ROOT, State, Target, plain, recap
from rehearsal_commands import Rehearsal
from steady_traffic import Traffic, steady_traffic

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]

INVENTORY = "--inventory=inventory/rehearsal-router"
CLIENTS = 6
ROUTER_PORT = 30080


class Fleet:
    """The three hosts, as the person who deploys to them sees them."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.first, self.second, self.router = (Target(rehearsal, f"rehearsal-{number}") for number in (1, 2, 3))
        self.address = self.router.sh("hostname --all-ip-addresses").split()[0]

    def deploy(self, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        return self.first.deploy(INVENTORY, *arguments, **extra)

    def playbook(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.rehearsal.run_playbook(INVENTORY, *arguments)

    def states(self) -> tuple[State, State]:
        return self.first.state(), self.second.state()

    def workers(self) -> dict[str, bool]:
        """URL of each worker of the router to whether it finds it healthy."""
        answer = self.router.sh(f"curl --silent http://{self.address}:{ROUTER_PORT}/workers")
        return {worker["url"]: worker["is_healthy"] for worker in json.loads(answer)["workers"]}

    def traffic(self) -> Any:
        return steady_traffic(self.address, ROUTER_PORT, CLIENTS)

    def recorded(self, target: Target) -> dict[str, Any]:
        """The local fact of the last deploy."""
        document: dict[str, Any] = json.loads(target.sh("cat /etc/ansible/facts.d/specgate_sglang.fact"))
        return document


@pytest.fixture(scope="module")
def fleet(rehearsal_host: Rehearsal) -> Iterator[Fleet]:
    done = rehearsal_host.rehearsal("up", "rehearsal-1", "rehearsal-2", "rehearsal-3")
    assert done.returncode == 0, done.stderr
    yield Fleet(rehearsal_host)
    done = rehearsal_host.rehearsal("down", "rehearsal-2", "rehearsal-3")
    assert done.returncode == 0, done.stderr


def unfailed(traffic: Traffic) -> None:
    assert traffic.failures == []
    assert traffic.answered > CLIENTS


def test_two_hosts_are_deployed_behind_a_router(fleet: Fleet) -> None:
    done = fleet.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert list(fleet.workers().values()) == [True, True]
    assert all("127.0.0.1" not in url and "0.0.0.0" not in url for url in fleet.workers())
    score = fleet.router.sh("systemd-analyze security --no-pager sglang-router | tail -n 1")
    assert float(re.search(r"([0-9.]+) OK", score)[1]) < 2.5, score  # type: ignore[index]
    assert fleet.rehearsal.fab("verify-worker", INVENTORY).returncode == 0


def test_a_second_deploy_changes_nothing(fleet: Fleet) -> None:
    before = fleet.states(), fleet.recorded(fleet.first)
    done = fleet.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert re.findall(r"changed=(\d+)", done.stdout) == ["0", "0", "0"]
    assert (fleet.states(), fleet.recorded(fleet.first)) == before


def test_a_roll_to_another_release_and_threshold_fails_no_request(fleet: Fleet) -> None:
    before = fleet.states()
    with fleet.traffic() as traffic:
        done = fleet.deploy(threshold=3, release_plugins=["files/cpu_engine"] * 2)
    assert done.returncode == 0, done.stdout
    unfailed(traffic)
    for target, former in zip((fleet.first, fleet.second), before, strict=True):
        deployed = target.deployed()
        assert deployed["id"] != former.deployment
        assert deployed["threshold"] == 3
        assert target.sh(f"readlink {ROOT}/previous") == f"deployments/{former.deployment}"
        recorded = fleet.recorded(target)
        assert recorded["deployment"] == deployed["id"]
        assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", recorded["commit"])
    assert fleet.first.release() != f"{ROOT}/releases/{before[0].deployment}"
    assert list(fleet.workers().values()) == [True, True]


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
    assert list(fleet.workers().values()) == [True, True]


def test_a_roll_back_fails_no_request(fleet: Fleet) -> None:
    former = [target.sh(f"readlink {ROOT}/previous").rpartition("/")[2] for target in (fleet.first, fleet.second)]
    with fleet.traffic() as traffic:
        done = fleet.playbook("playbooks/rollback.yml")
    assert done.returncode == 0, done.stdout
    unfailed(traffic)
    assert [state.deployment for state in fleet.states()] == former
    assert fleet.recorded(fleet.second)["deployment"] == former[1]


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
    left = (
        "find /opt /var/lib /etc -name '*sglang*' -o -name '*specgate*'; getent passwd sglang || true; ls /opt/sglang"
    )
    assert fleet.second.rehearsal.ssh(f"sudo sh -c {left!r}", host="rehearsal-2").stdout.strip() == ""
    assert len(fleet.workers()) == 1
    assert recap(done.stdout)["failed"] == 0
