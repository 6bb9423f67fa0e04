"""The image: a small Debian or Ubuntu server of the machine's own suite, made once and kept in the user's cache."""

import fcntl
import hashlib
import os
import time
from pathlib import Path

from rehearsal import machine

CUSTOMIZE = Path(__file__).with_name("customize-image.sh")

PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "libpam-systemd", "libnss-systemd"),  # the last names DynamicUser= users
    *("openssh-server", "sudo"),  # how Ansible gets in
    *("python3", "python3-apt", "python3-venv"),  # what its modules run on
    *("ca-certificates", "iproute2", "procps", "curl"),
)


# A third of all files, which nobody reads there.
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgate"


def sources() -> list[str]:
    """The machine's own `deb` lines for its distribution, as apt sees them, whatever files they come from."""
    identity, _suite = machine.distribution()
    line_format = "$(ORIGIN) deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", line_format, "Created-By: Packages"]
    for update in (False, True):
        if update:  # a new machine has no package lists yet
            machine.run(["apt-get", "update"], what="fetching the package lists")
        lines = machine.run(command, what="asking apt for its package sources").splitlines()
        own = sorted({line.split(" ", 1)[1] for line in lines if line.lower().startswith(f"{identity} ")})
        if own:
            return own
    raise machine.Unsuitable(f"apt knows no package source of {identity}: add one to /etc/apt and run apt-get update")


def apt_options() -> list[str]:
    """The machine's apt settings without which its sources might not work: proxies and date checks."""
    lines = machine.run(["apt-config", "dump"], what="asking apt for its settings").splitlines()
    wanted = ("Acquire::Check-Valid-Until ", "Acquire::Check-Date ", "Acquire::http::Proxy ", "Acquire::https::Proxy ")
    return [line for line in lines if line.startswith(wanted)]


def ensure() -> Path:
    """The image as a tar file, made first when it is not in the cache; its name says from what it was made."""
    _identity, suite = machine.distribution()
    deb_lines, options = sources(), apt_options()
    ingredients = [suite, *PACKAGES, *LEFT_OUT, *deb_lines, *options, CUSTOMIZE.read_text()]
    key = hashlib.sha256("\n".join(ingredients).encode()).hexdigest()[:12]
    cache = cache_directory()
    machine.make_directory(cache)
    image = cache / f"image-{suite}-{key}.tar"
    with (cache / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists():
            machine.check_disk(cache, need=2, what="the hosts' image", variable="XDG_CACHE_HOME")
            print(f"rehearsal: making the image {image}: about a minute, once", flush=True)
            started = time.monotonic()
            build(image, suite, deb_lines, options)
            print(f"rehearsal: image ready after {time.monotonic() - started:.0f} s", flush=True)
    return image


def build(image: Path, suite: str, deb_lines: list[str], options: list[str]) -> None:
    """Make the image under another name and rename it, so that there is a whole one or none."""
    unfinished = image.with_suffix(".unfinished.tar")
    command = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--quiet",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        f"--include={','.join(PACKAGES)}", *(f"--aptopt={option}" for option in options),
        f"--customize-hook={CUSTOMIZE}", suite, str(unfinished), "-",
    ]  # fmt: skip
    machine.run(command, what="making the image", input="\n".join(deb_lines))
    machine.give_to_user(unfinished)
    unfinished.replace(image)
