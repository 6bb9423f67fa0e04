"""What the inventory expects of a host: the variables of docs/variables.md that the checks compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parents[2] / "roles"
ROUTER_UNIT = "sglang-router.service"

VARIABLES = (
    "preflight_architectures",
    "preflight_memory_mb",
    "preflight_cuda",
    "preflight_gpus",
    "preflight_accepted",
    "release_root",
    "release_disk_mb",
    "release_python",
    "cuda_toolkit_version",
    "service_name",
    "service_port",
    "router_port",
    "router_metrics_port",
    "service_server_arguments",
    "service_environment",
    "service_numa_policy",
    "service_numa_mask",
    "model_sources",
)


@dataclass(frozen=True)
class Gpus:
    """`preflight_gpus`: None where nothing in particular is expected. Memory in MiB."""

    count: int
    name: str | None = None
    compute_capability: str | None = None
    memory_mb: int | None = None
    ecc: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    interconnect: str | None = None


@dataclass(frozen=True)
class Expected:
    """The values of VARIABLES, for the server or the router of a host.

    ``gpus`` is None where the service runs without one: a server with ``device: cpu``, each router. ``ports`` maps a
    variable to the port that it names, which ``unit`` may hold. ``p2p_level`` is NCCL's in the server's environment,
    None where it is NCCL's own choice; ``numa_mask`` the nodes whose memory the unit may use, empty for all.
    """

    architectures: Sequence[str]
    memory_mb: int
    cuda: str
    gpus: Gpus | None
    accepted: Sequence[str]
    release_root: str
    release_disk_mb: int
    python: str
    cuda_toolkit: str
    unit: str
    ports: Mapping[str, int]
    router: bool
    arguments: Mapping[str, Any]
    p2p_level: str | None
    numa_mask: str
    model_sources: Mapping[str, str]

    def models(self) -> list[str]:
        """The folders that the server would load: the target, and the draft where there is one."""
        names = ("model-path", "speculative-draft-model-path")
        return [str(self.arguments[name]) for name in names if self.arguments.get(name)]


def defaults() -> dict[str, Any]:
    """The defaults of VARIABLES, from the roles."""
    found: dict[str, Any] = {}
    for role in ("preflight", "release", "service", "model", "router", "cuda"):
        found |= yaml.safe_load((ROLES / role / "defaults/main.yml").read_text(encoding="utf-8")) or {}
    return {name: found[name] for name in VARIABLES if name in found}


def from_variables(given: Mapping[str, Any], router: bool = False) -> Expected:
    """Take the variables of a host, as a play or the inventory has them; one that is None or missing has its default.

    Numbers may be texts, as ``-e`` gives them. Of a router's host no GPUs and no models are expected, though the group
    that it shares with the servers may name them.
    """
    values = defaults() | {name: given[name] for name in VARIABLES if given.get(name) is not None}
    arguments = {} if router else values["service_server_arguments"]
    ports = ("router_port", "router_metrics_port") if router else ("service_port",)
    gpus = {name: value for name, value in values["preflight_gpus"].items() if value is not None}
    gpus.setdefault("count", arguments.get("tp-size", 1))
    for name in ("count", "memory_mb", "pcie_generation", "pcie_width"):
        if name in gpus:
            gpus[name] = int(gpus[name])
    return Expected(
        architectures=values["preflight_architectures"],
        memory_mb=int(values["preflight_memory_mb"]),
        cuda=str(values["preflight_cuda"]),
        gpus=None if router or arguments.get("device") == "cpu" else Gpus(**gpus),
        accepted=values["preflight_accepted"],
        release_root=str(values["release_root"]),
        release_disk_mb=int(values["release_disk_mb"]),
        python=str(values["release_python"]),
        cuda_toolkit=str(values["cuda_toolkit_version"]),
        unit=ROUTER_UNIT if router else f"{values['service_name']}.service",
        ports={name: int(values[name]) for name in ports},
        router=router,
        arguments=arguments,
        p2p_level=values["service_environment"].get("NCCL_P2P_LEVEL"),
        numa_mask=str(values["service_numa_mask"]) if values["service_numa_policy"] else "",
        model_sources={str(source["dest"]): str(source["src"]) for source in values["model_sources"]},
    )


def request(expected: Expected, deployment_path: str | None = None) -> dict[str, Any]:
    """What the collector is asked to read on the host."""
    return {
        "release_root": expected.release_root,
        "ports": list(expected.ports.values()),
        "models": expected.models(),
        "python": expected.python if expected.python.startswith("/") and not expected.router else None,
        "deployment_path": deployment_path,
    }
