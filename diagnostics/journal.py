"""The journal of the unit's running invocation, one line at a time."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from diagnostics.connect import HostUnreachable, connect, execute
from diagnostics.inventory import Host


class _Lines:
    """A file that hands on whole lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = ""

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._on_line(line)

    def flush(self) -> None:
        """Nothing to do: an unfinished line waits for its end."""


def journal(
    host: Host, on_line: Callable[[str], None], *, lines: int, pattern: str | None, follow: bool, timeout: float
) -> None:
    """Hand the last *lines* lines of the running (else the last) invocation to *on_line*; with *follow*, new ones too.

    *pattern* is a regular expression as journalctl's ``--grep`` takes it. Raises HostUnreachable when there is no
    journal to read.
    """
    with connect(host, timeout) as connection:
        invocation = execute(
            connection, f"systemctl show {shlex.quote(host.unit)} --property=InvocationID --value", timeout
        )
        if not invocation.stdout.strip():
            raise HostUnreachable(f"{host.unit} has not been started since the host's start")
        identifier = invocation.stdout.strip()
        command = ["sudo", "-n", "journalctl", "--no-pager", "--quiet", "--output=short-iso", f"--lines={lines}"]
        if pattern is not None:
            command.append(f"--grep={pattern}")
        if follow:
            command.append("--follow")
        # The first match is what the unit's processes wrote, the second what systemd wrote about the unit.
        command += [f"_SYSTEMD_INVOCATION_ID={identifier}", "+", f"INVOCATION_ID={identifier}"]
        answer = execute(connection, shlex.join(command), None if follow else timeout, _Lines(on_line))
        # journalctl ends with 1 and no message when --grep matches nothing.
        if not answer.ok and answer.stderr.strip():
            raise HostUnreachable(f"the journal cannot be read: {answer.stderr.strip()}")
