"""The arms of a comparison: what each changes in the deployed server's arguments, and which there cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from diagnostics.arms import NAMES, arms, parse_names
from diagnostics.inventory import UsageError

MODEL = {"model-path": "/m", "max-running-requests": 16}
TREE = {
    "speculative-algorithm": "EAGLE3",
    "speculative-draft-model-path": "/d",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 4,
    "speculative-num-draft-tokens": 8,
}
CHAIN = TREE | {"speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}
GATE = {"speculative-gate-low-mark": 3, "speculative-disable-batch-threshold": 5}


def deployment(**arguments: Any) -> dict[str, Any]:
    return {"id": "d1", "server_arguments": {"host": "127.0.0.1", "port": 30000} | arguments}


def made(deployed: dict[str, Any]) -> dict[str, Any]:
    return {arm.name: arm for arm in arms(NAMES, deployed)}


def test_each_arm_differs_by_its_speculation_alone() -> None:
    found = made(deployment(**MODEL, **TREE, **GATE))
    assert found["gated"].server_arguments is None
    assert found["plain"].server_arguments == MODEL
    assert found["plain-no-overlap"].server_arguments == MODEL | {"disable-overlap-schedule": True}
    assert found["tree"].server_arguments == MODEL | TREE
    assert found["chain"].server_arguments == MODEL | CHAIN
    workers = {name: arm.worker for name, arm in found.items()}
    assert workers == {
        "gated": "EAGLEWorker",
        "plain": None,
        "plain-no-overlap": None,
        "tree": "EAGLEWorker",
        "chain": "EAGLEWorkerV2",
    }


def test_a_deployed_chain_gives_a_tree_of_sglangs_usual_shape() -> None:
    found = made(deployment(**MODEL, **CHAIN, **GATE))
    assert found["tree"].server_arguments == MODEL | TREE
    assert found["chain"].server_arguments == MODEL | CHAIN
    assert found["gated"].worker == "EAGLEWorkerV2"


def test_a_deployment_without_overlap_still_gives_arms_with_it() -> None:
    found = made(deployment(**MODEL, **CHAIN, **GATE, **{"disable-overlap-schedule": True}))
    assert "disable-overlap-schedule" not in found["plain"].server_arguments
    assert "disable-overlap-schedule" not in found["chain"].server_arguments
    assert found["gated"].worker == "EAGLEWorker"


def test_a_gate_that_goes_by_a_profile_is_a_gate() -> None:
    gate = {"speculative-disable-batch-threshold": 0, "speculative-gate-profile": "/p.json"}
    found = made(deployment(**MODEL, **TREE, **gate))
    assert "/p.json" in found["gated"].what
    assert found["tree"].server_arguments == MODEL | TREE


@pytest.mark.parametrize(
    ("names", "arguments", "says"),
    [
        (["gated", "plain"], MODEL | TREE | {"speculative-disable-batch-threshold": 0}, "its gate is off"),
        (["plain", "tree"], MODEL, "the deployment has no speculative-algorithm"),
        (["plain", "chain"], MODEL | {"speculative-algorithm": "EAGLE3"}, "with speculative-num-steps"),
    ],
)
def test_what_cannot_be_compared_is_refused(names: list[str], arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        arms(names, deployment(**arguments))


def test_names_are_two_or_more_each_once() -> None:
    assert parse_names("gated, plain") == ["gated", "plain"]
    for given in ("gated,plaid", "gated", "plain,plain", ""):
        with pytest.raises(UsageError, match=f"--arms is '{given}'; allowed are two or more of gated, plain"):
            parse_names(given)
