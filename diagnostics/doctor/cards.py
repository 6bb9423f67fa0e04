"""Are the GPUs, their driver and the ways between them fit to serve?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diagnostics.doctor import check, nvidia_smi, support
from diagnostics.doctor.check import Check
from diagnostics.doctor.expected import Expected, Gpus

Facts = Mapping[str, Any]
SEE_SMI = "See what `nvidia-smi -q` says on the host."

NAMES = (
    "driver",
    "open_modules",
    "driver_loaded",
    "gpu_count",
    "gpu_name",
    "gpu_capability",
    "gpu_memory",
    "gpu_ecc",
    "gpu_mig",
    "gpu_persistence",
    "pcie_link",
    "topology",
    "peer_to_peer",
    "gpu_numa",
    "iommu",
    "acs",
    "hmm",
    "fabric_manager",
    "cuda_toolkit",
    "compilers",
)


def judge(facts: Facts, expected: Expected, gpus: Gpus) -> Iterator[Check]:
    """Judge the GPUs that `facts` (specgate.host_facts/1) tell of against those that are expected."""
    nvidia = facts["nvidia"]
    rows, trouble = read(facts)
    yield from _driver(nvidia, expected, gpus, rows)
    on_bus = f"; {len(nvidia['pci_gpus'])} are on the PCI bus"
    yield check.judged(
        "gpu_count",
        len(rows) >= gpus.count,
        f"{len(rows)} of {gpus.count}"
        + (f": {trouble}" if not rows else "")
        + (on_bus if len(nvidia["pci_gpus"]) != len(rows) else ""),
        "Where fewer answer than the bus has, look for Xid messages in the kernel's log; where the bus has fewer, "
        "for a card's seat, power and the BIOS's 64-bit address space; else correct preflight_gpus.",
    )
    if rows:
        yield from _cards(gpus, expected, rows)
        yield from _connections(facts, expected, gpus)
    else:
        first, last = NAMES.index("gpu_name"), NAMES.index("gpu_numa")
        for name in NAMES[first : last + 1]:
            yield check.unknown(name, trouble, "See driver and gpu_count.")
    yield from _platform(facts, gpus)
    yield _toolkit(nvidia["nvcc"], expected)
    yield _compilers(facts, expected)


def _driver(nvidia: Facts, expected: Expected, gpus: Gpus, rows: Sequence[nvidia_smi.Row]) -> Iterator[Check]:
    todo = "Install the driver: playbooks/provision.yml does, where the inventory sets cuda_driver_version."
    if nvidia["driver"] is None:
        yield Check("driver", check.FAIL, "no NVIDIA driver is loaded", todo)
        yield check.unknown("open_modules", "no NVIDIA driver is loaded", "See driver.")
        yield check.unknown("driver_loaded", "no NVIDIA driver is loaded", "See driver.")
        return
    try:
        driver = nvidia_smi.driver(nvidia["driver"])
    except ValueError as error:
        for name in ("driver", "open_modules", "driver_loaded"):
            yield check.unknown(name, error, "See what `nvidia-smi` says on the host.")
        return
    oldest = support.oldest_driver(expected.cuda) if expected.cuda else None
    if not expected.cuda:
        yield check.passed("driver", driver.version)
    elif oldest is None:
        yield check.unknown(
            "driver",
            f"{driver.version}; no oldest driver is known for CUDA {expected.cuda}",
            f"preflight_cuda is known as {', '.join(support.DRIVERS)} and their minors.",
        )
    else:
        yield check.judged(
            "driver",
            support.version(driver.version) >= oldest,
            driver.version,
            f"CUDA {expected.cuda} needs {support.text(oldest)} or newer. {todo}",
        )
    yield _modules(driver, gpus, rows)
    libraries = {row["driver_version"] for row in rows}
    if not libraries:
        yield check.unknown(
            "driver_loaded", f"module {driver.version}, nvidia-smi tells no libraries'", "See gpu_count."
        )
        return
    yield check.judged(
        "driver_loaded",
        libraries == {driver.version},
        f"module {driver.version}, libraries {', '.join(sorted(libraries))}",
        "The driver was upgraded under the loaded module: reboot.",
    )


def _modules(driver: nvidia_smi.Driver, gpus: Gpus, rows: Sequence[nvidia_smi.Row]) -> Check:
    """Proprietary modules do not take a Blackwell card, so nvidia-smi does not name it: what is expected counts."""
    name = "open_modules"
    if driver.is_open:
        return check.passed(name, "open")
    told = [_capability(row.get("compute_cap")) for row in rows] or [_capability(gpus.compute_capability)]
    if any(capability >= support.OPEN_MODULES_FROM for capability in told):
        todo = "Blackwell works with the open kernel modules only: install nvidia-open in place of the present driver."
        return Check(name, check.FAIL, "proprietary", todo)
    if () in told:
        return check.unknown(name, "proprietary, and no card tells its compute capability", "See gpu_count.")
    return check.passed(name, "proprietary")


def _capability(text: str | None) -> support.Version:
    """A compute capability to compare with; () where it is not told."""
    try:
        return support.version(text or "")
    except ValueError:
        return ()


def _all(rows: Sequence[nvidia_smi.Row], field: str) -> str:
    """The values of a field: one where all cards agree, else which card has which."""
    values: dict[str, list[str]] = {}
    for row in rows:
        values.setdefault(row.get(field, "?"), []).append(row["index"])
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} (GPU {', '.join(cards)})" for value, cards in values.items())


def _cards(gpus: Gpus, expected: Expected, rows: Sequence[nvidia_smi.Row]) -> Iterator[Check]:
    name = gpus.name or ""
    yield check.judged(
        "gpu_name",
        all(name.lower() in row["name"].lower() for row in rows),
        _all(rows, "name"),
        f"Expected is '{name}': correct preflight_gpus or the host.",
    )
    found = _all(rows, "compute_cap")
    if gpus.compute_capability is not None:
        yield check.judged(
            "gpu_capability",
            found == gpus.compute_capability,
            found,
            f"Expected is {gpus.compute_capability}: other cards need other settings.",
        )
    else:
        first = support.CAPABILITIES.get(found, ("", ()))[1]
        built = support.version(expected.cuda) if expected.cuda else first
        yield check.judged(
            "gpu_capability",
            bool(first) and built >= first,
            found,
            "CUDA of this release has no code for these cards (docs/gpu-host.md).",
        )
    sizes = [size for row in rows if (size := nvidia_smi.number(row, "memory.total")) is not None]
    if len(sizes) < len(rows):
        yield check.unknown("gpu_memory", _all(rows, "memory.total"), SEE_SMI)
    else:
        yield check.judged(
            "gpu_memory",
            min(sizes) >= (gpus.memory_mb or 0),
            f"{min(sizes)} MiB at least on each",
            f"Expected are {gpus.memory_mb} MiB (preflight_gpus).",
        )
    yield _ecc(gpus, rows)
    # Cards that cannot be divided say so ("[N/A]").
    yield _switch(
        "gpu_mig",
        rows,
        "mig.mode.current",
        good=("Disabled", "[N/A]", "N/A", "[Not Supported]"),
        bad="Enabled",
        todo="SGLang takes whole cards: nvidia-smi -i N -mig 0.",
    )
    yield _switch(
        "gpu_persistence",
        rows,
        "persistence_mode",
        good=("Enabled",),
        bad="Disabled",
        todo="Each start initialises the cards anew: playbooks/provision.yml switches it on, or nvidia-smi -pm 1.",
        otherwise=check.WARN,
    )
    yield _link(gpus, rows)


def _switch(
    name: str,
    rows: Sequence[nvidia_smi.Row],
    field: str,
    *,
    good: Collection[str],
    bad: str,
    todo: str,
    otherwise: str = check.FAIL,
) -> Check:
    """A setting that is on or off. One that is neither, because the driver does not tell it, is unknown."""
    shown = {"Enabled": "on", "Disabled": "off"}
    wrong = [row["index"] for row in rows if row.get(field) == bad]
    if wrong:
        return Check(name, otherwise, f"{shown[bad]} for GPU {', '.join(wrong)}", todo)
    if not all(row.get(field) in good for row in rows):
        return check.unknown(name, _all(rows, field), SEE_SMI)
    return check.passed(name, "off" if bad == "Enabled" else "on")


def _ecc(gpus: Gpus, rows: Sequence[nvidia_smi.Row]) -> Check:
    name, modes = "gpu_ecc", _all(rows, "ecc.mode.current")
    broken = {
        row["index"]: count
        for row in rows
        if (count := nvidia_smi.number(row, "ecc.errors.uncorrected.volatile.total"))
    }
    if broken:
        shown = ", ".join(f"{count} on GPU {card}" for card, count in broken.items())
        return Check(
            name,
            check.FAIL,
            f"uncorrected errors since the driver was loaded: {shown}",
            "Drain the host and reset the card (nvidia-smi -r) or reboot; replace it if they return.",
        )
    counted = "ecc.errors.uncorrected.volatile.total"
    if any(row.get("ecc.mode.current") == "Enabled" and nvidia_smi.number(row, counted) is None for row in rows):
        return check.unknown(name, f"uncorrected errors: {_all(rows, counted)}", SEE_SMI)
    wanted = None if gpus.ecc is None else "Enabled" if gpus.ecc else "Disabled"
    return check.judged(
        name,
        wanted in (None, modes),
        modes,
        f"Expected is {wanted}: nvidia-smi -e {int(bool(gpus.ecc))}, then reboot.",
        otherwise=check.WARN,
    )


def _link(gpus: Gpus, rows: Sequence[nvidia_smi.Row]) -> Check:
    """The width is that of now; the generation the possible one, because idle cards lower it to save power."""
    slow, untold = [], []
    for row in rows:
        width, most = nvidia_smi.number(row, "pcie.link.width.current"), nvidia_smi.number(row, "pcie.link.width.max")
        generation = nvidia_smi.number(row, "pcie.link.gen.max")
        wanted = gpus.pcie_width or most
        narrow = width is not None and wanted is not None and width < wanted
        old = generation is not None and generation < (gpus.pcie_generation or 0)
        if width is None or wanted is None or (generation is None and gpus.pcie_generation):
            untold.append(row["index"])
        if narrow or old:
            slow.append(f"GPU {row['index']}: generation {generation} x{width}")
    every = f"generation {_all(rows, 'pcie.link.gen.max')} x{_all(rows, 'pcie.link.width.current')}"
    if untold and not slow:
        return check.unknown("pcie_link", f"{every} (GPU {', '.join(untold)})", SEE_SMI)
    return check.judged(
        "pcie_link",
        not slow,
        "; ".join(slow) or every,
        "Expected is "
        + (f"generation {gpus.pcie_generation} x{gpus.pcie_width}" if gpus.pcie_width else "the card's full width")
        + ": look at the slot, the riser and the BIOS's bifurcation.",
        otherwise=check.FAIL if gpus.pcie_width else check.WARN,
    )


def _connections(facts: Facts, expected: Expected, gpus: Gpus) -> Iterator[Check]:
    nvidia = facts["nvidia"]
    try:
        topology = nvidia_smi.topology(nvidia["topology"] or "")
    except ValueError as error:
        yield check.unknown("topology", error, "See what `nvidia-smi topo -m` says on the host.")
        yield _peers(nvidia["peers"], gpus)
        yield check.unknown("gpu_numa", error, "See what `nvidia-smi topo -m` says on the host.")
        return
    kinds = sorted(set(topology.links.values()))
    shown = ", ".join(f"{kind} x {len(topology.pairs(kind))}" for kind in kinds) or "a single GPU"
    linked = topology.pairs("NV")
    if gpus.interconnect == "nvlink":
        alone = [pair for pair in topology.links if pair not in linked]
        lost = sorted({gpu for gpu in topology.numa if sum(gpu in pair for pair in alone) * 2 > len(topology.numa)})
        yield check.judged(
            "topology",
            not alone,
            shown + (f"; without NVLink: GPU {', '.join(map(str, lost))}" if lost else ""),
            "Each pair must be joined by NVLink: see fabric_manager, then `nvidia-smi nvlink --status`.",
        )
    else:
        far = topology.pairs("SYS")
        yield check.judged(
            "topology",
            not far or expected.p2p_level is not None,
            shown + (f"; NCCL_P2P_LEVEL is {expected.p2p_level}" if expected.p2p_level else ""),
            "Some pairs talk across sockets: choose NCCL_P2P_LEVEL in service_environment (SYS lets them too).",
            otherwise=check.WARN,
        )
    yield _peers(nvidia["peers"], gpus)
    arguments = facts["deployed_arguments"] or expected.arguments
    yield _numa(topology, arguments.get("numa-node"), expected.numa_mask)


def _peers(text: str | None, gpus: Gpus) -> Check:
    """What the driver allows: it does not see what an IOMMU or ACS do to it."""
    name = "peer_to_peer"
    if gpus.interconnect == "nvlink":
        return check.not_applicable(name, "the cards talk over NVLink: see topology")
    if gpus.count == 1:
        return check.not_applicable(name, "a single GPU")
    try:
        states = nvidia_smi.peers(text or "")
    except ValueError as error:
        return check.unknown(name, error, "See what `nvidia-smi topo -p2p r` says on the host.")
    bad = {pair: state for pair, state in states.items() if state != "OK"}
    shown = ", ".join(f"{state} x {list(bad.values()).count(state)}" for state in sorted(set(bad.values())))
    return check.judged(
        name,
        not bad,
        f"{shown} of {len(states)} ways, such as GPU {next(iter(bad))[0]} to {next(iter(bad))[1]}"
        if bad
        else f"OK for {len(states)} ways",
        "NCCL goes through the host's memory there. GNS: the cards cannot (GeForce); CNS, TNS: the chipset or the "
        "slots do not allow it, see iommu and acs; DR: a module's option forbids it.",
        otherwise=check.WARN,
    )


def _numa(topology: nvidia_smi.Topology, ranks: object, mask: str) -> Check:
    """`ranks`: the argument numa-node, a node a rank, in the cards' order. `mask`: the nodes of the unit's memory."""
    without = [str(gpu) for gpu, node in topology.numa.items() if node is None]
    nodes = ", ".join(
        f"node {node}: GPU {' '.join(str(g) for g, n in topology.numa.items() if n == node)}"
        for node in dict.fromkeys(topology.numa.values())
        if node is not None
    )
    name, own = "gpu_numa", [str(node) for node in topology.numa.values()]
    if without:
        return Check(
            name,
            check.WARN,
            f"the host tells no node of GPU {', '.join(without)}",
            "Let the BIOS tell where the cards are (NPS, ACPI SRAT), else processes cannot be placed beside them.",
        )
    if isinstance(ranks, Sequence) and len(ranks) == len(own) and [str(node) for node in ranks] != own:
        return Check(
            name,
            check.WARN,
            f"{nodes}; numa-node is {' '.join(map(str, ranks))}",
            f"Place each rank beside its card: numa-node: [{', '.join(own)}] in service_server_arguments.",
        )
    if outside := sorted(set(own) - _nodes(mask)) if mask not in ("", "all") else []:
        return Check(
            name,
            check.WARN,
            f"{nodes}; service_numa_mask is {mask}",
            f"The server's memory is away from the cards of node {', '.join(outside)}: add it to service_numa_mask.",
        )
    return check.passed(name, nodes)


def _nodes(mask: str) -> set[str]:
    """The nodes of a systemd mask such as ``0-1,3`` (systemd.exec(5), NUMAMask=)."""
    found: set[str] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", mask):
        found |= {str(node) for node in range(int(first), int(last or first) + 1)}
    return found


def _platform(facts: Facts, gpus: Gpus) -> Iterator[Check]:
    """Peer-to-peer over PCIe is what suffers from an IOMMU, from ACS and from HMM; with NVLink it is no failure."""
    nvidia, severity = facts["nvidia"], check.WARN if gpus.interconnect == "nvlink" else check.FAIL
    cards = nvidia["pci_gpus"]
    if not cards:
        why = "no NVIDIA GPU is on the PCI bus"
        yield check.unknown("iommu", why, "See gpu_count.")
        yield check.unknown("acs", why, "See gpu_count.")
    else:
        kinds = {card["iommu"] for card in cards}
        shown = ", ".join(sorted(kind or "a group without a type" for kind in kinds))
        translated = [kind for kind in kinds if kind and kind.startswith("DMA")]
        if not translated and not kinds <= {"off", "identity"}:
            yield check.unknown("iommu", shown, "See /sys/kernel/iommu_groups and `dmesg | grep -i iommu` on the host.")
        else:
            yield check.judged(
                "iommu",
                not translated,
                shown,
                "Switch it off in the BIOS or boot with iommu=pt: NCCL hangs or crawls where it translates "
                "peer-to-peer traffic.",
                otherwise=severity,
            )
        every = {bridge: redirects for card in cards for bridge, redirects in card["acs_redirects"].items()}
        bridges = [bridge for bridge, redirects in every.items() if redirects]
        unread = [bridge for bridge, redirects in every.items() if redirects is None]
        if unread and not bridges:
            yield check.unknown(
                "acs",
                f"the settings of {', '.join(unread[:4])} cannot be read" + ("" if facts["root"] else " but by root"),
                "Run as a user who may use sudo; where root cannot either, see `lspci -vvv` and the BIOS (MMCONFIG).",
            )
        else:
            yield check.judged(
                "acs",
                not bridges,
                f"{len(bridges)} bridges redirect: {', '.join(sorted(bridges)[:4])}"
                if bridges
                else "no bridge above a GPU redirects",
                "Switch ACS off in the BIOS, or clear it at boot (setpci -s BRIDGE ECAP_ACS+0x6.w=0000).",
                otherwise=severity,
            )
    hmm = nvidia["uvm_disable_hmm"]
    if gpus.interconnect == "nvlink" or hmm is None:
        why = "of no matter with NVLink" if gpus.interconnect == "nvlink" else "nvidia_uvm is not loaded"
        yield check.not_applicable("hmm", why)
    else:
        yield check.judged(
            "hmm",
            hmm in ("Y", "1"),
            f"uvm_disable_hmm={hmm}",
            "Set `options nvidia_uvm uvm_disable_hmm=1` in /etc/modprobe.d and reboot.",
            otherwise=check.WARN,
        )
    state = nvidia["fabric_manager"] or "unknown"
    if not nvidia["pci_switches"] and gpus.interconnect != "nvlink":
        yield check.not_applicable("fabric_manager", "there is no NVSwitch")
    else:
        yield check.judged(
            "fabric_manager",
            state == "active",
            state,
            "Set cuda_fabric_manager and run playbooks/provision.yml: it must be of exactly the driver's version.",
        )


def _toolkit(nvcc: str | None, expected: Expected) -> Check:
    name, version = "cuda_toolkit", nvidia_smi.toolkit(nvcc or "")
    if not expected.cuda:
        return check.not_applicable(name, "preflight_cuda is not set")
    todo = f"Kernels that are compiled on the host need CUDA {expected.cuda} (cuda-toolkit)."
    if version is None and expected.cuda_toolkit:
        return Check(name, check.WARN, "no nvcc on the host", f"{todo} The deploy installs {expected.cuda_toolkit}.")
    if version is None:
        return Check(name, check.FAIL, "no nvcc on the host", f"{todo} Set cuda_toolkit_version, or install it.")
    return check.judged(
        name, version.partition(".")[0] == expected.cuda.partition(".")[0], version, todo, otherwise=check.WARN
    )


def _compilers(facts: Facts, expected: Expected) -> Check:
    """What nvcc and Triton call while the server runs: the role release installs what the distribution has of it."""
    name, python = "compilers", facts["python"]
    if python is None and expected.python.startswith("/"):
        return check.unknown(name, f"{expected.python} tells of no headers", "See python.")
    if python is not None and not python["has_header"] and not python["header"].startswith("/usr/include/"):
        return Check(
            name,
            check.FAIL,
            f"{expected.python} has no {python['header']}",
            "Triton compiles with it, and no package of the distribution has it: install the interpreter with its "
            "headers, or set release_python to the distribution's, or to a version such as 3.12.16.",
        )
    missing = ["g++"] if facts["c++"] is None else []
    if python is not None and not python["has_header"]:
        missing.append(f"python{'.'.join(python['version'].split('.')[:2])}-dev")
    return check.judged(
        name,
        not missing,
        f"without {', '.join(missing)}" if missing else "g++ and Python's headers",
        "Kernels are compiled while the server runs. The deploy installs these packages where it builds a release.",
        otherwise=check.WARN,
    )


def read(facts: Facts) -> tuple[list[nvidia_smi.Row], str]:
    """The GPUs as nvidia-smi sees them, and why it sees none."""
    nvidia = facts["nvidia"]
    if nvidia["nvidia_smi"] is None:
        return [], "nvidia-smi is not installed"
    if nvidia["gpus"] is None:
        why = [problem["why"] for problem in facts["problems"] if problem["what"].startswith("nvidia-smi --query")]
        return [], f"nvidia-smi failed: {', '.join(why)}"
    try:
        return nvidia_smi.gpus(nvidia["gpus"]), "nvidia-smi names none"
    except ValueError as error:
        return [], str(error)


def smallest_memory(facts: Facts) -> int | None:
    """Memory of the smallest card in MiB; None where no card tells."""
    sizes = [nvidia_smi.number(row, "memory.total") for row in read(facts)[0]]
    return min((size for size in sizes if size is not None), default=None)
