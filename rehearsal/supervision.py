"""What keeps a host's systemd-nspawn running, in a control group of the host's own.

Where the machine's own first process is systemd, a transient unit does; elsewhere a loop in a shell does.
Either way the control group tells which processes are the host's, so that nothing else is ever ended.
"""

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rehearsal.machine import run

CGROUPS = Path("/sys/fs/cgroup")
STOP_DEADLINE = 30.0  # seconds for a clean shutdown, which takes less than one
REBOOT = 133  # systemd-nspawn's exit status when the host wants to boot again


class Supervisor(ABC):
    """Starts and stops the systemd-nspawn of one host."""

    # As Debian and Ubuntu have it on hardware: /tmp on the disk, cgroup v2 alone.
    environment: ClassVar = {"SYSTEMD_NSPAWN_TMPFS_TMP": "0", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory

    @abstractmethod
    def start(self, nspawn: Sequence[str]) -> None: ...

    @abstractmethod
    def is_running(self) -> bool: ...

    @abstractmethod
    def stop(self) -> None:
        """Shut the host down; when it does not do so in time, kill it."""

    @abstractmethod
    def clear(self) -> None:
        """Remove what a host that was killed has left."""

    @abstractmethod
    def last_words(self) -> str:
        """The end of the host's console output."""


class TransientUnit(Supervisor):
    """A transient service of the machine's systemd, with the settings of systemd's own systemd-nspawn@.service."""

    @property
    def unit(self) -> str:
        return f"{self.name}.service"

    def start(self, nspawn: Sequence[str]) -> None:
        properties = ("Type=notify", "Delegate=yes", "KillMode=mixed", "TasksMax=infinity",
                      f"RestartForceExitStatus={REBOOT}", f"SuccessExitStatus={REBOOT}",
                      f"TimeoutStopSec={STOP_DEADLINE:.0f}")  # fmt: skip
        command = ["systemd-run", "--quiet", "--collect", f"--unit={self.unit}", "--slice=machine.slice"]
        command += [f"--property={line}" for line in properties]
        command += [f"--setenv={name}={value}" for name, value in self.environment.items()]
        run([*command, "--", *nspawn], what="starting the host")

    def is_running(self) -> bool:
        return subprocess.run(["systemctl", "--quiet", "is-active", self.unit], check=False).returncode == 0

    def stop(self) -> None:
        if self.is_running():
            run(["systemctl", "stop", self.unit], what="shutting the host down")

    def clear(self) -> None:
        # Also ends what a killed systemd-nspawn left in the unit's control group.
        subprocess.run(["systemctl", "stop", self.unit], check=False, capture_output=True)
        subprocess.run(["systemctl", "reset-failed", self.unit], check=False, capture_output=True)

    def last_words(self) -> str:
        return run(["journalctl", "--unit", self.unit, "--lines=20", "--no-pager"], what="reading the host's journal")


class ControlGroup(Supervisor):
    """A control group made by hand, for machines and containers whose first process is not systemd."""

    # The process that becomes systemd-nspawn enters the group and leaves its id; the loop around it stays outside,
    # because cgroup v2 allows no processes in a group that has groups below it.
    LOOP = f"""
        while :; do
            (for group in $GROUPS; do sh -c 'echo $PPID' >"$group/cgroup.procs"; done
             sh -c 'echo $PPID' >"$PID_FILE"
             exec "$@")
            [ $? = {REBOOT} ] || exit
        done
    """

    @property
    def groups(self) -> list[Path]:
        """The host's group in each hierarchy that systemd uses: the only one, or those of a machine with cgroup v1."""
        if (CGROUPS / "cgroup.controllers").exists():
            return [CGROUPS / self.name]
        return [
            CGROUPS / hierarchy / self.name for hierarchy in ("systemd", "unified") if (CGROUPS / hierarchy).exists()
        ]

    @property
    def console(self) -> Path:
        return self.directory / "console.log"

    @property
    def pid_file(self) -> Path:
        return self.directory / "nspawn.pid"

    def _processes(self) -> set[int]:
        processes: set[int] = set()
        for group in self._groups_within():
            with contextlib.suppress(OSError):  # a group vanishes with the host's service at any moment
                processes.update(int(process) for process in (group / "cgroup.procs").read_text().split())
        return processes

    def _groups_within(self) -> list[Path]:
        """The host's groups and all those below them, the innermost first."""
        return [Path(path) for group in self.groups for path, _, _ in os.walk(group, topdown=False)]

    def _nspawn(self) -> int | None:
        """The process id of systemd-nspawn, if it runs: an id that is not in the group is somebody else's by now."""
        try:
            process = int(self.pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return process if process in self._processes() else None

    def start(self, nspawn: Sequence[str]) -> None:
        for group in self.groups:
            group.mkdir(exist_ok=True)
        variables = {"GROUPS": " ".join(map(str, self.groups)), "PID_FILE": str(self.pid_file), "TERM": "dumb"}
        with self.console.open("w") as console:
            process = subprocess.Popen(
                ["sh", "-c", self.LOOP, "rehearsal", *nspawn],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env=os.environ | self.environment | variables,
            )  # fmt: skip
        while self._nspawn() is None and process.poll() is None:
            time.sleep(0.02)

    def is_running(self) -> bool:
        return self._nspawn() is not None

    def stop(self) -> None:
        if nspawn := self._nspawn():
            os.kill(nspawn, signal.SIGTERM)  # systemd-nspawn asks the host's systemd to power off
            self._wait_for_end(STOP_DEADLINE)
        self.clear()

    def clear(self) -> None:
        # A host outlives its systemd-nspawn when that is killed.
        while processes := self._processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._wait_for_end(1)
        for group in self._groups_within():
            group.rmdir()
        self.pid_file.unlink(missing_ok=True)

    def _wait_for_end(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def last_words(self) -> str:
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-20:])


def supervisor(name: str, directory: Path) -> Supervisor:
    booted_by_systemd = Path("/run/systemd/system").is_dir()
    return (TransientUnit if booted_by_systemd else ControlGroup)(name, directory)
