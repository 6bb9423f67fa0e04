"""SSH to a host: commands through Fabric, HTTP through a forwarded socket.

Both follow OpenSSH's own reading of the settings (``ssh -G``), so that ``Match``, ``Include``, ``HostKeyAlias`` and
``ProxyJump`` mean the same for Ansible, for the commands and for the tunnel. Host keys are always checked.

The tunnel is an OpenSSH child and not Fabric's ``forward_local``: paramiko copies each byte in Python threads of this
process, the very process that measures latencies.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import fabric
import paramiko
from invoke.exceptions import CommandTimedOut, ThreadException

from diagnostics.inventory import REPOSITORY, Host

# paramiko logs each failure with a traceback besides raising it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class HostUnreachable(Exception):
    """The host could not be reached, did not let us in, or has nothing to answer with; the message says why."""


@dataclass(frozen=True)
class SshSettings:
    """What OpenSSH would do for one host (the lines of ``ssh -G`` that matter here)."""

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts_files: tuple[str, ...]
    host_key_alias: str | None
    proxy_command: str | None

    @property
    def key_name(self) -> str:
        """Name under which paramiko looks for the host's key."""
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def _ssh(host: Host, *options: str) -> list[str]:
    return [host.ssh_executable, *options, *host.ssh_options]


def resolve(host: Host) -> SshSettings:
    """Ask OpenSSH how it would connect to *host*; raises HostUnreachable when it rejects the settings."""
    command = [*_ssh(host, "-G"), host.address]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise HostUnreachable(f"{shlex.join(command)} failed: {answer.stderr.strip()}")
    return parse_settings(answer.stdout, host)


def parse_settings(text: str, host: Host) -> SshSettings:
    """Parse the output of ``ssh -G``."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)

    def paths(*keys: str) -> tuple[str, ...]:
        lines = [value for key in keys for value in values.get(key, [])]
        return tuple(str(Path(path).expanduser()) for line in lines for path in shlex.split(line))

    jump = values.get("proxyjump", ["none"])[0]
    proxy = values.get("proxycommand", ["none"])[0]
    hostname, port = values["hostname"][0], int(values["port"][0])
    if jump != "none":
        proxy = _jump_command(host, jump, f"[{hostname}]:{port}")
    return SshSettings(
        hostname=hostname,
        port=port,
        user=values["user"][0],
        # OpenSSH lists its default names whether or not they exist.
        identity_files=tuple(path for path in paths("identityfile") if Path(path).is_file()),
        known_hosts_files=paths("userknownhostsfile", "globalknownhostsfile"),
        host_key_alias=values.get("hostkeyalias", [None])[0],
        proxy_command=None if proxy == "none" else proxy,
    )


def _jump_command(host: Host, jump: str, target: str) -> str:
    """The command that OpenSSH itself runs for ``ProxyJump``: of the options only the configuration file goes along.

    The other options are the target's; among them may be the very ProxyJump, and then the jump would have no end.
    """
    options = host.ssh_options
    files = [options[index + 1] for index, option in enumerate(options) if option == "-F"]
    *through, last = jump.split(",")
    command = [host.ssh_executable]
    command += ["-F", files[0]] if files else []
    command += ["-J", ",".join(through)] if through else []
    return shlex.join([*command, "-W", target, f"ssh://{last}"])


@contextlib.contextmanager
def connect(host: Host, timeout: float = 10.0) -> Iterator[fabric.Connection]:
    """Open a Fabric connection to *host*, closed at the end of the block.

    *timeout* (seconds) bounds each of the connection's own stages, not the commands run over it. Raises
    HostUnreachable with a reason and, for an unknown host key, with what to do.
    """
    settings = resolve(host)
    connection = fabric.Connection(
        host=settings.hostname,
        user=settings.user,
        port=settings.port,
        # OpenSSH has read its configuration files already.
        config=fabric.Config(overrides={"load_ssh_configs": False}),
        gateway=settings.proxy_command,
        connect_timeout=timeout,
        connect_kwargs={
            "key_filename": list(settings.identity_files),
            "look_for_keys": False,
            "banner_timeout": timeout,
            "auth_timeout": timeout,
        },
    )
    client = connection.client
    for file in settings.known_hosts_files:
        if Path(file).is_file():
            client.load_system_host_keys(file)
    if settings.host_key_alias:
        _apply_alias(client, settings)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise HostUnreachable(f"the host key has changed since it was recorded: {error}") from error
    except paramiko.AuthenticationException as error:
        raise HostUnreachable(f"login as {settings.user} refused: {error}") from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        if "not found in known_hosts" in str(error):
            error = paramiko.SSHException(
                f"host key unknown to {', '.join(settings.known_hosts_files)}; connect once with ssh and compare it"
            )
        raise HostUnreachable(f"{settings.hostname}:{settings.port}: {error}") from error
    try:
        yield connection
    finally:
        connection.close()


def _apply_alias(client: paramiko.SSHClient, settings: SshSettings) -> None:
    """Let keys recorded under OpenSSH's ``HostKeyAlias`` count for the address that is connected to."""
    recorded = client._system_host_keys.lookup(settings.host_key_alias)
    for kind, key in (recorded or {}).items():
        client._system_host_keys.add(settings.key_name, kind, key)


class Output(Protocol):
    """Takes text as it comes."""

    def write(self, text: str, /) -> object:
        """Take *text*."""

    def flush(self) -> object:
        """Called after each write."""


def execute(
    connection: fabric.Connection, command: str, timeout: float | None, output: Output | None = None
) -> fabric.Result:
    """Run *command* on the host; its status is in the result, and its standard output too, or in *output* as it comes.

    Raises HostUnreachable when it has not ended after *timeout* seconds (None: no limit) or the connection broke.
    """
    shown = "stderr" if output is not None else True
    try:
        return connection.run(command, hide=shown, warn=True, in_stream=False, out_stream=output, timeout=timeout)
    except CommandTimedOut as error:
        raise HostUnreachable(f"{command!r} did not end within {timeout:g} s") from error
    except (paramiko.SSHException, OSError, EOFError, ThreadException) as error:
        raise HostUnreachable(f"the connection broke during {command!r}: {error}") from error


class Tunnel:
    """A local Unix socket whose connections reach a TCP port of the host's loopback."""

    def __init__(self, process: subprocess.Popen[bytes], target: str, socket: Path, errors: Path) -> None:
        self.socket = str(socket)
        self._target = target
        self._process = process
        self._errors = errors

    def failure(self) -> str | None:
        """Return why the tunnel has ended or what it could not reach, or None while all is well.

        A client sees no more of either than a connection that closes.
        """
        status, said = self._process.poll(), self._errors.read_text(errors="replace").strip()
        if status is not None:
            return f"the SSH tunnel ended with status {status}: {said or '-'}"
        _, refused, why = said.rpartition("open failed: ")
        return f"on the host, {self._target} could not be reached: {why.splitlines()[0]}" if refused else None


@contextlib.contextmanager
def tunnel(host: Host, address: str, port: int, timeout: float = 10.0) -> Iterator[Tunnel]:
    """Forward a local Unix socket to *address*:*port* as seen from *host*, for the time of the block.

    A Unix socket in a private folder needs no free port and no other local user can reach it. The remote side runs
    ``cat`` on our end of a pipe rather than nothing: when this process is killed, the pipe closes and the tunnel ends
    with it. Raises HostUnreachable when the tunnel does not stand within *timeout* seconds.
    """
    with tempfile.TemporaryDirectory(prefix="specgate-") as folder:
        socket, errors = Path(folder, "server"), Path(folder, "errors")
        options = (
            "ControlPath=none",
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "ExitOnForwardFailure=yes",
            f"ConnectTimeout={max(1, round(timeout))}",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
        )
        command = [
            *_ssh(host, *(part for option in options for part in ("-o", option))),
            "-T",
            "-L",
            f"{socket}:[{address}]:{port}",
            host.address,
            "cat >/dev/null",
        ]
        with errors.open("wb") as stderr:
            # In a session of its own: a terminal's Ctrl-C would else end it before what goes through it is ended.
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        opened = Tunnel(process, f"{address}:{port}", socket, errors)
        try:
            deadline = time.monotonic() + timeout
            while not socket.is_socket():
                if reason := opened.failure():
                    raise HostUnreachable(reason)
                if time.monotonic() > deadline:
                    raise HostUnreachable(f"no SSH tunnel within {timeout:g} s")
                time.sleep(0.02)
            yield opened
        finally:
            process.terminate()
            process.wait()
            if process.stdin:
                process.stdin.close()
