"""The rehearsal host itself: that it is a host like any other, survives what users do to it, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal_commands import REPOSITORY, Rehearsal, booted

from rehearsal import machine
from rehearsal.host import Host, RehearsalDirectory
from rehearsal.network import Network

pytestmark = pytest.mark.hosts

CLOSED = "203.0.113.1"  # RFC 5737: an address for documentation, where nobody is


@pytest.fixture(scope="module")
def host() -> Iterator[Rehearsal]:
    with booted(REPOSITORY / ".rehearsal/test-tool") as rehearsal:
        yield rehearsal


def up(rehearsal: Rehearsal, *names: str) -> None:
    done = rehearsal.rehearsal("up", *names)
    assert done.returncode == 0, done.stderr


def boots(rehearsal: Rehearsal) -> str:
    """What changes with each boot of rehearsal-1, and with nothing else."""
    return rehearsal.ssh("systemctl show --property=UserspaceTimestampMonotonic").stdout


def processes(machine_name: str) -> list[int]:
    """The systemd-nspawn of a host, found without asking the tool."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[0].endswith(b"systemd-nspawn") and f"--machine={machine_name}".encode() in arguments:
            found.append(int(directory.name))
    return found


def leftovers(network: Network) -> str:
    """Traces of the hosts of one directory on this machine: interface, routes, packet filter, processes, groups."""
    name, address = network.bridge, str(network.subnet()).removesuffix("0/24")
    commands = (["ip", "-brief", "link"], ["ip", "route", "show", "table", "all"], ["nft", "list", "tables"])
    lines = [line for command in commands for line in machine.run(command, what="looking").splitlines()]
    traces = [line for line in lines if name in line or address in line]
    traces += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{name}*")]
    traces += [f"process {process}" for number in range(10) for process in processes(f"{name}-{number}")]
    return "\n".join(traces)


def test_host_is_like_any_other(host: Rehearsal) -> None:
    assert host.ssh("id --user --name").stdout == "ops\n"
    assert host.ssh("sudo --non-interactive id --user --name").stdout == "root\n"
    assert host.ssh("hostname").stdout == "rehearsal-1\n"
    assert host.ssh("readlink /proc/1/exe").returncode != 0  # not ours to read, as on a host
    assert host.ssh("sudo readlink /proc/1/exe").stdout == "/usr/lib/systemd/systemd\n"
    assert host.ssh("systemctl is-system-running").stdout == "running\n"
    assert host.ssh("stat --file-system --format=%T /sys/fs/cgroup").stdout == "cgroup2fs\n"
    ping = host.run([Path(sys.executable).parent / "ansible", "-m", "ping", "all"])
    assert (ping.returncode, "pong" in ping.stdout) == (0, True), ping.stdout + ping.stderr


def test_root_cannot_log_in_nor_anybody_without_the_key(host: Rehearsal) -> None:
    ssh = ["ssh", "-F", str(host.directory / "ssh_config"), "-o", "BatchMode=yes"]
    as_root = host.run([*ssh, "-l", "root", "rehearsal-1", "true"])
    assert "Permission denied" in as_root.stderr
    without_key = host.run([*ssh, "-o", "PubkeyAuthentication=no", "rehearsal-1", "true"])
    assert "Permission denied" in without_key.stderr


def test_another_host_key_is_refused(host: Rehearsal, tmp_path: Path) -> None:
    machine.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], what="making a key")
    names = (host.directory / "known_hosts").read_text().split()[0]
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(f"{names} {(tmp_path / 'key.pub').read_text()}")
    config = host.directory / "ssh_config"
    done = host.run(["ssh", "-F", config, "-o", f"UserKnownHostsFile={known_hosts}", "rehearsal-1", "true"])
    assert "Host key verification failed" in done.stderr


def test_up_again_changes_nothing(host: Rehearsal) -> None:
    before = boots(host)
    up(host)
    assert boots(host) == before


def test_host_reaches_web_ports_only(host: Rehearsal) -> None:
    """7 is curl's "refused": said by the machine at once, where nobody would have answered."""
    connect = "curl --silent --max-time 5 --noproxy '*'"
    assert host.ssh(f"{connect} http://{CLOSED}:22").returncode == 7
    assert host.ssh(f"{connect} telnet://{CLOSED}:5432").returncode == 7
    # apt's sources are the machine's, on whatever port they are.
    assert host.ssh("sudo apt-get update --error-on=any", timeout=120).returncode == 0


def test_two_hosts_reach_each_other(host: Rehearsal) -> None:
    up(host, "rehearsal-1", "rehearsal-2")
    second = host.ssh("hostname --all-ip-addresses", host="rehearsal-2").stdout.strip()
    assert host.ssh(f"exec 3<>/dev/tcp/{second}/22 && head -c 3 <&3").stdout == "SSH"
    assert host.rehearsal("remove", "rehearsal-2").returncode == 0
    assert host.ssh("true").returncode == 0
    gone = host.ssh("true", host="rehearsal-2")
    assert (gone.returncode, "Could not resolve" in gone.stderr) == (255, True)


def test_reboot(host: Rehearsal) -> None:
    before = boots(host)
    done = host.run([Path(sys.executable).parent / "ansible", "--become", "-m", "reboot", "all"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert boots(host) not in {before, ""}


def test_killed_host_is_taken_up_again_with_its_disk(host: Rehearsal) -> None:
    host.ssh("echo kept >note && sync")
    (nspawn,) = processes(Host(RehearsalDirectory(host.directory), "rehearsal-1").machine_name)
    os.kill(nspawn, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while host.rehearsal("list").stdout != "rehearsal-1  down\n" and time.monotonic() < deadline:
        time.sleep(0.1)
    up(host)
    assert host.ssh("cat note").stdout == "kept\n"


def test_down_keeps_the_disk_and_leaves_nothing_running(host: Rehearsal) -> None:
    host.ssh("echo kept >note")
    network = Network(host.directory)
    assert leftovers(network) != ""
    assert host.rehearsal("down").returncode == 0
    assert host.rehearsal("list").stdout == "rehearsal-1  down\n"
    assert leftovers(network) == ""
    up(host)
    assert host.ssh("cat note").stdout == "kept\n"


@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.4, 2.0])
def test_killed_command_needs_no_cleaning(seconds: float) -> None:
    """`up` of a new host, killed at several points of its work: unpacking, network, boot, login."""
    rehearsal = Rehearsal(REPOSITORY / ".rehearsal/test-killed")
    command = subprocess.Popen(
        [sys.executable, "-m", "rehearsal", "up"],
        cwd=REPOSITORY, env=rehearsal.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    time.sleep(seconds)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    try:
        up(rehearsal)
        assert rehearsal.ssh("systemctl is-system-running").stdout == "running\n"
    finally:
        network = Network(rehearsal.directory)
        assert rehearsal.rehearsal("remove").returncode == 0
    assert leftovers(network) == ""
    assert rehearsal.rehearsal("list").stdout == ""


def test_unknown_name_is_refused(host: Rehearsal) -> None:
    done = host.rehearsal("up", "web1")
    assert (done.returncode, done.stderr) == (
        1, "rehearsal: 'web1' is no name of a rehearsal host: rehearsal-1 to rehearsal-9 are\n",
    )  # fmt: skip
