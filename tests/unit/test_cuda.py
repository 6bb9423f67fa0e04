"""What the role cuda would install on each distribution, by its variables alone: no host, nothing installed."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def play(
    tmp_path: Path, hosts: dict, variables: dict, tasks: list[dict], **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run tasks on this machine, as if it were each of the hosts."""
    inventory, playbook = tmp_path / "hosts.json", tmp_path / "play.yml"
    inventory.write_text(json.dumps({"sglang_hosts": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}))
    variables |= {"ansible_python_interpreter": sys.executable}
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks} | more]))
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook]
    environment = os.environ | {"ANSIBLE_ROLES_PATH": f"{ROOT}/roles", "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def evaluate(tmp_path: Path, hosts: dict[str, dict]) -> dict[str, list]:
    """The role's variables for hosts with these facts and findings."""
    defaults = yaml.safe_load((ROOT / "roles/cuda/defaults/main.yml").read_text())
    found = {"_cuda_packages": {"stdout_lines": []}, "_cuda_switches": {"stdout": ""}, "_cuda_module": {}}
    for name, given in hosts.items():
        facts = FACTS[given.pop("on")] | {"architecture": "x86_64", "kernel": "6.8.0-90-generic"}
        hosts[name] = defaults | found | {"_cuda_hmm": {}, "facts": facts} | given
    write = {"content": EXPRESSION, "dest": str(tmp_path / "{{ inventory_hostname }}")}
    tasks = [{"include_vars": str(ROOT / "roles/cuda/vars/main.yml")}, {"copy": write}]
    done = play(tmp_path, hosts, {"ansible_facts": "{{ facts }}"}, tasks)
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


SYSTEMCTL = """shift
for unit; do case " $ACTIVE " in *" $unit "*) echo active ;; *) echo inactive ;; esac; done"""
PS = """case $5 in
  71) echo '     71 python3' ;;
  72) echo '     72 nvidia-persiste' ;;
  *) exit 2 ;;
esac"""
REBOOT, DRIVERS, BANDWIDTH = ("cuda", "reboot"), ("cuda", "refuse"), ("bandwidth", "main")


def test_what_needs_idle_gpus_is_refused_while_anything_uses_them(tmp_path: Path) -> None:
    """Another service of the machine too, and a process of nobody's. The programs are stand-ins."""
    for name, text in {"systemctl": SYSTEMCTL, "find": 'printf %s "$OPENED"', "nvidia-smi": "echo 0", "ps": PS}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    process, beside = {"opened": "/proc/71/fd/9\n/proc/71/fd/10\n"}, {"active": "beside.service"}
    cases = {
        "idle": (REBOOT, {}, None),
        "daemon": (REBOOT, {"opened": "/proc/72/fd/5\n"}, None),
        "elsewhere": (REBOOT, {"active": "elsewhere.service"}, None),
        "reboot-1": (REBOOT, {"active": "own.service"}, "own.service"),
        "reboot-2": (REBOOT, beside, "beside.service"),
        "reboot-3": (REBOOT, process, "process 71 python3"),
        "driver-1": (DRIVERS, beside, "beside.service"),
        "driver-2": (DRIVERS, process, "process 71 python3"),
        "measured-1": (BANDWIDTH, beside, "beside.service"),
        "measured-2": (BANDWIDTH, process, "process 71 python3"),
    }
    hosts: dict[str, dict[str, Any]] = {"another": {"service_name": "elsewhere", "ansible_host": "10.0.0.99"}}
    for number, (name, ((role, tasks), use, _)) in enumerate(cases.items()):
        here = {"ansible_host": f"10.0.0.{number}"}
        hosts[name] = here | {"service_name": "own", "role": role, "tasks": tasks, "active": "", "opened": ""} | use
        hosts[f"beside-{name}"] = here | {"service_name": "beside"}
    variables = {
        "cuda_driver_version": DRIVER, "cuda_reboot_allowed": True, "cuda_disable_hmm": True,
        "_cuda_module": module(OPEN), "_cuda_hmm": module("N"), "_cuda_driver_due": "{{ tasks == 'refuse' }}",
        "ansible_facts": FACTS["debian12"], "bandwidth_folder": str(tmp_path),
    }  # fmt: skip
    include = {"include_role": {"name": "{{ role }}", "tasks_from": "{{ tasks }}"}, "when": "role is defined"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ACTIVE": "{{ active }}", "OPENED": "{{ opened }}"}
    done = play(tmp_path, hosts, variables, [include], environment=environment)
    output = " ".join(done.stdout.split())
    refused = dict(re.findall(r"([\w-]+) serves \((.*?)\), and", output))
    assert "must be rebooted: nvidia_uvm was loaded without uvm_disable_hmm=1" in output
    assert refused == {name: serves for name, (*_, serves) in cases.items() if serves}, done.stdout
    rebooted = re.findall(r"fatal: \[(\w+)\]: FAILED! => \S+ \S+ \S+ \S+ msg: Running ansible.builtin.reboot", output)
    assert set(rebooted) == {"idle", "daemon", "elsewhere"}, "the module refuses to reboot this machine"
