"""`fab verify-worker` on a host with real SGLang: what was done to the host, and the verdict on it.

The tests share one deployment and put back what they change; those that restart the service come last.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rehearsal_commands import Rehearsal

pytestmark = pytest.mark.hosts

WORKER = "sglang/srt/speculative/eagle_worker.py"
CURRENT = "/opt/sglang/current/deployment.json"


@pytest.fixture(scope="module")
def deployed(rehearsal_host: Rehearsal) -> Rehearsal:
    done = rehearsal_host.run_playbook("deploy.yml", "-e", "threshold=5", "--skip-tags", "smoke,load")
    assert done.returncode == 0, done.stdout
    return rehearsal_host


def verify(host: Rehearsal, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status of `fab verify-worker` and its document."""
    done = host.fab("verify-worker", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def reason(host: Rehearsal, status: int, *arguments: str) -> str:
    """The sentence on the one host, after checking the exit status."""
    found, document = verify(host, *arguments)
    text: str = document["hosts"][0]["reason"]
    assert found == status, text
    return text


def root(host: Rehearsal, script: str) -> str:
    done = host.ssh(f"sudo sh -ec {shlex.quote(script)}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def site(deployed: Rehearsal) -> str:
    """The release's site-packages."""
    release = json.loads(root(deployed, f"cat {CURRENT}"))["release_path"]
    return root(deployed, f"echo {release}/lib/python3*/site-packages")


@contextmanager
def changed(host: Rehearsal, path: str, edit: str) -> Iterator[None]:
    """Replace a file by what the shell command `edit` makes of it, by rename; the file itself comes back afterwards."""
    root(host, f"{edit} <{path} >{path}.new; ln {path} {path}.kept; mv {path}.new {path}")
    try:
        yield
    finally:
        root(host, f"mv {path}.kept {path}")


def eventually(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(1)


def wait_until_ready(host: Rehearsal, port: int = 30000) -> None:
    eventually(lambda: host.ssh(f"curl -sf http://127.0.0.1:{port}/server_info >/dev/null").returncode == 0)


def test_proved_by_one_login_and_one_command(deployed: Rehearsal, tmp_path: Path) -> None:
    def logins() -> int:
        return int(root(deployed, "journalctl -u ssh -o cat | grep -c 'Accepted publickey'"))

    before = logins()
    status, document = verify(deployed, "--save", str(tmp_path / "kept"))
    assert logins() - before == 2  # that of verify-worker, and that of counting
    (host,) = document["hosts"]
    assert (status, document["verdict"], document["worker"]) == (0, "proved", "EAGLEWorker"), host["reason"]
    assert {link["state"] for link in host["links"]} == {"proved"}
    # What was kept gives the same verdict without a host.
    assert verify(deployed, "--evidence", str(tmp_path / "kept")) == (0, document)


def test_people_see_verdict_and_reason_first(deployed: Rehearsal) -> None:
    done = deployed.fab("verify-worker")
    assert done.stdout.splitlines()[0].startswith("PROVED  rehearsal-1: its one rank runs the patched EAGLEWorker")


def test_patched_file_edited_by_hand(deployed: Rehearsal, site: str) -> None:
    with changed(deployed, f"{site}/{WORKER}", "sed '$a # edited'"):
        assert "somebody changed it" in reason(deployed, 1)
    assert "runs the patched" in reason(deployed, 0)


def test_copy_in_the_working_directory(deployed: Rehearsal, site: str) -> None:
    folder = root(deployed, "readlink /proc/$(systemctl show --property MainPID --value sglang)/cwd").rstrip("/")
    root(deployed, f"cp -r {site}/sglang {folder}/sglang")
    try:
        assert "it is below the working directory" in reason(deployed, 1)
    finally:
        root(deployed, f"rm -r {folder}/sglang")


def test_threshold_on_disk_differs(deployed: Rehearsal) -> None:
    path = root(deployed, f"readlink -f {CURRENT}")
    with changed(deployed, path, """sed 's/"threshold": 5/"threshold": 6/'"""):
        assert "the deployment says threshold 6" in reason(deployed, 1)


def test_without_sudo(deployed: Rehearsal, tmp_path: Path) -> None:
    root(
        deployed,
        "id guest 2>/dev/null || useradd --create-home guest; cp -r ~ops/.ssh ~guest/; chown -R guest: ~guest/.ssh",
    )
    options = f"-o User=guest -F {deployed.directory}/ssh_config"
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(f"all:\n  hosts:\n    rehearsal-1:\n      ansible_ssh_common_args: {json.dumps(options)}\n")
    assert "may not use sudo" in reason(deployed, 3, "--inventory", str(inventory))


def test_hosts_that_cannot_be_reached_hide_no_other(deployed: Rehearsal, tmp_path: Path) -> None:
    options = json.dumps(f"-F {deployed.directory}/ssh_config")
    hosts = "".join(f"    ghost-{number}:\n      ansible_host: 198.18.255.{number}\n" for number in range(1, 11))
    hosts += "".join(f"    alias-{number}:\n      ansible_host: rehearsal-1\n" for number in range(5))
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(f"all:\n  vars:\n    ansible_ssh_common_args: {options}\n  hosts:\n    rehearsal-1:\n{hosts}")
    status, document = verify(deployed, "--inventory", str(inventory), "--timeout", "20")
    verdicts = {host["host"]: host["verdict"] for host in document["hosts"]}
    assert (status, document["verdict"]) == (3, "unknown")
    assert {name for name, found in verdicts.items() if found == "proved"} == {
        "rehearsal-1",
        *(f"alias-{n}" for n in range(5)),
    }
    assert sorted(verdicts.values()).count("unknown") == 10


STALE = """\
import importlib.util, py_compile, shutil, sys
source = sys.argv[1]
shutil.copy(source, "/tmp/stale.py")
open("/tmp/stale.py", "a").write("stale = True\\n")
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
compiled = importlib.util.cache_from_source(source)
print(py_compile.compile("/tmp/stale.py", compiled, source, True, invalidation_mode=mode))
"""


def test_dead_schedulers_then_a_stale_compiled_file(deployed: Rehearsal, site: str) -> None:
    python = json.loads(root(deployed, f"cat {CURRENT}"))["python"]
    root(deployed, f"cp -a {site}/sglang/srt/speculative/__pycache__ /tmp/kept")
    compiled = root(deployed, f"{python} -c {shlex.quote(STALE)} {site}/{WORKER}")
    try:
        assert f"its compiled file {compiled} (unchecked hash)" in reason(deployed, 1)
        # The main process is stopped, so that it does not notice, and stays.
        root(deployed, "systemctl kill --kill-who=main --signal=STOP sglang; pkill -KILL -f ^sglang::scheduler")
        assert "every scheduler is gone" in reason(deployed, 1)
        root(deployed, "systemctl kill --kill-who=main --signal=KILL sglang; systemctl restart sglang")
        wait_until_ready(deployed)
        root(deployed, f"mv /tmp/kept/{Path(compiled).name} {compiled}")
        assert "was changed after rank 0 had loaded it" in reason(deployed, 1)
    finally:
        root(deployed, f"mv -f /tmp/kept/{Path(compiled).name} {compiled} || true; rm -r /tmp/kept /tmp/stale.py")
        root(deployed, "systemctl restart sglang")
        wait_until_ready(deployed)
    assert "runs the patched" in reason(deployed, 0)


def test_drop_in_that_changes_the_command_line(deployed: Rehearsal) -> None:
    folder = "/run/systemd/system/sglang.service.d"
    command = root(deployed, "sed -n '/^ExecStart=/,/^$/p' /etc/systemd/system/sglang.service")
    command = command.replace("disable-batch-threshold 5", "disable-batch-threshold 7")
    root(deployed, f"mkdir -p {folder}")
    written = deployed.ssh(f"sudo tee {folder}/override.conf >/dev/null <<'END'\n[Service]\nExecStart=\n{command}\nEND")
    assert written.returncode == 0
    root(deployed, "systemctl daemon-reload; systemctl restart sglang")
    try:
        wait_until_ready(deployed)
        text = reason(deployed, 1)
        assert "threshold 5" in text
        assert "override.conf sets ExecStart" in text
    finally:
        root(deployed, f"rm -r {folder}; systemctl daemon-reload; systemctl restart sglang")
        wait_until_ready(deployed)


def test_log_rotated_away(deployed: Rehearsal) -> None:
    root(deployed, "journalctl --quiet --rotate; journalctl --quiet --vacuum-size=1")
    status, document = verify(deployed)
    assert status == 0
    assert [link["state"] for link in document["hosts"][0]["links"] if link["name"] == "log"] == ["not applicable"]


def test_stopped_then_loading(deployed: Rehearsal) -> None:
    root(deployed, "systemctl stop sglang")
    try:
        assert "sglang.service is inactive" in reason(deployed, 1)
        root(deployed, "systemctl start sglang")
        assert "run fab verify-worker again" in reason(deployed, 3)
    finally:
        root(deployed, "systemctl start sglang")
        wait_until_ready(deployed)


def test_another_unit_with_two_ranks(deployed: Rehearsal, tmp_path: Path) -> None:
    """A server that this project did not deploy, beside the one that it did."""
    argv = root(deployed, "tr '\\0' '\\n' </proc/$(systemctl show --property MainPID --value sglang)/cmdline").split(
        "\n"
    )
    for option, value in (("--port", "30002"), ("--tp-size", "2")):
        argv[argv.index(option) + 1] = value
    properties = {
        "User": "sglang",
        "RuntimeDirectory": "second",
        "EnvironmentFile": "/opt/sglang/current/environment",
        "Environment": "PYTHONNOUSERSITE=1",
    }
    settings = " ".join(f"--property {shlex.quote(f'{name}={value}')}" for name, value in properties.items())
    root(deployed, f"systemctl stop sglang; systemd-run --quiet --collect --unit second {settings} {shlex.join(argv)}")
    inventory = tmp_path / "hosts.yml"
    options = json.dumps(f"-F {deployed.directory}/ssh_config")
    inventory.write_text(
        f"all:\n  hosts:\n    rehearsal-1:\n      service_name: second\n      ansible_ssh_common_args: {options}\n"
    )
    try:
        wait_until_ready(deployed, 30002)
        status, document = verify(deployed, "--inventory", str(inventory), "--save", str(tmp_path / "kept"))
        (host,) = document["hosts"]
        assert (status, document["worker"]) == (0, "EAGLEWorker"), host["reason"]
        assert "all 2 ranks run the patched EAGLEWorker" in host["reason"]
    finally:
        root(deployed, "systemctl stop second; systemctl start sglang")
        wait_until_ready(deployed)
