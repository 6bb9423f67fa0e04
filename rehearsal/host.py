"""Rehearsal hosts and the directory in which they lie: disks, keys and SSH settings."""

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path

from rehearsal import image, machine, settings
from rehearsal.machine import Unsuitable, run
from rehearsal.network import Network
from rehearsal.supervision import supervisor

MEMORY = 4.0  # GiB: SGLang with the tiny pair takes 2, and a release is built beside it
DISK = 10.0  # GiB: one release with its package cache takes 5.5, and others share most of it
LOGIN_DEADLINE = 120.0  # seconds; a boot takes one or two


class RehearsalDirectory:
    """A folder of hosts that know each other: one network, one key, one ssh_config."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.network = Network(path)
        self.key = path / "id_ed25519"
        self.ssh_config = path / "ssh_config"
        self.known_hosts = path / "known_hosts"
        # The disks have files with set-user-ID bits, made by whoever is root in a host: nobody else may walk in here.
        self.disks = path / "hosts"

    def hosts(self) -> list["Host"]:
        if not self.disks.exists():
            return []
        return [Host(self, entry.name) for entry in sorted(self.disks.iterdir()) if entry.is_dir()]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time; a command that was killed leaves no lock."""
        machine.make_directory(self.path)
        self.disks.mkdir(mode=0o700, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("rehearsal: waiting for another rehearsal command in this directory", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def use_model(self, model: Path) -> None:
        """Let the inventory find the model that the hosts serve."""
        machine.make_directory(self.path)
        unfinished = self.path / "model.unfinished"
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(model)
        unfinished.replace(self.path / "model")

    def up(self, hosts: Sequence["Host"]) -> None:
        down = [host for host in hosts if not host.is_up()]
        if down:
            machine.check_processor()
            machine.check_memory(MEMORY)
            machine.install_tools()
            new = [host for host in down if not host.root.exists()]
            if new:
                machine.check_disk(self.path, DISK * len(new), "a new rehearsal host", "SPECGATE_REHEARSAL_DIR")
                tar = image.ensure()
                for host in new:
                    host.unpack(tar)
            self._make_key()
            registries = settings.read()
            subnet = self.network.up(registries.ports())
            self.network.warn_of_other_filters()
            for host in down:
                host.boot(subnet, registries)
        self.write_ssh_files()
        for host in hosts:
            host.wait_for_login()
            print(f"{host.name} is up: ssh -F {os.path.relpath(self.ssh_config)} {host.name}")

    def down(self, hosts: Sequence["Host"], *, delete: bool) -> None:
        for host in hosts:
            host.shut_down()
            if delete:
                host.delete()
        self.write_ssh_files()
        if not any(host.is_up() for host in self.hosts()):
            self.network.down()

    def _make_key(self) -> None:
        """Make the person's key; it counts as made once its public half has its name."""
        if self.public_key.exists():
            return
        unfinished = self.path / "unfinished"
        for file in (unfinished, unfinished.with_suffix(".pub")):
            file.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(unfinished)], what="making the SSH key")
        for file, name in ((unfinished, self.key), (unfinished.with_suffix(".pub"), self.public_key)):
            machine.give_to_user(file)
            file.replace(name)

    @property
    def public_key(self) -> Path:
        return self.key.with_suffix(".pub")

    def write_ssh_files(self) -> None:
        """Write ssh_config and known_hosts for the hosts that are up: a name that is down is unknown, at once."""
        config, known = [], []
        if self.network.is_up:
            subnet = self.network.subnet()
            for host in (host for host in self.hosts() if host.is_up()):
                address = host.address(subnet)
                config.append(
                    f"Host {host.name}\n"
                    f"  HostName {address}\n"
                    f"  User ops\n"
                    f'  IdentityFile "{self.key}"\n'
                    f"  IdentitiesOnly yes\n"
                    f'  UserKnownHostsFile "{self.known_hosts}"\n'
                    f"  StrictHostKeyChecking yes\n"
                    f"  ConnectTimeout 10\n"
                    f"  ServerAliveInterval 15\n"
                )
                known.append(f"{host.name},{address} {host.public_key()}\n")
        for path, lines in ((self.ssh_config, config), (self.known_hosts, known)):
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text("\n".join(lines))
            machine.give_to_user(unfinished)
            unfinished.replace(path)


class Host:
    """One host: a disk, and while it is up a systemd-nspawn whose first process is the host's own systemd."""

    def __init__(self, directory: RehearsalDirectory, name: str) -> None:
        if not (match := re.fullmatch(r"rehearsal-([1-9])", name)):
            raise Unsuitable(f"{name!r} is no name of a rehearsal host: rehearsal-1 to rehearsal-9 are")
        self.directory = directory
        self.name = name
        self.number = int(match[1])
        self.disk = directory.disks / name
        self.root = self.disk / "root"
        # The name on this machine, where other checkouts have a rehearsal-1 too.
        self.machine_name = f"{directory.network.bridge}-{self.number}"
        self.supervisor = supervisor(self.machine_name, self.disk)

    def address(self, subnet: IPv4Network) -> str:
        return str(subnet[10 + self.number])

    def is_up(self) -> bool:
        return self.supervisor.is_running()

    def public_key(self) -> str:
        return " ".join((self.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2])

    def unpack(self, tar: Path) -> None:
        """Make the host's disk from the image; a disk that was left half-made is made anew."""
        unfinished = self.disk / "root.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        command = ["tar", "--extract", "--numeric-owner", "--xattrs", "--xattrs-include=*"]
        run([*command, f"--file={tar}", f"--directory={unfinished}"], what=f"unpacking {tar}")
        host_key = unfinished / "etc/ssh/ssh_host_ed25519_key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(host_key)]
        run(command, what="making the host's SSH key")
        unfinished.rename(self.root)

    def boot(self, subnet: IPv4Network, registries: settings.RegistrySettings) -> None:
        self.supervisor.clear()
        self._configure(subnet, registries)
        resolved = Path("/run/systemd/resolve/resolv.conf")  # the servers behind systemd-resolved's loopback address
        nspawn = [
            "systemd-nspawn", "--quiet", "--boot",
            f"--directory={self.root}", f"--machine={self.machine_name}", f"--hostname={self.name}",
            "--keep-unit", "--register=no",  # no systemd-machined is needed, nor D-Bus
            "--console=read-only", "--link-journal=no", "--timezone=off",
            f"--network-bridge={self.directory.network.bridge}",
            f"--resolv-conf={'copy-uplink' if resolved.exists() else 'copy-host'}",
            "--suppress-sync=yes",  # fsync does nothing: package installs are quick
            # bpf for IPAddressDeny= and DevicePolicy=, which are silently not enforced without; memlock for mlock().
            "--capability=CAP_IPC_LOCK,CAP_BPF,CAP_PERFMON",
            "--system-call-filter=bpf perf_event_open @keyring @memlock",
        ]  # fmt: skip
        self.supervisor.start(nspawn)

    def _configure(self, subnet: IPv4Network, registries: settings.RegistrySettings) -> None:
        """Write what makes this host this one, and what changes with the machine it runs on."""
        contents = {
            "etc/hostname": f"{self.name}\n",
            "etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {self.name}\n",
            "etc/systemd/network/10-host0.network": (
                f"[Match]\nName=host0\n\n[Network]\nAddress={self.address(subnet)}/{subnet.prefixlen}\n"
                f"Gateway={subnet[1]}\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
            ),
            **registries.files(),
        }
        for path, content in contents.items():
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
            file.chmod(0o644)
        settings.copy_certificates(self.root)
        home = self.root / "home/ops"
        owner = home.stat()
        keys = home / ".ssh/authorized_keys"
        keys.parent.mkdir(mode=0o700, exist_ok=True)
        keys.write_text(self.directory.public_key.read_text())
        for file in (keys.parent, keys):
            os.chown(file, owner.st_uid, owner.st_gid)

    def ssh(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ssh", "-F", str(self.directory.ssh_config), "-o", "BatchMode=yes", self.name, *command],
            check=False, text=True, capture_output=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_for_login(self) -> None:
        """Wait until the boot is over and a login works."""
        deadline = time.monotonic() + LOGIN_DEADLINE
        while (login := self.ssh("systemctl is-system-running --wait")).returncode == 255:  # ssh's own failures
            if not self.is_up():
                raise Unsuitable(f"{self.name} ended while it booted. Its last words:\n{self.supervisor.last_words()}")
            if time.monotonic() > deadline:
                raise Unsuitable(
                    f"no SSH login to {self.name} within {LOGIN_DEADLINE:.0f} s: {login.stderr.strip()}\n"
                    f"Its last words:\n{self.supervisor.last_words()}"
                )
            time.sleep(0.1)
        if login.stdout.strip() != "running":
            failed = self.ssh("systemctl --failed --no-legend --plain").stdout.strip()
            print(f"rehearsal: {self.name} is {login.stdout.strip()}, with failed units:\n{failed}", flush=True)

    def shut_down(self) -> None:
        self.supervisor.stop()

    def delete(self) -> None:
        if self.disk.exists():
            shutil.rmtree(self.disk)
