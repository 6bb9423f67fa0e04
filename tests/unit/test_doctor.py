"""The checks of a host: what is good passes, each fault is found, and what cannot be told is never a success."""

from __future__ import annotations

import copy
import json
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from diagnostics.connect import HostUnreachable
from diagnostics.doctor import cards, check, checks, collector, doctor, expected, models, nvidia_smi, support

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/nvidia"
GIB = 2**30


def text(name: str) -> str:
    return (DATA / name).read_text()


def model(architecture: str, **config: Any) -> dict[str, Any]:
    """A model's folder, as the collector reads it."""
    config = {"architectures": [architecture], "hidden_size": 7168, "vocab_size": 163840} | config
    return {
        "error": None,
        "config": config,
        "text_config": config,
        "weight_bytes": 8 * GIB,
        "weight_files": 1,
        "missing_weights": [],
        "tensors": {},
        "tokenizer": ["tiktoken.model", "tokenizer_config.json"],
        "tokenizer_sha256": {"tiktoken.model": "a" * 64, "tokenizer_config.json": "b" * 64},
    }


TARGET, DRAFT = "/srv/models/Kimi-K2.5", "/srv/models/kimi-k2.5-eagle3-mla"


@pytest.fixture
def wanted() -> expected.Expected:
    """What an inventory with eight RTX PRO 6000 expects."""
    return expected.from_variables(
        {
            "preflight_cuda": "13.0",
            "preflight_gpus": {
                "count": 8,
                "name": "RTX PRO 6000",
                "compute_capability": "12.0",
                "memory_mb": 97000,
                "ecc": True,
                "pcie_generation": 5,
                "pcie_width": 16,
                "interconnect": "pcie",
            },
            "service_environment": {"NCCL_P2P_LEVEL": "SYS"},
            "service_server_arguments": {
                "model-path": TARGET,
                "trust-remote-code": True,
                "tp-size": 8,
                "mem-fraction-static": 0.85,
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": DRAFT,
            },
        }
    )


@pytest.fixture
def facts() -> dict[str, Any]:
    """A host with eight RTX PRO 6000 that is fit in every respect."""
    return {
        "schema": collector.SCHEMA,
        "root": True,
        "init": "systemd",
        "os": {"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_ID": "24.04", "PRETTY_NAME": "Ubuntu 24.04.3 LTS"},
        "architecture": "x86_64",
        "kernel": "6.8.0-90-generic",
        "container": "",
        "memory": {"MemTotal": 1 << 30, "HugePages_Total": 0},
        "transparent_huge_pages": "always [madvise] never",
        "disk": {"path": "/opt", "free": 500 * GIB},
        "listeners": {"30000": []},
        "clock": "yes",
        "reboot_required": False,
        "python": {"version": "3.12.3", "header": "/usr/include/python3.12/Python.h", "has_header": True},
        "c++": "/usr/bin/g++",
        "nvidia": {
            "pci_gpus": [
                {"bus_id": f"0000:{n}1:00.0", "iommu": "off", "acs_redirects": {f"0000:{n}0:01.1": False}}
                for n in range(8)
            ],
            "pci_switches": [],
            "driver": text("driver-open.txt"),
            "gpus": text("gpus-rtx-pro-6000.csv"),
            "topology": text("topology-8-pcie.txt"),
            "peers": text("p2p-8-pcie.txt"),
            "nvidia_smi": "/usr/bin/nvidia-smi",
            "uvm_disable_hmm": "Y",
            "fabric_manager": "inactive",
            "nvcc": text("nvcc-13.0.txt"),
        },
        "deployed_arguments": None,
        "models": {
            TARGET: model("KimiK25ForConditionalGeneration", num_attention_heads=64),
            DRAFT: model("Eagle3DeepseekV2ForCausalLM", draft_vocab_size=163840),
        },
        "problems": [],
    }


def outcome(facts: dict[str, Any], wanted: expected.Expected) -> dict[str, check.Check]:
    found = checks.judge(facts, wanted)
    assert [each.name for each in found] == list(checks.NAMES)
    return {each.name: each for each in found}


def test_a_fit_host_passes_every_check(facts: dict[str, Any], wanted: expected.Expected) -> None:
    found = outcome(facts, wanted)
    assert {name: each for name, each in found.items() if each.state not in (check.PASS, check.NOT_APPLICABLE)} == {}
    assert {name for name, each in found.items() if each.state == check.NOT_APPLICABLE} == {
        "fabric_manager",
    }
    assert all(each.todo == "" for each in found.values())
    assert found["gpu_numa"].found == "node 0: GPU 0 1 2 3, node 1: GPU 4 5 6 7"


def test_an_nvlink_host_passes_every_check(facts: dict[str, Any]) -> None:
    """The B200 example's expectations, as its inventory has them."""
    given = yaml.safe_load((ROOT / "inventory/blackwell/b200/group_vars/all/main.yml").read_text())
    wanted = expected.from_variables(
        {name: given[name] for name in ("preflight_gpus", "preflight_cuda")}
        | {"service_server_arguments": {"model-path": TARGET, "tp-size": 8, "trust-remote-code": True}}
    )
    facts["nvidia"] |= {
        "driver": text("driver-open.txt").replace("580.126.09", "580.126.20"),
        "gpus": text("gpus-b200.csv"),
        "topology": text("topology-b200.txt"),
        "fabric_manager": "active",
    }
    assert [each for each in outcome(facts, wanted).values() if each.state in (check.FAIL, check.UNKNOWN)] == []


def change(facts: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `facts` with the value at a dotted path replaced; a callable gets the old value."""
    changed = copy.deepcopy(facts)
    *folders, last = path.split("/")
    place = changed
    for name in folders:
        place = place[int(name) if isinstance(place, list) else name]
    place[last] = value(place[last]) if callable(value) else value
    return changed


GPUS = "nvidia/gpus"
FAULTS = [
    ("init", "init", "sysvinit", check.FAIL, "systemd must be the host's first process"),
    ("distribution", "os", {"ID": "fedora"}, check.FAIL, "must be of Debian's family"),
    ("distribution", "os", {"ID": "debian", "VERSION_ID": "13"}, check.WARN, "Ubuntu 22.04, Ubuntu 24.04, Debian 12"),
    ("architecture", "architecture", "aarch64", check.FAIL, "locked for x86_64"),
    ("kernel", "kernel", "5.15.0-91-generic", check.WARN, "released with 6.8"),
    ("reboot", "reboot_required", "linux-base\nlinux-image-6.8.0-91-generic", check.WARN, "linux-image-6.8.0-91"),
    ("memory", "memory", {"MemTotal": 2 << 20}, check.FAIL, "2048 MiB"),
    ("huge_pages", "transparent_huge_pages", "always madvise [never]", check.WARN, "to madvise"),
    ("huge_pages", "memory", {"MemTotal": 1 << 30, "HugePages_Total": 512}, check.WARN, "reserved: 512"),
    ("huge_pages", "transparent_huge_pages", None, check.UNKNOWN, "not known"),
    ("disk", "disk", {"path": "/opt", "free": GIB}, check.WARN, "1024 MiB are free at /opt"),
    ("clock", "clock", "no", check.WARN, "synchronised: no"),
    ("clock", "clock", "", check.UNKNOWN, "timedatectl did not tell"),
    ("port", "listeners/30000", [{"pid": 7, "program": "nginx", "unit": "nginx.service"}], check.FAIL,
     "port 30000 is in use by nginx.service 7 nginx"),
    ("port", "listeners/30000", [{"pid": None, "program": None, "unit": None}], check.FAIL, "not visible"),
    ("port", "listeners/30000", None, check.UNKNOWN, "`ss` did not tell"),
    ("driver", "nvidia/driver", None, check.FAIL, "no NVIDIA driver is loaded"),
    ("driver", "nvidia/driver", text("driver-proprietary.txt"), check.FAIL, "needs 580.65.06 or newer"),
    ("driver", "nvidia/driver", "garbage", check.UNKNOWN, "garbage"),
    ("open_modules", "nvidia/driver", text("driver-proprietary.txt"), check.FAIL, "proprietary"),
    ("driver_loaded", GPUS, lambda old: old.replace("580.126.09", "580.159.03"), check.FAIL, "libraries 580.159.03"),
    ("gpu_count", GPUS, lambda old: "\n".join(old.splitlines()[:-1]), check.FAIL, "7 of 8; 8 are on the PCI bus"),
    ("gpu_count", GPUS, "Unable to determine the device handle for GPU0", check.FAIL, "Unable to determine"),
    ("gpu_count", GPUS, None, check.FAIL, "nvidia-smi failed"),
    ("gpu_name", GPUS, None, check.UNKNOWN, "nvidia-smi failed"),
    ("gpu_name", GPUS, lambda old: old.replace("RTX PRO 6000", "L40S", 1), check.FAIL, "L40S Blackwell Server Edition"),
    ("gpu_capability", GPUS, lambda old: old.replace(" 12.0,", " 10.0,"), check.FAIL, "Expected is 12.0"),
    ("gpu_memory", GPUS, lambda old: old.replace("97887", "48000", 1), check.FAIL, "48000 MiB at least"),
    ("gpu_ecc", GPUS, lambda old: old.replace("Enabled, 0, 5", "Disabled, [N/A], 5"), check.WARN, "nvidia-smi -e 1"),
    ("gpu_ecc", GPUS, lambda old: old.replace("Enabled, 0, 5", "Enabled, 3, 5", 1), check.FAIL, "3 on GPU 0"),
    ("gpu_mig", GPUS, lambda old: old.replace("Enabled, Disabled", "Enabled, Enabled", 1), check.FAIL, "on for GPU 0"),
    ("gpu_persistence", GPUS, lambda old: old.replace("16, Enabled", "16, Disabled"), check.WARN, "nvidia-smi -pm 1"),
    ("pcie_link", GPUS, lambda old: old.replace("5, 16, 16", "5, 8, 16", 1), check.FAIL, "GPU 0: generation 5 x8"),
    ("pcie_link", GPUS, lambda old: old.replace(" 5, 16, 16", " 4, 16, 16", 1), check.FAIL, "generation 4 x16"),
    ("pcie_link", GPUS, lambda old: old.replace(" 5, 16, 16", " 5, [N/A], 16", 1), check.UNKNOWN, "(GPU 0)"),
    ("pcie_link", GPUS, lambda old: old.replace(" 5, 16, 16", " [N/A], 16, 16", 1), check.UNKNOWN, "(GPU 0)"),
    ("gpu_memory", GPUS, lambda old: old.replace("97887 MiB", "[N/A]", 1), check.UNKNOWN, "[N/A] (GPU 0)"),
    ("gpu_ecc", GPUS, lambda old: old.replace("Enabled, 0, 5", "Enabled, [N/A], 5", 1), check.UNKNOWN, "[N/A] (GPU 0)"),
    ("gpu_mig", GPUS, lambda old: old.replace("Enabled, Disabled", "Enabled, [Unknown Error]", 1), check.UNKNOWN,
     "[Unknown Error] (GPU 0)"),
    ("gpu_persistence", GPUS, lambda old: old.replace("16, Enabled", "16, [N/A]"), check.UNKNOWN, "[N/A]"),
    ("driver_loaded", GPUS, None, check.UNKNOWN, "tells no libraries"),
    ("peer_to_peer", "nvidia/peers", lambda old: old.replace("OK", "GNS"), check.WARN, "GNS x 56 of 56 ways"),
    ("peer_to_peer", "nvidia/peers", lambda old: old.replace("\tOK", "\tCNS", 1), check.WARN, "GPU 0 to 1"),
    ("peer_to_peer", "nvidia/peers", None, check.UNKNOWN, "said: nothing"),
    ("peer_to_peer", "nvidia/peers", "Failed to initialize NVML", check.UNKNOWN, "Failed to initialize NVML"),
    ("peer_to_peer", "nvidia/peers", lambda old: old.replace(" GPU7\t", " GPU6\t"), check.UNKNOWN, "said: GPU0"),
    ("gpu_numa", "deployed_arguments", {"model-path": TARGET, "numa-node": [0, 1] * 4}, check.WARN,
     "numa-node: [0, 0, 0, 0, 1, 1, 1, 1]"),
    ("topology", "nvidia/topology", "Failed to initialize NVML", check.UNKNOWN, "Failed to initialize NVML"),
    ("gpu_numa", "nvidia/topology", lambda old: old.replace("0-35,72-107\t0\t", "0-35,72-107\tN/A\t"), check.WARN,
     "no node of GPU 0, 1, 2, 3"),
    ("iommu", "nvidia/pci_gpus", [{"bus_id": "0000:01:00.0", "iommu": "DMA-FQ", "acs_redirects": {}}], check.FAIL,
     "iommu=pt"),
    ("iommu", "nvidia/pci_gpus/0/iommu", None, check.UNKNOWN, "a group without a type"),
    ("iommu", "nvidia/pci_gpus/0/iommu", "blocked", check.UNKNOWN, "blocked, off"),
    ("acs", "nvidia/pci_gpus/0/acs_redirects", {"0000:00:01.1": True, "0000:01:00.0": None}, check.FAIL,
     "1 bridges redirect: 0000:00:01.1"),
    ("acs", "nvidia/pci_gpus/0/acs_redirects", {"0000:00:01.1": None}, check.UNKNOWN, "of 0000:00:01.1 cannot be read"),
    ("hmm", "nvidia/uvm_disable_hmm", "N", check.WARN, "uvm_disable_hmm=1"),
    ("fabric_manager", "nvidia/pci_switches", ["0000:c5:00.0"], check.FAIL, "exactly the driver's version"),
    ("compilers", "python", None, check.UNKNOWN, "tells of no headers"),
    ("python", "python/version", "3.10.12", check.FAIL, "set release_python to a version such as 3.12.16"),
    ("python", "python", None, check.FAIL, "nothing that runs at /usr/bin/python3"),
    ("compilers", "c++", None, check.WARN, "without g++"),
    ("compilers", "python/has_header", False, check.WARN, "without python3.12-dev"),
    ("compilers", "python", {"version": "3.12.3", "header": "/opt/include/Python.h", "has_header": False}, check.FAIL,
     "no package of the distribution has it"),
    ("cuda_toolkit", "nvidia/nvcc", None, check.FAIL, "Set cuda_toolkit_version"),
    ("cuda_toolkit", "nvidia/nvcc", text("nvcc-13.0.txt").replace("13.0", "12.9"), check.WARN, "12.9"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}: {fault[-1]}")
def test_each_fault_of_a_host_is_found(
    facts: dict[str, Any], wanted: expected.Expected, fault: tuple[str, str, Any, str, str]
) -> None:
    name, path, value, state, says = fault
    found = outcome(change(facts, path, value), wanted)[name]
    assert found.state == state
    assert says in f"{found.found} {found.todo}"
    assert found.todo


MODEL_FAULTS = [
    ("draft_tokenizer", DRAFT, {"tokenizer_sha256": {"tiktoken.model": "c" * 64}}, check.WARN, "tiktoken.model cccc"),
    ("draft_tokenizer", DRAFT, {"tokenizer_sha256": {"tiktoken.model": None}}, check.UNKNOWN, "cannot be read"),
    ("draft_tokenizer", DRAFT, {"tokenizer": ["tokenizer.json"]}, check.UNKNOWN, "the draft has tokenizer.json"),
    ("draft_tokenizer", DRAFT, {"tokenizer": ["tokenizer_config.json"]}, check.NOT_APPLICABLE, "it uses the target's"),
    ("target_path", TARGET, None, check.FAIL, f"there is no folder {TARGET}"),
    ("target_path", TARGET, {"error": "config.json: No such file or directory"}, check.FAIL, "no model's folder"),
    ("target_path", TARGET, {"missing_weights": ["a", "b", "c", "d"]}, check.FAIL, "lacks a, b, c and 1 more"),
    ("target_path", TARGET, {"weight_files": 0}, check.FAIL, "no file with weights"),
    ("target_architecture", TARGET, {"config": {}}, check.FAIL, "names no architecture"),
    ("target_architecture", TARGET, {"config": {"architectures": ["LlamaForCausalLMEagle3"]}}, check.FAIL, "draft"),
    ("tokenizer", TARGET, {"tokenizer": ["tokenizer_config.json"]}, check.FAIL, "has none"),
    ("tensor_parallel", TARGET, {"text_config": {"num_attention_heads": 12}}, check.FAIL, "12 attention heads"),
    ("weights_fit", TARGET, {"weight_bytes": 800 * GIB}, check.FAIL, "of weights a GPU"),
    ("draft_path", DRAFT, None, check.FAIL, f"there is no folder {DRAFT}"),
    ("draft_algorithm", DRAFT, {"config": {"architectures": ["LlamaForCausalLMEagle"]}}, check.FAIL, "is for EAGLE;"),
    ("draft_algorithm", DRAFT, {"config": {"architectures": ["Mystery"]}}, check.UNKNOWN, "no known kind"),
    ("draft_width", DRAFT, {"text_config": {"hidden_size": 4096}}, check.FAIL, "another target"),
    ("draft_width", DRAFT, {"tensors": {"fc.weight": [7168, 2 * 7168]}}, check.FAIL, "takes 14336 values, 21504"),
    ("draft_vocabulary", DRAFT, {"text_config": {"vocab_size": 32000, "hidden_size": 7168}}, check.FAIL, "32000"),
    ("draft_vocabulary", DRAFT, {"text_config": {"vocab_size": 163840, "draft_vocab_size": 32000},
                                 "tensors": {"fc.weight": [7168, 21504]}}, check.FAIL, "no d2t"),
]  # fmt: skip


@pytest.mark.parametrize("fault", MODEL_FAULTS, ids=lambda fault: f"{fault[0]}: {fault[-1]}")
def test_each_fault_of_the_models_is_found(
    facts: dict[str, Any], wanted: expected.Expected, fault: tuple[str, str, Any, str, str]
) -> None:
    name, path, changes, state, says = fault
    facts["models"][path] = None if changes is None else facts["models"][path] | changes
    found = {each.name: each for each in checks.judge(facts, wanted)}[name]
    assert found.state == state
    assert says in f"{found.found} {found.todo}"


def test_an_eagle3_draft_under_the_algorithm_eagle_is_refused(facts: dict[str, Any], wanted: expected.Expected) -> None:
    """SGLang serves with it, silently, and accepts nothing."""
    facts["deployed_arguments"] = {**wanted.arguments, "speculative-algorithm": "EAGLE"}
    found = outcome(facts, wanted)["draft_algorithm"]
    assert (found.state, found.todo.partition(":")[0]) == (check.FAIL, "Set speculative-algorithm to EAGLE3")


def test_a_draft_is_known_by_its_tensors_where_its_name_says_nothing(
    facts: dict[str, Any], wanted: expected.Expected
) -> None:
    facts["models"][DRAFT]["config"] = {"architectures": ["LlamaForCausalLM"]}
    facts["models"][DRAFT]["tensors"] = {"fc.weight": [7168, 3 * 7168], "d2t": [32000]}
    assert outcome(facts, wanted)["draft_algorithm"].state == check.PASS


def test_without_speculation_the_draft_is_not_asked_for(facts: dict[str, Any], wanted: expected.Expected) -> None:
    facts["deployed_arguments"] = {"model-path": TARGET, "trust-remote-code": True, "tp-size": 8}
    states = {outcome(facts, wanted)[name].state for name in models.DRAFT_NAMES}
    assert states == {check.NOT_APPLICABLE}


def test_a_model_that_the_deploy_brings_is_judged_where_it_lies_now(
    facts: dict[str, Any], wanted: expected.Expected
) -> None:
    draft = facts["models"][DRAFT]
    facts["models"] = {TARGET: facts["models"][TARGET], DRAFT: None}
    found = {each.name: each for each in checks.judge(facts, wanted, lambda path: draft if path == DRAFT else None)}
    assert found["draft_path"].state == found["draft_algorithm"].state == check.PASS


@pytest.mark.parametrize(("capability", "state"), [("12.0", check.FAIL), ("9.0", check.PASS), (None, check.UNKNOWN)])
def test_proprietary_modules_whose_cards_do_not_answer(
    facts: dict[str, Any], wanted: expected.Expected, capability: str | None, state: str
) -> None:
    """They do not take a Blackwell card, so that nvidia-smi names none."""
    facts["nvidia"] |= {"driver": text("driver-proprietary.txt"), "gpus": None}
    gpus = {"count": 8, "compute_capability": capability}
    given = {"preflight_gpus": gpus, "service_server_arguments": wanted.arguments}
    assert outcome(facts, expected.from_variables(given))["open_modules"].state == state


@pytest.mark.parametrize(
    ("name", "variables", "says"),
    [
        ("topology", {"service_environment": {}}, "choose NCCL_P2P_LEVEL"),
        ("gpu_numa", {"service_numa_policy": "bind", "service_numa_mask": "0"}, "node 1: add it to service_numa_mask"),
        ("gpu_numa", {"service_numa_policy": "bind", "service_numa_mask": "0-1"}, None),
        ("gpu_numa", {"service_numa_policy": "bind", "service_numa_mask": "all"}, None),
    ],
)
def test_settings_that_do_not_fit_where_the_cards_are(
    facts: dict[str, Any], wanted: expected.Expected, name: str, variables: dict[str, Any], says: str | None
) -> None:
    given = {
        "preflight_gpus": {"count": 8, "interconnect": "pcie"},
        "service_environment": {"NCCL_P2P_LEVEL": "SYS"},
        "service_server_arguments": wanted.arguments,
    } | variables
    found = outcome(facts, expected.from_variables(given))[name]
    assert (found.state, says or "") == (check.WARN if says else check.PASS, says or "")
    assert (says or "") in found.todo


def test_one_gpu_off_the_fabric_is_named(facts: dict[str, Any], wanted: expected.Expected) -> None:
    """Seven of eight are joined by NVLink: the server would start, and NCCL fail."""
    nvlink = expected.from_variables(
        {"preflight_gpus": {"count": 8, "interconnect": "nvlink"}, "service_server_arguments": wanted.arguments}
    )
    facts["nvidia"]["topology"] = text("topology-b200-one-gpu-off-the-fabric.txt")
    found = outcome(facts, nvlink)["topology"]
    assert found.state == check.FAIL
    assert found.found == "NODE x 3, NV18 x 21, SYS x 4; without NVLink: GPU 2"


def test_without_a_gpu_expected_its_checks_do_not_apply(facts: dict[str, Any]) -> None:
    cpu = expected.from_variables({"service_server_arguments": {"model-path": TARGET, "device": "cpu"}})
    facts["nvidia"] |= {"driver": None, "gpus": None, "topology": None, "peers": None, "nvidia_smi": None}
    assert {outcome(facts, cpu)[name].state for name in cards.NAMES} == {check.NOT_APPLICABLE}


def test_without_a_driver_one_line_says_what_a_dozen_checks_would(
    facts: dict[str, Any], wanted: expected.Expected
) -> None:
    facts["nvidia"] |= {"driver": None, "gpus": None, "topology": None, "nvidia_smi": None}
    entry = doctor.entry(facts, wanted)
    assert (entry["ok"], entry["state"]) == (False, check.FAIL)
    assert len(entry["reasons"]) < 8
    assert any("gpu_name, gpu_capability" in reason for reason in entry["reasons"])


def test_what_is_accepted_is_a_warning(facts: dict[str, Any], wanted: expected.Expected) -> None:
    facts["nvidia"]["pci_gpus"][0]["iommu"] = "DMA"
    accepting = expected.from_variables({"preflight_accepted": ["iommu"], "service_server_arguments": wanted.arguments})
    assert outcome(facts, accepting)["iommu"].state == check.WARN
    assert outcome(facts, wanted)["iommu"].state == check.FAIL


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ([check.PASS, check.NOT_APPLICABLE], check.PASS),
        ([check.PASS, check.WARN], check.WARN),
        ([check.WARN, check.UNKNOWN], check.UNKNOWN),
        ([check.UNKNOWN, check.FAIL], check.FAIL),
        ([], check.UNKNOWN),
    ],
)
def test_the_worst_check_decides(states: list[str], worst: str) -> None:
    assert check.overall([check.Check("a", state, "") for state in states]) == worst


@pytest.mark.parametrize(("state", "status"), [("pass", 0), ("warn", 0), ("fail", 1), ("unknown", 3)])
def test_the_exit_status_of_doctor(state: str, status: int) -> None:
    fit = {"host": "a", "ok": True, "state": "pass"}
    assert doctor.exit_status([fit, {"host": "b", "ok": status == 0, "state": state}]) == status
    assert doctor.exit_status([fit, {"host": "gone", "ok": False, "reasons": ["no route"]}]) == 1


def test_doctor_shows_the_outcome_first(
    facts: dict[str, Any], wanted: expected.Expected, capsys: pytest.CaptureFixture[str]
) -> None:
    facts["problems"] = [{"what": "/proc/x", "why": "Permission denied"}]
    unreachable = {"host": "gone", "ok": False, "reasons": ["no route"]}
    doctor.show([{"host": "gpu-1", **doctor.entry(facts, wanted)}, unreachable])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PASS  gpu-1: 40 pass, 1 not applicable")
    assert lines[1] == "UNKNOWN  gone: no route"
    assert "note  gpu-1: /proc/x: Permission denied" in lines


@pytest.mark.parametrize("output", ["", "Welcome!", '{"schema": "other/1"}', "[]"])
def test_an_answer_that_is_no_facts_is_a_host_without_an_answer(output: str) -> None:
    with pytest.raises(HostUnreachable, match="could not be read"):
        doctor.facts_of(output)


def test_variables_have_the_roles_defaults_and_may_be_texts() -> None:
    wanted = expected.from_variables({"service_port": "30001", "preflight_memory_mb": None})
    assert (wanted.ports, wanted.memory_mb, wanted.unit) == ({"service_port": 30001}, 4096, "sglang.service")
    assert set(expected.defaults()) == set(expected.VARIABLES)


@pytest.mark.parametrize(
    ("given", "state"), [("3.12.16", check.PASS), ("3.10.18", check.FAIL), ("python3", check.FAIL)]
)
def test_an_interpreter_that_uv_installs_is_judged_by_its_version(
    facts: dict[str, Any], given: str, state: str
) -> None:
    facts["python"] = None
    wanted = expected.from_variables({"release_python": given})
    assert expected.request(wanted)["python"] is None
    assert next(each for each in checks.judge(facts, wanted) if each.name == "python").state == state


def test_a_toolkit_that_the_deploy_installs_is_no_failure(facts: dict[str, Any], wanted: expected.Expected) -> None:
    facts["nvidia"]["nvcc"] = None
    given = {"preflight_cuda": "13.0", "cuda_toolkit_version": "13.0.2", "service_server_arguments": wanted.arguments}
    assert outcome(facts, expected.from_variables(given))["cuda_toolkit"].state == check.WARN


def test_the_collector_asks_an_interpreter(tmp_path: Path) -> None:
    found = collector.interpreter(sys.executable)
    assert found is not None
    assert found["version"] == platform.python_version()
    assert found["has_header"] == Path(found["header"]).is_file()
    assert collector.interpreter(str(tmp_path / "none")) is None
    assert collector.interpreter("/bin/false") is None


def test_the_card_count_follows_from_the_tensor_parallel_size() -> None:
    wanted = expected.from_variables({"service_server_arguments": {"tp-size": 4}})
    assert wanted.gpus == expected.Gpus(count=4)


def test_the_support_table_of_the_page_is_that_of_the_code() -> None:
    page = (ROOT / "docs/gpu-host.md").read_text()
    for cuda, driver in support.DRIVERS.items():
        assert f"| {cuda}{'.x' if '.' not in cuda else ''} | {support.text(driver)} |" in page
    for capability, (name, cuda) in support.CAPABILITIES.items():
        assert f"| {capability} | {name} | {'.'.join(map(str, cuda))} |" in page
    for key, name in support.DISTRIBUTIONS.items():
        assert f"| {name} | {'.'.join(map(str, support.KERNELS[key]))} |" in page


def test_each_check_is_explained() -> None:
    page = (ROOT / "docs/gpu-host.md").read_text()
    assert [name for name in checks.NAMES if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    "message", ["", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "index, name\n0"]
)
def test_a_message_in_place_of_a_table_is_no_gpu(message: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi said"):
        nvidia_smi.gpus(message)


def test_a_card_without_a_feature_has_no_number() -> None:
    row = nvidia_smi.gpus("index, ecc.errors.uncorrected.volatile.total\n0, [N/A]\n")[0]
    assert nvidia_smi.number(row, "ecc.errors.uncorrected.volatile.total") is None


def test_terminal_colours_do_not_hide_the_topology() -> None:
    found = nvidia_smi.topology(f"\x1b[4m{text('topology-b200.txt')}")
    assert len(found.pairs("NV18")) == 28


@pytest.mark.parametrize(("file", "version", "is_open"), [
    ("driver-open.txt", "580.126.09", True), ("driver-proprietary.txt", "550.163.01", False),
])  # fmt: skip
def test_the_kind_of_the_kernel_modules(file: str, version: str, is_open: bool) -> None:
    assert nvidia_smi.driver(text(file)) == nvidia_smi.Driver(version, is_open)


def test_the_collector_reads_a_model_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"hidden_size": 7168}})
    )
    header = json.dumps({"model.fc.weight": {"dtype": "BF16", "shape": [4, 12], "data_offsets": [0, 96]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(96))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    found = collector.read_model(str(tmp_path))
    assert found is not None
    assert found["text_config"] == {"hidden_size": 7168}
    assert found["tensors"] == {"fc.weight": [4, 12]}
    assert found["missing_weights"] == ["b.safetensors"]
    assert collector.read_model(str(tmp_path / "none")) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 5) + b"[1,2]"])
def test_a_damaged_file_of_weights_is_a_problem_and_no_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert collector.tensor_shapes(str(tmp_path / "a.safetensors")) == {}


def test_redirection_is_found_in_the_configuration_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extended capabilities: AER at 0x100, then ACS at 0x148 with P2P request redirect."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x148 << 20 | 0x0001)
    struct.pack_into("<IHH", config, 0x148, 0x000D, 0x1F, 0b0100)
    path = tmp_path / "config"
    real = open
    monkeypatch.setattr("builtins.open", lambda name, mode="r", **more: real(path, mode, **more))
    path.write_bytes(config)
    assert collector.redirects("0000:00:01.1")
    struct.pack_into("<H", config, 0x148 + 6, 0b0001)
    path.write_bytes(config)
    assert collector.redirects("0000:00:01.1") is False
    struct.pack_into("<I", config, 0x100, 0)
    path.write_bytes(config)
    assert collector.redirects("0000:00:01.1") is False, "it has no extended capability"
    for content in (bytes(64), bytes(256), b"\xff" * 4096):
        path.write_bytes(content)
        assert collector.redirects("0000:00:01.1") is None
    path.unlink()
    assert collector.redirects("0000:00:01.1") is None


def test_bridges_above_a_card(tmp_path: Path) -> None:
    folder = tmp_path / "pci0000:00/0000:00:01.1/0000:01:00.0"
    folder.mkdir(parents=True)
    (tmp_path / "card").symlink_to(folder)
    assert collector.bridges_above(os.fspath(tmp_path / "card")) == ["0000:00:01.1"]
