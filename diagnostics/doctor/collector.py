"""Reads, on the host itself, the facts from which ``checks`` tells whether it is fit to serve. Judges nothing.

The text of this file is sent to the host's own Python (3.10 or later, standard library only) on standard input, the
request as its argument; it prints one JSON document, `specgate.host_facts/1`. It changes nothing. Run as root it sees
everything; what cannot be read is None, and why is under `problems`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
from typing import Any

SCHEMA = "specgate.host_facts/1"

GPU_FIELDS = (
    "index,name,compute_cap,memory.total,driver_version,pci.bus_id,ecc.mode.current,"
    "ecc.errors.uncorrected.volatile.total,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,"
    "persistence_mode,mig.mode.current"
)
NVIDIA = "0x10de"
ARGUMENTS = (
    "model-path",
    "tokenizer-path",
    "skip-tokenizer-init",
    "trust-remote-code",
    "tp-size",
    "device",
    "mem-fraction-static",
    "numa-node",
    "speculative-algorithm",
    "speculative-draft-model-path",
)
CONFIG_KEYS = (
    "architectures",
    "model_type",
    "auto_map",
    "hidden_size",
    "target_hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "num_attention_heads",
    "num_aux_hidden_states",
    "eagle_config",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tokenizer_config.json")
TENSORS = re.compile(r"(?:.*\.)?(?:fc\.weight|d2t|lm_head\.weight|embed_tokens\.weight)")
HEADER_BYTES = 16 << 20  # of a safetensors file; the largest known ones are below 1 MiB
COMMAND_TIMEOUT_S = 60  # nvidia-smi wakes eight GPUs one by one where nothing keeps them awake

problems: list[dict[str, str]] = []


def text_of(path: str) -> str | None:
    """The stripped content of a small file of the system; None, with a problem unless it is absent, if unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip("\0\n ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problems.append({"what": path, "why": error.strerror or str(error)})
        return None


def output_of(*command: str, fails: bool = False) -> str | None:
    """What a program prints; None where it is not installed, or (with a problem, unless it may) failed or hung."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problems.append({"what": " ".join(command), "why": str(error)[:500]})
        return None
    if done.returncode and not fails:
        said = (done.stdout.strip() or done.stderr.strip())[-500:]
        problems.append({"what": " ".join(command), "why": f"status {done.returncode}: {said}"})
        return None
    return done.stdout


def names_in(folder: str) -> list[str]:
    """The sorted names in a folder; none where it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """Read the facts.

    `request`: `release_root` and `ports`; `models`, the folders of target and draft; `python`, the path of the
    interpreter of releases, None where it is not one of the host's; and, to look at what is deployed rather than at
    what will be, `deployment_path`.
    """
    arguments = deployed_arguments(request.get("deployment_path"))
    folders = [*request["models"], *(arguments or {}).values()]
    models = {path: read_model(path) for path in dict.fromkeys(map(str, folders)) if path.startswith("/")}
    container = (output_of("systemd-detect-virt", "--container", fails=True) or "").strip()
    return {
        "schema": SCHEMA,
        "collected_at": time.time(),
        "hostname": platform.node(),
        "root": os.geteuid() == 0,
        "init": text_of("/proc/1/comm"),
        "os": platform.freedesktop_os_release(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "container": container if container != "none" else "",
        "memory": memory(),
        "transparent_huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "disk": disk(request["release_root"]),
        "listeners": {str(port): listeners(port) for port in request["ports"]},
        "clock": (output_of("timedatectl", "show", "--property=NTPSynchronized", "--value") or "").strip(),
        "reboot_required": text_of("/run/reboot-required.pkgs") or os.path.exists("/run/reboot-required"),
        "python": interpreter(request["python"]) if request["python"] else None,
        "c++": shutil.which("g++"),
        "nvidia": nvidia(),
        "deployed_arguments": arguments,
        "models": models,
        "problems": problems,
    }


def deployed_arguments(path: str | None) -> dict[str, Any] | None:
    """The arguments of the active deployment that matter here; None where there is none, or it was not asked for."""
    text = text_of(path) if path else None
    if text is None:
        return None
    try:
        given = json.loads(text)["server_arguments"]
        return {name: given[name] for name in ARGUMENTS if name in given}
    except (ValueError, KeyError, TypeError) as error:
        problems.append({"what": str(path), "why": f"{type(error).__name__}: {error}"})
        return None


def memory() -> dict[str, int]:
    """Sizes of /proc/meminfo that matter: memory in KiB, huge pages as a number of pages."""
    found = dict(re.findall(r"^(\w+):\s+(\d+)", text_of("/proc/meminfo") or "", re.MULTILINE))
    return {name: int(found[name]) for name in ("MemTotal", "MemAvailable", "HugePages_Total") if name in found}


def disk(path: str) -> dict[str, Any]:
    """Free bytes of the file system on which `path` is, or will be created."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return {"path": path, "free": shutil.disk_usage(path).free}


def interpreter(path: str) -> dict[str, Any] | None:
    """Version of an interpreter, where its Python.h belongs, and whether it is there; None where it does not run."""
    # Of all schemes the one that Triton asks.
    program = (
        "import json, os, platform, sysconfig\n"
        "header = os.path.join(sysconfig.get_paths('posix_prefix')['include'], 'Python.h')\n"
        "found = {'version': platform.python_version(), 'header': header, 'has_header': os.path.exists(header)}\n"
        "print(json.dumps(found))"
    )
    try:
        found: dict[str, Any] = json.loads(output_of(path, "-I", "-c", program) or "")
    except ValueError:
        return None
    return found


def listeners(port: int) -> list[dict[str, Any]] | None:
    """Who listens on a TCP port: process id, program and systemd unit, None each where the process is not visible."""
    lines = output_of("ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes", f"sport = :{port}")
    if lines is None:
        return None
    found = []
    for line in lines.splitlines():
        pids = sorted({int(pid) for pid in re.findall(r"pid=(\d+)", line)})
        found += [{"pid": pid, "program": text_of(f"/proc/{pid}/comm"), "unit": unit_of(pid)} for pid in pids]
        found += [] if pids else [{"pid": None, "program": None, "unit": None}]
    return found


def unit_of(pid: int) -> str | None:
    """The systemd unit of a process, by its control group."""
    units = re.findall(r"/([^/\n]+\.(?:service|scope))(?=/|$)", text_of(f"/proc/{pid}/cgroup") or "", re.MULTILINE)
    return units[-1] if units else None


def nvidia() -> dict[str, Any]:
    """What the PCI bus, the driver and NVIDIA's programs say; their output as it is, to be parsed elsewhere."""
    gpus, switches = [], []
    for device in names_in("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{device}"
        if text_of(f"{folder}/vendor") != NVIDIA:
            continue
        kind = text_of(f"{folder}/class") or ""
        if kind.startswith("0x03"):
            group = os.path.realpath(f"{folder}/iommu_group")
            gpus.append(
                {
                    "bus_id": device,
                    # Without a group there is no IOMMU; None is one whose type is not told.
                    "iommu": (text_of(f"{group}/type") or None) if os.path.isdir(group) else "off",
                    "acs_redirects": {bridge: redirects(bridge) for bridge in bridges_above(folder)},
                }
            )
        elif kind.startswith("0x0680"):
            switches.append(device)
    return {
        "pci_gpus": gpus,
        "pci_switches": switches,
        "driver": text_of("/proc/driver/nvidia/version"),
        "gpus": output_of("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv"),
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "peers": output_of("nvidia-smi", "topo", "-p2p", "r"),
        "nvidia_smi": shutil.which("nvidia-smi"),
        "uvm_disable_hmm": text_of("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"),
        "fabric_manager": (
            output_of("systemctl", "is-active", "nvidia-fabricmanager.service", fails=True) or ""
        ).strip(),
        "nvcc": output_of(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"),
    }


def bridges_above(folder: str) -> list[str]:
    """PCI addresses of the bridges between a device and the CPU, the nearest to the CPU first."""
    return re.findall(r"/([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?=/)", os.path.realpath(folder))


def redirects(bridge: str) -> bool | None:
    """Whether a bridge sends peer-to-peer requests up to the CPU: ACS, P2P request or completion redirect.

    Walks PCIe's extended capabilities (PCI Express Base Specification, 7.6.3 and 7.7.8). None where they cannot be
    read: without root the kernel shows 64 bytes, and 256 where the machine gives no access to them.
    """
    try:
        with open(f"/sys/bus/pci/devices/{bridge}/config", "rb") as file:
            config = file.read(4096)
    except OSError as error:
        problems.append({"what": f"configuration space of {bridge}", "why": error.strerror or str(error)})
        return None
    offset = 0x100
    for _ in range(1024):  # none repeats; each has 4 bytes at least
        if offset < 0x100 or offset + 8 > len(config):
            return None
        header, _, control = struct.unpack_from("<IHH", config, offset)
        if header & 0xFFFF == 0x000D:
            return bool(control & 0b1100)
        offset = header >> 20
        if header == 0xFFFFFFFF:  # it does not answer
            return None
        if offset == 0:
            return False
    return None


def read_model(path: str) -> dict[str, Any] | None:
    """What a model's folder says about itself; None where there is no such folder.

    The tensors' shapes are those in the files, by the last part of their names, where they tell a draft's kind.
    """
    if not os.path.isdir(path):
        return None
    found: dict[str, Any] = {"error": None, "config": {}, "text_config": {}}
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        found["config"] = {key: config[key] for key in CONFIG_KEYS if key in config}
        # Models of several modes keep the language model's sizes apart.
        text = config.get("text_config") or config
        found["text_config"] = {key: text[key] for key in CONFIG_KEYS if key in text}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        found["error"] = f"config.json: {getattr(error, 'strerror', None) or error}"
    weights = sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    found["weight_bytes"] = sum(map(os.path.getsize, weights))
    found["weight_files"] = len(weights) or len(glob.glob(os.path.join(glob.escape(path), "*.bin")))
    found["missing_weights"] = missing_weights(path, {os.path.basename(name) for name in weights})
    found["tensors"] = {}
    for name in weights[:4]:
        found["tensors"].update(tensor_shapes(name))
    found["tokenizer"] = [name for name in TOKENIZER_FILES if os.path.exists(os.path.join(path, name))]
    found["tokenizer_sha256"] = {name: sha256_of(os.path.join(path, name)) for name in found["tokenizer"]}
    return found


def missing_weights(path: str, present: set[str]) -> list[str]:
    """Files that the index of the weights names and that are not there."""
    text = text_of(os.path.join(path, "model.safetensors.index.json"))
    try:
        return sorted(set(json.loads(text)["weight_map"].values()) - present) if text else []
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["model.safetensors.index.json cannot be read"]


def tensor_shapes(path: str) -> dict[str, list[int]]:
    """The shapes of the tensors that tell a draft's kind, from the header of a safetensors file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, HEADER_BYTES)))
        return {
            ".".join(name.split(".")[-2:]): entry["shape"] for name, entry in header.items() if TENSORS.fullmatch(name)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        problems.append({"what": path, "why": str(error)[:500]})
        return {}


def sha256_of(path: str) -> str | None:
    """Hexadecimal SHA-256 of a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


if __name__ == "__main__":
    print(json.dumps(collect(json.loads(sys.argv[1]))))
