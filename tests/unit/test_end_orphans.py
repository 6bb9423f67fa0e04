"""What counts as left behind by a former run of the service. Only looked at here: ending needs a user of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_plugins import load

end_orphans = load("roles/service/files/end_orphans.py")

OWN = "/system.slice/sglang.service"
SCOPE = "/user.slice/user-1000.slice/session-3.scope"
SCHEDULER = "sglang::scheduler_TP0\0"
SERVER = "/opt/sglang/releases/r1/bin/python\0-m\0sglang.launch_server\0--port\030000\0"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    add(tmp_path, "self", OWN, "python3\0")
    return tmp_path


def add(proc: Path, pid: str, group: str, command: str, state: str = "S") -> None:
    (proc / pid).mkdir()
    (proc / pid / "cgroup").write_text(f"1:name=systemd:/old\n0::{group}\n")
    (proc / pid / "cmdline").write_text(command)
    (proc / pid / "stat").write_text(f"{pid} (a) b) {state} 1 1")


@pytest.mark.parametrize(("group", "command", "memory", "found"), [
    (SCOPE, SCHEDULER, {}, True),
    (SCOPE, SERVER, {}, True),
    (OWN, SCHEDULER, {}, True),  # outlived the former run in the same group
    (SCOPE, "python3\0train.py\0", {70: "900"}, True),
    (SCOPE, "python3\0train.py\0", {}, False),
    ("/system.slice/sglang-b.service", SERVER, {70: "900"}, False),
])  # fmt: skip
def test_what_is_an_orphan(proc: Path, group: str, command: str, memory: dict[int, str], found: bool) -> None:
    add(proc, "70", group, command)
    assert list(end_orphans.orphans(memory, proc)) == ([70] if found else [])


def test_a_zombie_holds_nothing(proc: Path) -> None:
    add(proc, "70", SCOPE, SCHEDULER, state="Z")
    assert end_orphans.orphans({}, proc) == {}


def test_other_users_processes_are_left_alone(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(proc, "70", SCOPE, SCHEDULER)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert end_orphans.orphans({70: "900"}, proc) == {}


@pytest.mark.parametrize(("said", "memory"), [
    ("70, 900\n71, [N/A]\n", {70: "900", 71: "[N/A]"}),
    ("", {}),
    ("No devices were found\n", {}),
])  # fmt: skip
def test_the_drivers_list_is_read(monkeypatch: pytest.MonkeyPatch, said: str, memory: dict[int, str]) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said, ""))
    assert end_orphans.gpu_memory() == memory


def test_without_the_driver_there_is_no_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert end_orphans.gpu_memory() == {}
