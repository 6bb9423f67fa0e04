"""Are the GPUs, their driver and the ways between them fit to serve?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diagnostics.doctor import check, nvidia_smi, support
from diagnostics.doctor.check import Check
from diagnostics.doctor.expected import Expected, Gpus

Facts = Mapping[str, Any]

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
    "gpu_numa",
    "iommu",
    "acs",
    "hmm",
    "fabric_manager",
    "cuda_toolkit",
)


def judge(facts: Facts, expected: Expected, gpus: Gpus) -> Iterator[Check]:
    """Judge the GPUs that `facts` (specgate.host_facts/1) tell of against those that are expected."""
    nvidia = facts["nvidia"]
    rows, trouble = read(facts)
    yield from _driver(nvidia, expected, rows)
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
        yield from _connections(nvidia, gpus)
    else:
        first, last = NAMES.index("gpu_name"), NAMES.index("gpu_numa")
        for name in NAMES[first : last + 1]:
            yield check.unknown(name, trouble, "See driver and gpu_count.")
    yield from _platform(facts, gpus)
    yield _toolkit(nvidia["nvcc"], expected)


def _driver(nvidia: Facts, expected: Expected, rows: Sequence[nvidia_smi.Row]) -> Iterator[Check]:
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
    needs = any(_capability(row) >= support.OPEN_MODULES_FROM for row in rows)
    yield check.judged(
        "open_modules",
        driver.is_open or not needs,
        "open" if driver.is_open else "proprietary",
        "Blackwell works with the open kernel modules only: install nvidia-open in place of the present driver.",
    )
    libraries = {row["driver_version"] for row in rows}
    yield check.judged(
        "driver_loaded",
        not libraries or libraries == {driver.version},
        f"module {driver.version}, libraries {', '.join(sorted(libraries)) or 'not known'}",
        "The driver was upgraded under the loaded module: reboot.",
    )


def _capability(row: nvidia_smi.Row) -> support.Version:
    try:
        return support.version(row["compute_cap"])
    except (KeyError, ValueError):
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
    least = min(nvidia_smi.number(row, "memory.total") or 0 for row in rows)
    yield check.judged(
        "gpu_memory",
        least >= (gpus.memory_mb or 0),
        f"{least} MiB at least on each",
        f"Expected are {gpus.memory_mb} MiB (preflight_gpus).",
    )
    yield _ecc(gpus, rows)
    mig = [row["index"] for row in rows if row.get("mig.mode.current") == "Enabled"]
    yield check.judged(
        "gpu_mig",
        not mig,
        f"on for GPU {', '.join(mig)}" if mig else "off",
        "SGLang takes whole cards: nvidia-smi -i N -mig 0.",
    )
    sleepy = [row["index"] for row in rows if row.get("persistence_mode") == "Disabled"]
    yield check.judged(
        "gpu_persistence",
        not sleepy,
        f"off for GPU {', '.join(sleepy)}" if sleepy else "on",
        "Each start initialises the cards anew: playbooks/provision.yml switches it on, or nvidia-smi -pm 1.",
        otherwise=check.WARN,
    )
    yield _link(gpus, rows)


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
    slow = []
    for row in rows:
        width, most = nvidia_smi.number(row, "pcie.link.width.current"), nvidia_smi.number(row, "pcie.link.width.max")
        generation = nvidia_smi.number(row, "pcie.link.gen.max")
        narrow = width is not None and width < (gpus.pcie_width or most or 0)
        old = generation is not None and generation < (gpus.pcie_generation or 0)
        if narrow or old:
            slow.append(f"GPU {row['index']}: generation {generation} x{width}")
    every = f"generation {_all(rows, 'pcie.link.gen.max')} x{_all(rows, 'pcie.link.width.current')}"
    return check.judged(
        "pcie_link",
        not slow,
        "; ".join(slow) or every,
        "Expected is "
        + (f"generation {gpus.pcie_generation} x{gpus.pcie_width}" if gpus.pcie_width else "the card's full width")
        + ": look at the slot, the riser and the BIOS's bifurcation.",
        otherwise=check.FAIL if gpus.pcie_width else check.WARN,
    )


def _connections(nvidia: Facts, gpus: Gpus) -> Iterator[Check]:
    try:
        topology = nvidia_smi.topology(nvidia["topology"] or "")
    except ValueError as error:
        yield check.unknown("topology", error, "See what `nvidia-smi topo -m` says on the host.")
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
            not far or gpus.interconnect == "pcie",
            shown,
            "Some pairs talk across sockets; set preflight_gpus.interconnect to pcie once NCCL_P2P_LEVEL is chosen.",
            otherwise=check.WARN,
        )
    without = [str(gpu) for gpu, node in topology.numa.items() if node is None]
    nodes = ", ".join(
        f"node {node}: GPU {' '.join(str(g) for g, n in topology.numa.items() if n == node)}"
        for node in dict.fromkeys(topology.numa.values())
        if node is not None
    )
    yield check.judged(
        "gpu_numa",
        not without,
        nodes if not without else f"the host tells no node of GPU {', '.join(without)}",
        "Let the BIOS tell where the cards are (NPS, ACPI SRAT), else processes cannot be placed beside them.",
        otherwise=check.WARN,
    )


def _platform(facts: Facts, gpus: Gpus) -> Iterator[Check]:
    """Peer-to-peer over PCIe is what suffers from an IOMMU, from ACS and from HMM; with NVLink it is no failure."""
    nvidia, severity = facts["nvidia"], check.WARN if gpus.interconnect == "nvlink" else check.FAIL
    cards = nvidia["pci_gpus"]
    if not cards:
        why = "no NVIDIA GPU is on the PCI bus"
        yield check.unknown("iommu", why, "See gpu_count.")
        yield check.unknown("acs", why, "See gpu_count.")
    else:
        translated = [card["bus_id"] for card in cards if card["iommu"] and card["iommu"].startswith("DMA")]
        kinds = ", ".join(sorted({card["iommu"] or "off" for card in cards}))
        yield check.judged(
            "iommu",
            not translated,
            kinds,
            "Switch it off in the BIOS or boot with iommu=pt: NCCL hangs or crawls where it translates peer-to-peer "
            "traffic.",
            otherwise=severity,
        )
        bridges = {bridge for card in cards for bridge in card["acs_redirects"] or []}
        if any(card["acs_redirects"] is None for card in cards):
            yield check.unknown("acs", "only root may read the bridges' settings", "Run as a user who may use sudo.")
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
    state = nvidia["units"].get("nvidia-fabricmanager.service", "unknown")
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
    if version is None:
        return Check(name, check.WARN, "no nvcc on the host", todo)
    return check.judged(
        name, version.partition(".")[0] == expected.cuda.partition(".")[0], version, todo, otherwise=check.WARN
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
