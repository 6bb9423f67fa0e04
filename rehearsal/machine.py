"""What this machine is and has: the checks made before anything is touched, and the tools that are installed."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

# The command that each needed Debian package brings.
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "nft": "nftables",
    "ip": "iproute2",
    "ssh-keygen": "openssh-client",
}
PROCESSORS = {"x86_64"}  # those for which files/locks pins packages
GIB = 2**30


class Unsuitable(Exception):
    """A rehearsal host cannot run here; the message says why, and what to do about it."""


def run(command: Sequence[str], *, what: str, input: str = "") -> str:
    """Run `command` and return its standard output; `Unsuitable` with `what` and its last words when it fails."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, check=False, text=True, capture_output=True, input=input, env=environment)
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise Unsuitable(f"{what} failed ({' '.join(command[:4])}, exit status {done.returncode}):\n{words}")
    return str(done.stdout)


def distribution() -> tuple[str, str]:
    """The machine's distribution and suite, for instance `("debian", "bookworm")`."""
    release = platform.freedesktop_os_release()
    identity, suite = release.get("ID", ""), release.get("VERSION_CODENAME", "")
    if identity not in {"debian", "ubuntu"} or not suite:
        raise Unsuitable(
            f"the image of a rehearsal host is made from the machine's own distribution, which must be Debian or "
            f"Ubuntu; this is {release.get('PRETTY_NAME', identity)}. Use a Debian 12 or Ubuntu machine."
        )
    return identity, suite


def check_processor() -> None:
    if platform.machine() not in PROCESSORS:
        raise Unsuitable(f"rehearsal hosts run on {', '.join(PROCESSORS)}; this machine is {platform.machine()}")


def check_memory(need: float) -> None:
    """Refuse a machine with fewer than `need` GiB of memory to spare."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024 / GIB
    if available < need:
        raise Unsuitable(
            f"a rehearsal host that serves needs {need:g} GiB of memory; {available:.1f} GiB are available here. "
            f"End what holds the memory, or use a larger machine."
        )


def check_disk(path: Path, need: float, what: str, variable: str) -> None:
    """Refuse a file system with fewer than `need` GiB free below `path`, for `what`; `variable` names another place."""
    free = shutil.disk_usage(path).free / GIB
    if free < need:
        raise Unsuitable(
            f"{what} needs {need:g} GiB of disk; {path} has {free:.1f} GiB free. Free some, or set "
            f"{variable} to a folder on a larger file system."
        )


def install_tools() -> None:
    """Install the Debian packages of those tools that are missing."""
    missing = sorted({package for command, package in TOOLS.items() if not shutil.which(command)})
    if not missing:
        return
    print(f"rehearsal: installing {' '.join(missing)}", flush=True)
    what = f"installing {' '.join(missing)}, which rehearsal hosts need,"
    run(["apt-get", "update"], what=what)
    run(["apt-get", "install", "--yes", "--no-install-recommends", *missing], what=what)


def give_to_user(path: Path) -> None:
    """Make `path` the person's who called sudo, if somebody did."""
    os.chown(path, int(os.environ.get("SUDO_UID", os.geteuid())), int(os.environ.get("SUDO_GID", os.getegid())))


def make_directory(path: Path) -> None:
    """Make `path` and what is missing above it, for the person."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        give_to_user(path)
