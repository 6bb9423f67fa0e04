"""The tasks on a real host with real SSH and systemd; a small server in place of SGLang lets faults be provoked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rehearsal_commands import BIN, REPOSITORY, Rehearsal, booted

pytestmark = pytest.mark.hosts

NAME = "rehearsal-1"
PORT = 30000
SOURCES = ("tests/unit/chat_server.py", *(f"diagnostics/{name}.py" for name in ("__init__", "inventory", "prompts")))
UNIT = f"""\
[Service]
RuntimeDirectory=sglang
Environment=PYTHONPATH=/opt/chat
ExecStart=/usr/bin/python3 /opt/chat/tests/unit/chat_server.py {PORT}
Restart=always
RestartSec=1
"""
DEPLOYMENT = {
    "schema": "specgate.deployment/1",
    "id": "deployment-1",
    "release": "release-1",
    "sglang_version": "0.5.12.post1",
    "series": None,
    "threshold": 5,
    "address": "127.0.0.1",
    "port": PORT,
    "runtime_directory": "/run/sglang",
}
FAB = BIN / "fab"


@dataclass(frozen=True)
class Machine:
    """A host with the small server on it, and an inventory that names it."""

    rehearsal: Rehearsal
    inventory: str

    @property
    def ssh_config(self) -> Path:
        return self.rehearsal.directory / "ssh_config"

    def sh(self, script: str, stdin: bytes = b"") -> str:
        command = ["ssh", "-F", self.ssh_config, NAME, script]
        return subprocess.run(command, input=stdin, check=True, capture_output=True, timeout=60).stdout.decode().strip()

    def fab(self, *arguments: str, inventory: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.rehearsal.fab(*arguments, "--inventory", inventory or self.inventory)

    def entry(self, *arguments: str, inventory: str | None = None) -> tuple[int, dict[str, Any]]:
        answer = self.fab(*arguments, "--json", inventory=inventory)
        return answer.returncode, json.loads(answer.stdout)["hosts"][0]

    def serving(self) -> None:
        """Wait until the service listens."""
        eventually(lambda: self.sh(f"ss -Hltn 'sport = :{PORT}'") != "")


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.1)


def write_inventory(path: Path, options: str, more: str = "") -> str:
    path.write_text(f"all:\n  hosts:\n    {NAME}:\n      ansible_ssh_common_args: {json.dumps(options)}\n{more}")
    return str(path)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("diagnostics")
    with booted(folder / "rehearsal") as rehearsal:
        made = Machine(rehearsal, write_inventory(folder / "hosts.yml", f"-F {rehearsal.directory}/ssh_config"))
        archive = subprocess.run(["tar", "-c", *SOURCES], cwd=REPOSITORY, check=True, capture_output=True).stdout
        made.sh("sudo mkdir -p /opt/chat /opt/sglang/current && sudo tar -x -C /opt/chat", archive)
        made.sh("sudo tee /opt/sglang/current/deployment.json", json.dumps(DEPLOYMENT).encode())
        made.sh("sudo tee /etc/systemd/system/sglang.service", UNIT.encode())
        yield made


@pytest.fixture
def host(machine: Machine) -> Machine:
    """The machine with a freshly started service."""
    machine.sh("sudo systemctl daemon-reload; sudo systemctl restart sglang")
    machine.serving()
    return machine


def test_smoke(host: Machine) -> None:
    answer = host.fab("smoke")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[0] == f"Smoke test passed on {NAME}"
    status, entry = host.entry("smoke")
    assert status == 0
    assert (entry["host"], entry["deployment"], entry["reasons"]) == (NAME, "deployment-1", [])
    assert entry["got"]["text"] == "some text"


def test_load(host: Machine) -> None:
    status, entry = host.entry("load", "--concurrency", "10", "--requests", "40")
    assert status == 0, entry["reasons"]
    assert entry["requests"] == {"sent": 40, "answered": 40, "failed": 0, "lost": 0, "unreached": 0}
    assert entry["skipped_prompts"] == []


def test_a_service_killed_under_load_is_told_and_nothing_hangs(host: Machine) -> None:
    with host.rehearsal.popen_fab("load", "--duration", "20", "--inventory", host.inventory, "--json") as load:
        eventually(lambda: host.sh(f"ss -Htn state established 'sport = :{PORT}'").count("\n") >= 5)
        host.sh("sudo systemctl kill --signal=KILL sglang")
        output, _ = load.communicate(timeout=120)
    (entry,) = json.loads(output)["hosts"]
    assert load.returncode == 1
    assert entry["requests"]["lost"] > 0
    assert any("lost" in reason for reason in entry["reasons"])
    assert sum(error["count"] for error in entry["errors"]) == entry["requests"]["failed"] + entry["requests"]["lost"]


def test_a_client_that_is_too_slow_is_told_from_a_slow_server(host: Machine) -> None:
    command = ("load", "--duration", "5", "--max-errors", "1000", "--inventory", host.inventory, "--json")
    with host.rehearsal.popen_fab(*command) as load:
        eventually(lambda: host.sh(f"ss -Htn state established 'sport = :{PORT}'") != "")
        while load.poll() is None:  # as a machine without CPU to spare does to it
            load.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            load.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        output, _ = load.communicate(timeout=60)
    (entry,) = json.loads(output)["hosts"]
    assert load.returncode == 3, entry["reasons"]
    assert entry["reasons"] == entry["invalid"]
    assert entry["reasons"][0].startswith("the client was too slow, these figures are not the server's: it was late by")


def test_status_of_a_running_and_of_a_stopped_service(host: Machine) -> None:
    status, entry = host.entry("status")
    assert status == 0, entry["reasons"]
    assert (entry["unit"]["ActiveState"], entry["unit"]["SubState"]) == ("active", "running")
    assert entry["unit"]["uptime_s"] > 0
    assert entry["deployment"]["threshold"] == 5
    assert entry["requests"] == {"running": 0, "waiting": 0}
    host.sh("sudo systemctl stop sglang")
    status, entry = host.entry("status")
    assert status == 1
    assert entry["reasons"] == ["sglang.service is inactive (dead)"]
    assert entry["unit"]["uptime_s"] is None


def test_status_shows_the_gate_of_each_rank(host: Machine) -> None:
    gate = {
        "mode": "closed",
        "threshold": 5,
        "transitions": 3,
        "open_steps": 9,
        "closed_steps": 4,
        "reason": "",
        "running": 7,
    }
    for rank in (1, 0):
        document = {"schema": "spec_gate.rank/1", "identity": {"tp_rank": rank}, "gate": gate, "updated": 1.0}
        file = f"/run/sglang/rank-{rank}.json"
        host.sh(f"sudo tee {file}; sudo chmod 600 {file}", json.dumps(document).encode())
    _, entry = host.entry("status")
    assert [(found["tp_rank"], found["mode"], found["running"]) for found in entry["gates"]] == [
        (0, "closed", 7),
        (1, "closed", 7),
    ]


def test_a_status_file_that_cannot_be_read_is_no_success(host: Machine) -> None:
    host.sh("echo '{\"gate\": ' | sudo tee /run/sglang/rank-0.json")
    status, entry = host.entry("status")
    assert status == 1
    assert entry["reasons"][0].startswith("a status file in /run/sglang is unreadable")
    assert entry["requests"] == {"running": 0, "waiting": 0}


def test_a_server_that_does_not_answer_is_no_success(host: Machine) -> None:
    host.sh("sudo systemctl kill --signal=STOP sglang")
    status, entry = host.entry("status", "--timeout", "2")
    assert status == 1
    assert entry["reasons"] == ["the server does not answer: GET /v1/loads?include=core: no answer in time"]


def test_a_port_where_nothing_listens_is_told(host: Machine, tmp_path: Path) -> None:
    host.sh(
        "sudo mkdir -p /opt/other/current && sudo tee /opt/other/current/deployment.json",
        json.dumps(DEPLOYMENT | {"port": PORT + 1}).encode(),
    )
    options = f"-F {host.ssh_config}"
    inventory = write_inventory(tmp_path / "hosts.yml", options, "  vars: {release_root: /opt/other}\n")
    said = f"on the host, 127.0.0.1:{PORT + 1} could not be reached: connect failed: Connection refused"
    for task in ("smoke", "load"):
        status, entry = host.entry(task, inventory=inventory)
        assert status == 1
        assert entry["reasons"][-1] == said
    status, entry = host.entry("status", inventory=inventory)
    assert (status, entry["reasons"]) == (1, [f"the server does not answer: {said}"])


def test_logs_are_those_of_the_running_invocation(host: Machine) -> None:
    answer = host.fab("logs")
    assert answer.returncode == 0
    assert answer.stdout.count(f"listening on {PORT}") == 1
    assert "Started sglang.service" in answer.stdout
    nothing = host.fab("logs", "--grep", "no such line")
    assert (nothing.returncode, nothing.stdout) == (0, "")


def test_logs_are_followed_until_interrupted(host: Machine) -> None:
    # env: what a shell runs in the background ignores SIGINT, and so would its children.
    command = ["env", "--default-signal=INT", FAB, "logs", "--follow", "--inventory", host.inventory]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as follow:
        try:
            assert follow.stdout
            for line in follow.stdout:
                if f"listening on {PORT}" in line:
                    break
            host.sh("sudo systemd-cat --identifier=other true; sudo systemctl kill --signal=USR1 sglang")
            assert any("code=killed, status=10/USR1" in line for line in follow.stdout)
            follow.send_signal(signal.SIGINT)
            follow.wait(timeout=30)
        finally:
            follow.kill()  # else leaving the block waits for it without limit


def test_a_dead_host_hides_no_living_one(host: Machine, tmp_path: Path) -> None:
    more = "    gone: {ansible_host: 127.0.0.1, ansible_port: 1}\n"
    inventory = write_inventory(tmp_path / "hosts.yml", f"-F {host.ssh_config}", more)
    answer = host.fab("smoke", "--json", inventory=inventory)
    assert answer.returncode == 1
    living, gone = json.loads(answer.stdout)["hosts"]
    assert (living["host"], living["ok"]) == (NAME, True)
    assert (gone["host"], gone["ok"]) == ("gone", False)


@pytest.mark.parametrize(("known", "reason"), [(False, "host key unknown"), (True, "host key has changed")])
def test_host_keys_are_checked(host: Machine, tmp_path: Path, known: bool, reason: str) -> None:
    file = tmp_path / "known_hosts"
    file.touch()
    if known:
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", tmp_path / "other"], check=True)
        address = next(line.split()[1] for line in host.ssh_config.read_text().splitlines() if "HostName" in line)
        file.write_text(f"{address} {(tmp_path / 'other.pub').read_text()}")
    options = f"-F {host.ssh_config} -o UserKnownHostsFile={file} -o StrictHostKeyChecking=no"
    status, entry = host.entry("smoke", inventory=write_inventory(tmp_path / "hosts.yml", options))
    assert status == 1
    assert reason in entry["reasons"][0]
    assert "nothing" not in file.read_text()


def test_a_host_key_recorded_under_an_alias_counts(host: Machine, tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    lines = (host.rehearsal.directory / "known_hosts").read_text().splitlines()
    file.write_text("".join(f"the-alias {line.split(maxsplit=1)[1]}\n" for line in lines))
    options = f"-F {host.ssh_config} -o UserKnownHostsFile={file} -o HostKeyAlias=the-alias"
    status, entry = host.entry("smoke", inventory=write_inventory(tmp_path / "hosts.yml", options))
    assert status == 0, entry["reasons"]


def test_a_jump_host_is_passed(host: Machine, tmp_path: Path) -> None:
    """The host is its own jump host: from outside by its name, and once more from inside by its address."""
    options = f"-F {host.ssh_config} -o ProxyJump={NAME}"
    status, entry = host.entry("smoke", inventory=write_inventory(tmp_path / "hosts.yml", options))
    assert status == 0, entry["reasons"]


def test_relative_paths_are_meant_from_the_repositorys_root(host: Machine, tmp_path: Path) -> None:
    relative = os.path.relpath(host.ssh_config, REPOSITORY)
    inventory = write_inventory(tmp_path / "hosts.yml", f"-F {relative}")
    command = [FAB, "smoke", "--inventory", inventory]
    assert subprocess.run(command, cwd=REPOSITORY / "docs", check=False, stdin=subprocess.DEVNULL).returncode == 0


def test_a_host_without_a_deployment_is_told(host: Machine, tmp_path: Path) -> None:
    inventory = write_inventory(tmp_path / "hosts.yml", f"-F {host.ssh_config}", "  vars: {release_root: /opt/none}\n")
    status, entry = host.entry("smoke", inventory=inventory)
    assert status == 1
    assert entry["reasons"][0].startswith("nothing is deployed: cat: /opt/none/current/deployment.json")


def test_a_killed_load_leaves_no_tunnel(host: Machine) -> None:
    load = host.rehearsal.popen_fab("load", "--duration", "60", "--inventory", host.inventory)
    children = Path(f"/proc/{load.pid}/task/{load.pid}/children")
    try:
        # Children of threads are listed under the thread.
        def tunnels() -> list[str]:
            listed = " ".join(file.read_text() for file in children.parent.parent.glob("*/children")).split()
            return [pid for pid in listed if b"cat >/dev/null" in Path(f"/proc/{pid}/cmdline").read_bytes()]

        eventually(lambda: bool(tunnels()))
        (tunnel,) = tunnels()
    finally:
        load.kill()
        load.wait()
    eventually(lambda: not Path(f"/proc/{tunnel}").exists() or b"Z" in Path(f"/proc/{tunnel}/stat").read_bytes())
