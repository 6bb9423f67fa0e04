"""Rehearsal hosts on this machine, and the model that they serve."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from rehearsal import machine
from rehearsal.host import Host, RehearsalDirectory

CHECKOUT = Path(__file__).resolve().parent.parent

# sudo resets the environment; these still decide where things lie and how packages are reached.
KEPT_BY_SUDO = (
    "HOME", "XDG_CACHE_HOME", "SPECGATE_REHEARSAL_DIR", "SSL_CERT_FILE",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "UV_DEFAULT_INDEX", "UV_INDEX_URL",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m rehearsal", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, purpose in (
        ("up", "boot hosts, making them and the image first where needed, and wait until an SSH login works"),
        ("down", "shut hosts down; their disks stay"),
        ("remove", "shut hosts down and delete their disks"),
        ("list", "show the hosts that there are"),
        ("model", "train the model that the hosts serve, unless it is in the cache"),
    ):
        subparser = commands.add_parser(command, help=purpose, description=purpose)
        if command in {"up", "down", "remove"}:
            default = "rehearsal-1" if command == "up" else "all"
            subparser.add_argument("names", nargs="*", metavar="NAME", help=f"rehearsal-1 to rehearsal-9 ({default})")
    return parser.parse_args(arguments)


def become_root() -> None:
    """Run this command again by sudo, when it does not run as root."""
    if os.geteuid() == 0:
        return
    command = ["sudo", f"--preserve-env={','.join(KEPT_BY_SUDO)}", sys.executable, "-m", "rehearsal", *sys.argv[1:]]
    os.environ.setdefault("PYTHONPATH", str(CHECKOUT))
    try:
        os.execvp("sudo", command)
    except FileNotFoundError:
        raise machine.Unsuitable(
            "a rehearsal host needs root, and sudo is not installed: run this as root, or install sudo"
        ) from None


def main() -> int:
    options = parse(sys.argv[1:])
    path = os.environ.get("SPECGATE_REHEARSAL_DIR") or CHECKOUT / ".rehearsal"
    directory = RehearsalDirectory(Path(path).resolve())
    try:
        if options.command == "model":
            from rehearsal import engine  # needs .venv, the rest of this package does not

            directory.use_model(engine.ensure_model())
            return 0
        if options.command == "list" and not directory.path.exists():
            return 0
        become_root()
        if options.command == "list":
            for host in directory.hosts():
                print(f"{host.name}  {'up' if host.is_up() else 'down'}")
            return 0
        hosts = [Host(directory, name) for name in options.names]
        with directory.locked():
            if options.command == "up":
                directory.up(hosts or [Host(directory, "rehearsal-1")])
            else:
                directory.down(hosts or directory.hosts(), delete=options.command == "remove")
    except machine.Unsuitable as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
