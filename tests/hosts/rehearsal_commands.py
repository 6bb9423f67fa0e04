"""Rehearsal hosts of a test, and the commands of a user who works with them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal directory, and the commands of a user who works with the hosts in it from a checkout."""

    directory: Path
    checkout: Path = REPOSITORY

    def rehearsal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m rehearsal` for the hosts of this directory; making image or model takes minutes, once."""
        return self.run([sys.executable, "-m", "rehearsal", *arguments], timeout=900)

    def run_playbook(self, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run ansible-playbook; standard error is in the output, where a user sees it."""
        return self.run([BIN / "ansible-playbook", *arguments], timeout, stderr=subprocess.STDOUT)

    def popen_playbook(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ansible-playbook and go on, for what must happen while it runs."""
        return self.popen([BIN / "ansible-playbook", *arguments], stderr=subprocess.STDOUT)

    def fab(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return self.run([BIN / "fab", *arguments], timeout)

    def ssh(self, command: str, *, host: str = "rehearsal-1", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as the unprivileged user: with `sudo` where it needs root."""
        return self.run(["ssh", "-F", self.directory / "ssh_config", host, command], timeout)

    def popen_fab(self, *arguments: str) -> subprocess.Popen[str]:
        """Start fab and go on, for what must happen while it runs."""
        return self.popen([BIN / "fab", *arguments], stderr=subprocess.PIPE)

    def popen(self, command: list[str | Path], stderr: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.checkout, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SPECGATE_REHEARSAL_DIR": str(self.directory), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "160"}

    def run(
        self, command: list[str | Path], timeout: float = 300, stderr: int = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, check=False, cwd=self.checkout, env=self.environment, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip


@contextmanager
def booted(directory: Path) -> Iterator[Rehearsal]:
    """A new rehearsal-1 in `directory`; what an earlier run that was killed has left there goes first."""
    rehearsal = Rehearsal(directory)
    for command in ("remove", "up"):
        done = rehearsal.rehearsal(command)
        assert done.returncode == 0, done.stderr
    try:
        yield rehearsal
    finally:
        done = rehearsal.rehearsal("remove")
        assert done.returncode == 0, done.stderr
