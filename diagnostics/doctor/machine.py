"""Is the machine and its operating system fit to serve?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diagnostics.doctor import check, support
from diagnostics.doctor.check import Check
from diagnostics.doctor.expected import Expected, Gpus

Facts = Mapping[str, Any]

NAMES = (
    "init",
    "distribution",
    "architecture",
    "kernel",
    "reboot",
    "memory",
    "huge_pages",
    "disk",
    "python",
    "clock",
    "port",
)


def judge(facts: Facts, expected: Expected) -> Iterator[Check]:
    yield check.judged(
        "init",
        facts["init"] == "systemd",
        facts["init"] or "unknown",
        "The service is a systemd unit: systemd must be the host's first process.",
    )
    yield _distribution(facts["os"])
    yield check.judged(
        "architecture",
        facts["architecture"] in expected.architectures,
        facts["architecture"],
        f"The packages are locked for {', '.join(expected.architectures)} (preflight_architectures).",
    )
    yield _kernel(facts)
    waiting = facts["reboot_required"]
    packages = ", ".join(sorted(set(waiting.split()))) if isinstance(waiting, str) else "packages"
    yield check.judged(
        "reboot",
        not waiting,
        f"{packages} wait for one" if waiting else "none is pending",
        "Reboot at a time of your choice: until then old and new versions run mixed.",
        otherwise=check.WARN,
    )
    total = facts["memory"].get("MemTotal", 0) // 1024
    yield check.judged(
        "memory", total >= expected.memory_mb, f"{total} MiB", f"preflight_memory_mb asks for {expected.memory_mb} MiB."
    )
    yield _huge_pages(facts, expected.gpus)
    free = facts["disk"]["free"] >> 20
    yield check.judged(
        "disk",
        free >= expected.release_disk_mb,
        f"{free} MiB are free at {facts['disk']['path']}",
        f"A new release needs {expected.release_disk_mb} MiB (release_disk_mb) below {expected.release_root}.",
        otherwise=check.WARN,  # the role release refuses where one must be built
    )
    yield _python(facts, expected)
    yield _clock(facts)
    yield _port(facts["listeners"], expected)


def _distribution(os: Mapping[str, str]) -> Check:
    name, shown = "distribution", os.get("PRETTY_NAME") or os.get("ID") or "unknown"
    if "debian" not in [os.get("ID"), *os.get("ID_LIKE", "").split()]:
        return Check(name, check.FAIL, shown, "The roles install with apt: the host must be of Debian's family.")
    return check.judged(
        name,
        (os.get("ID"), os.get("VERSION_ID")) in support.DISTRIBUTIONS,
        shown,
        f"Not among those that this project supports ({', '.join(support.DISTRIBUTIONS.values())}); "
        "the CUDA role refuses it.",
        otherwise=check.WARN,
    )


def _kernel(facts: Facts) -> Check:
    release = facts["kernel"]
    oldest = support.KERNELS.get((facts["os"].get("ID", ""), facts["os"].get("VERSION_ID", "")))
    if facts["container"]:
        return check.not_applicable("kernel", f"{release}; in a container ({facts['container']}) it is the machine's")
    if oldest is None:
        return check.not_applicable("kernel", f"{release}; nothing is known of this distribution's kernels")
    # "6.8.0-51-generic"; what follows the second number differs from kernel to kernel.
    numbers = tuple(int(part) for part in release.split("-")[0].split("+")[0].split(".")[:2])
    return check.judged(
        "kernel",
        numbers >= oldest,
        release,
        f"The distribution was released with {'.'.join(map(str, oldest))}: upgrade the kernel, then the driver.",
        otherwise=check.WARN,
    )


def _huge_pages(facts: Facts, gpus: Gpus | None) -> Check:
    name, setting = "huge_pages", facts["transparent_huge_pages"]
    reserved = facts["memory"].get("HugePages_Total", 0)
    if setting is None:
        return check.unknown(name, "the kernel tells no setting of transparent huge pages", "Look at /sys/kernel/mm.")
    active = setting.partition("[")[2].partition("]")[0]
    shown = f"transparent: {active}, reserved: {reserved}"
    if gpus is None:
        return check.not_applicable(name, f"{shown}; of no matter without a GPU")
    if reserved:
        return Check(
            name,
            check.WARN,
            shown,
            "SGLang uses no reserved huge pages: what vm.nr_hugepages sets aside is lost to it.",
        )
    return check.judged(
        name,
        active in ("always", "madvise"),
        shown,
        "Set /sys/kernel/mm/transparent_hugepage/enabled to madvise: pinned host memory gains.",
        otherwise=check.WARN,
    )


def _python(facts: Facts, expected: Expected) -> Check:
    """The releases' interpreter: a path, or an exact version that uv installs."""
    name, given = "python", expected.python
    if expected.router:
        return check.not_applicable(name, "the router runs on the distribution's own")
    of_host = given.startswith("/")
    found = (facts["python"] or {}).get("version", "") if of_host else given
    try:
        new_enough = support.version(found)[:2] >= support.PYTHON_FROM
    except ValueError:
        new_enough = False
    shown = f"{found or 'nothing that runs'} at {given}" if of_host else f"{given}, which uv installs"
    return check.judged(
        name,
        new_enough,
        shown,
        f"The packages are locked for Python {'.'.join(map(str, support.PYTHON_FROM))} and newer, which Ubuntu 22.04 "
        "does not have: set release_python to a version such as 3.12.16, which uv installs, or to a path.",
    )


def _clock(facts: Facts) -> Check:
    name = "clock"
    if facts["container"]:
        return check.not_applicable(name, f"in a container ({facts['container']}) it is the machine's")
    if facts["clock"] not in ("yes", "no"):
        return check.unknown(name, "timedatectl did not tell", "See what `timedatectl` says on the host.")
    return check.judged(
        name,
        facts["clock"] == "yes",
        f"synchronised: {facts['clock']}",
        "Switch time synchronisation on (systemd-timesyncd, chrony): logs and certificates need it.",
        otherwise=check.WARN,
    )


def _port(listeners: Mapping[str, Sequence[Mapping[str, Any]] | None], expected: Expected) -> Check:
    name, taken, told = "port", [], []
    for port in expected.ports.values():
        found = listeners[str(port)]
        if found is None:
            return check.unknown(name, "`ss` did not tell who listens", "Install iproute2 on the host.")
        strangers = [
            f"{each['unit'] or 'no unit'} {each['pid']} {each['program']}"
            if each["pid"] is not None
            else "a listener whose process is not visible"
            for each in found
            if each["unit"] != expected.unit
        ]
        if strangers:
            taken.append(f"port {port} is in use by {'; '.join(strangers)}")
        told.append(f"{port} is {'the service' + chr(39) + 's' if found else 'free'}")
    return check.judged(
        name,
        not taken,
        f"{', '.join(taken)} (unit, process id, program), not by {expected.unit}" if taken else ", ".join(told),
        f"Stop that program or set {' or '.join(expected.ports)} to a free port.",
    )
