"""What the role cuda would install on each distribution, by its variables alone: no host, nothing installed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]

FACTS = {
    "ubuntu2204": {"distribution": "Ubuntu", "distribution_version": "22.04", "distribution_major_version": "22"},
    "ubuntu2404": {"distribution": "Ubuntu", "distribution_version": "24.04", "distribution_major_version": "24"},
    "debian12": {"distribution": "Debian", "distribution_version": "12.11", "distribution_major_version": "12"},
    "fedora": {"distribution": "Fedora", "distribution_version": "42", "distribution_major_version": "42"},
}
DRIVER, HEADERS, TOOLKIT = "580.126.20", "linux-headers-6.8.0-90-generic", "cuda-toolkit-13-0=13.0.2*"
OPEN = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build"
PROPRIETARY = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Thu Apr 24 2025"
EXPRESSION = "{{ [_cuda_distribution in _cuda_distributions, _cuda_wanted, _cuda_is_ours, _cuda_reboot_reasons] }}"


def evaluate(tmp_path: Path, hosts: dict[str, dict]) -> dict[str, list]:
    """The role's variables for hosts with these facts and findings."""
    defaults = yaml.safe_load((ROOT / "roles/cuda/defaults/main.yml").read_text())
    found = {"_cuda_packages": {"stdout_lines": []}, "_cuda_switches": {"stdout": ""}, "_cuda_module": {}}
    for name, given in hosts.items():
        facts = FACTS[given.pop("on")] | {"architecture": "x86_64", "kernel": "6.8.0-90-generic"}
        hosts[name] = defaults | found | {"_cuda_hmm": {}, "facts": facts} | given
    inventory, playbook = tmp_path / "hosts.json", tmp_path / "play.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}))
    write = {"content": EXPRESSION, "dest": str(tmp_path / "{{ inventory_hostname }}")}
    variables = {"ansible_python_interpreter": sys.executable, "ansible_facts": "{{ facts }}"}
    tasks = [{"include_vars": str(ROOT / "roles/cuda/vars/main.yml")}, {"copy": write}]
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]))
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return {name: json.loads((tmp_path / name).read_text()) for name in hosts}


def module(text: str) -> dict[str, str]:
    """As slurp returns /proc/driver/nvidia/version."""
    return {"content": base64.b64encode(text.encode()).decode()}


def test_what_is_installed_where(tmp_path: Path) -> None:
    pins = {"cuda_driver_version": DRIVER, "cuda_toolkit_version": "13.0.2"}
    ours = {"_cuda_packages": {"stdout_lines": [f"nvidia-open {DRIVER}-1 installed hold"]}}
    found = evaluate(
        tmp_path,
        {
            "jammy": {"on": "ubuntu2204", **pins},
            "noble": {"on": "ubuntu2404", **pins, "cuda_fabric_manager": True},
            "bookworm": {"on": "debian12", **pins, "_cuda_switches": {"stdout": "pci:v000010DE"}},
            "fedora": {"on": "fedora", **pins},
            "proprietary": {"on": "ubuntu2404", **pins, "_cuda_module": module(PROPRIETARY)},
            "satisfied": {"on": "ubuntu2404", **pins, "_cuda_module": module(OPEN)},
            "no pins": {"on": "ubuntu2404"},
            "not rebooted": {"on": "ubuntu2404", "cuda_driver_version": DRIVER, **ours},
            "without hmm": {
                "on": "ubuntu2404", "cuda_driver_version": DRIVER, **ours, "cuda_disable_hmm": True,
                "_cuda_module": module(OPEN), "_cuda_hmm": module("N\n"),
            },
            "switches told later": {
                "on": "ubuntu2404", "cuda_driver_version": DRIVER, **ours, "cuda_fabric_manager": True,
                "_cuda_module": module(OPEN),
            },
        },
    )  # fmt: skip
    ubuntu = f"nvidia-open={DRIVER}*"
    manager = f"nvidia-fabricmanager={DRIVER}*"
    debian = [f"{name}={DRIVER}*" for name in ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")]
    assert {name: wanted for name, (_, wanted, _, _) in found.items() if name != "fedora"} == {
        "jammy": [ubuntu, HEADERS, TOOLKIT],
        "noble": [ubuntu, HEADERS, manager, "nvlsm", TOOLKIT],
        "bookworm": [*debian, HEADERS, manager, TOOLKIT],
        "proprietary": [ubuntu, HEADERS, TOOLKIT],
        "satisfied": [TOOLKIT],
        "no pins": [],
        "not rebooted": [ubuntu, HEADERS],
        "without hmm": [],
        "switches told later": [manager, "nvlsm"],
    }
    assert [name for name, (known, *_) in found.items() if not known] == ["fedora"]
    assert [name for name, (_, _, ours, _) in found.items() if ours] == [
        "not rebooted",
        "without hmm",
        "switches told later",
    ]
    assert found["not rebooted"][3] == [f"the loaded driver is none, installed is {DRIVER}"]
    assert found["without hmm"][3] == ["nvidia_uvm was loaded without uvm_disable_hmm=1"]
