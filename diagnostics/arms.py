"""The arms of ``fab compare``: the deployment that serves, and what else the same release could do with the host.

Pure functions. An arm is the deployed server's arguments with those of the speculation replaced; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.inventory import UsageError

GATED = "gated"
NAMES = (GATED, "plain", "plain-no-overlap", "tree", "chain")

THRESHOLD = "speculative-disable-batch-threshold"
PROFILE = "speculative-gate-profile"
OVERLAP_OFF = "disable-overlap-schedule"
STEPS, TOP_K, DRAFT_TOKENS = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
# What SGLang takes by itself for a tree of a Llama's.
TREE_TOP_K, TREE_DRAFT_TOKENS = 4, 8


@dataclass(frozen=True)
class Arm:
    """One arm: ``server_arguments`` as ``service_server_arguments`` has them; None for the deployment that serves.

    ``worker`` is SGLang's class that must be proved to run, None for no speculation.
    """

    name: str
    what: str
    server_arguments: Mapping[str, Any] | None
    worker: str | None


def parse_names(given: str) -> list[str]:
    """Return the names of arms in *given*, with commas between; raises UsageError."""
    names = [part.strip() for part in given.split(",")]
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(NAMES):
        raise UsageError(f"--arms is {given!r}; allowed are two or more of {', '.join(NAMES)}, each once")
    return names


def arms(names: Sequence[str], deployment: Mapping[str, Any]) -> list[Arm]:
    """Return the arms *names* of the active *deployment* (``deployment.json``), in that order.

    Raises UsageError for an arm that this deployment cannot have.
    """
    return [_arm(name, deployment) for name in names]


def own_arguments(deployed: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the deployed arguments that come from ``service_server_arguments``; the role adds the others."""
    return {key: value for key, value in deployed.items() if key not in ("host", "port", "config", THRESHOLD, PROFILE)}


def _arm(name: str, deployment: Mapping[str, Any]) -> Arm:
    deployed = deployment["server_arguments"]
    if name == GATED:
        return _gated(deployed)
    common = {key: value for key, value in own_arguments(deployed).items() if key != OVERLAP_OFF}
    plain = {key: value for key, value in common.items() if not key.startswith("speculative-")}
    if name == "plain":
        return Arm(name, "no speculation, overlap schedule", plain, None)
    if name == "plain-no-overlap":
        return Arm(name, "no speculation, no overlap schedule", plain | {OVERLAP_OFF: True}, None)
    if "speculative-algorithm" not in deployed or not isinstance(deployed.get(STEPS), int):
        raise UsageError(
            f"the arm {name!r} is made from the deployed speculation, but the deployment has no speculative-algorithm "
            f"with {STEPS}: name both in service_server_arguments and deploy, or leave the arm out with --arms"
        )
    ungated = {key: value for key, value in common.items() if not key.startswith("speculative-gate-")}
    steps, top_k = deployed[STEPS], deployed.get(TOP_K, 1)
    if name == "chain":
        # Top-k 1 keeps the overlap schedule, and with it SGLang takes the v2 worker.
        chain = {TOP_K: 1, DRAFT_TOKENS: steps + 1}
        return Arm(name, f"v2 chain: {_shape(steps, chain)}, never gated", ungated | chain, "EAGLEWorkerV2")
    tree = {TOP_K: top_k, DRAFT_TOKENS: deployed.get(DRAFT_TOKENS)}
    if top_k == 1:
        tree = {TOP_K: TREE_TOP_K, DRAFT_TOKENS: max(TREE_DRAFT_TOKENS, steps + 1)}
    return Arm(name, f"v1 tree: {_shape(steps, tree)}, never gated", ungated | tree, "EAGLEWorker")


def _gated(deployed: Mapping[str, Any]) -> Arm:
    threshold, profile = deployed.get(THRESHOLD), deployed.get(PROFILE)
    if not threshold and not profile:
        raise UsageError(
            f"the arm {GATED!r} is the deployment that serves, and its gate is off: deploy with a threshold, or leave "
            f"it out with --arms"
        )
    closes = f"closes at {threshold} running requests" if threshold else f"goes by the profile {profile}"
    worker = "EAGLEWorker" if deployed.get(TOP_K, 1) > 1 or deployed.get(OVERLAP_OFF) else "EAGLEWorkerV2"
    return Arm(GATED, f"the deployment that serves; its gate {closes}", None, worker)


def _shape(steps: int, shape: Mapping[str, Any]) -> str:
    return f"{steps} steps, top-k {shape[TOP_K]}, {shape[DRAFT_TOKENS]} draft tokens"
