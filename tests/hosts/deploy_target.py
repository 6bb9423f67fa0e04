"""A rehearsal host as the person who deploys to it sees it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rehearsal_commands import Rehearsal

ROOT = "/opt/sglang"


def eventually(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(1)


def plain(output: str) -> str:
    """Ansible's output in one line: its messages are wrapped, and quoted as YAML."""
    return " ".join(output.replace("''", "'").split())


def recap(output: str) -> dict[str, int]:
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", output.rpartition("PLAY RECAP")[2])}


@dataclass(frozen=True)
class State:
    """What is active, and the main process that serves it."""

    deployment: str
    main_pid: int


@dataclass(frozen=True)
class Target:
    """The host, as its user sees it."""

    rehearsal: Rehearsal
    host: str = "rehearsal-1"

    def deploy(self, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        return self.rehearsal.run_playbook("deploy.yml", "-e", json.dumps({"threshold": 5} | extra), *arguments)

    def sh(self, command: str) -> str:
        done = self.rehearsal.ssh(f"sudo sh -ec {shlex.quote(command)}", host=self.host)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def state(self) -> State:
        deployment = self.sh(f"readlink {ROOT}/current").rpartition("/")[2]
        return State(deployment, int(self.sh("systemctl show --property=MainPID --value sglang")))

    def deployed(self) -> dict[str, Any]:
        """The active deployment.json."""
        document: dict[str, Any] = json.loads(self.sh(f"cat {ROOT}/current/deployment.json"))
        return document

    def release(self) -> str:
        """Folder of the active release."""
        path: str = self.deployed()["release_path"]
        return path

    def server_arguments(self) -> dict[str, Any]:
        """The arguments of the active deployment that come from service_server_arguments."""
        own = ("host", "port", "speculative-disable-batch-threshold", "speculative-gate-profile")
        return {name: value for name, value in self.deployed()["server_arguments"].items() if name not in own}

    def is_healthy(self) -> bool:
        answer = self.rehearsal.ssh("curl --silent --max-time 20 --output /dev/null --write-out '%{http_code}' "
                                    "http://127.0.0.1:30000/health", host=self.host)  # fmt: skip
        return answer.stdout.strip() == "200"


class PlaybookUnderWay:
    """A playbook that something happens to while it runs."""

    def __init__(self, target: Target, *arguments: str) -> None:
        self.process = target.rehearsal.popen_playbook(*arguments)
        self.output = ""

    def run_until(self, task: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if line.startswith(f"TASK [{task}"):
                return
        raise AssertionError(f"it ended before the task '{task}':\n{self.output}")

    def kill(self) -> None:
        """SIGKILL to the controller. A worker of it, in a session of its own, still ends the task that it is at."""
        self.process.kill()

    def end(self) -> int:
        """Wait until it has ended by itself; its status."""
        self.output += self.process.communicate(timeout=600)[0]
        return self.process.returncode

    def __enter__(self) -> PlaybookUnderWay:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.process.poll() is None:
            self.kill()


@contextmanager
def cut_network(target: Target) -> Iterator[None]:
    """Nothing passes between this machine and the host; neither is told."""
    address = target.sh("hostname --all-ip-addresses").split()[0]
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; ip {side} {address} drop; }}; "
        for hook, side in (("input", "saddr"), ("output", "daddr"))
    )
    rules = f"table ip specgate_cut {{ {chains} }}"
    subprocess.run(["nft", "--file", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "ip", "specgate_cut"], check=True)
