"""A deployment that serves, but not as it must: it is found out, and the former one serves again or still.

The tests share the host with test_deploy.py and leave it as they found it.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from deploy_target import State, Target, eventually, plain

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

SPOIL = """
import pathlib, shutil, sys, torch
from safetensors.torch import load_file, save_file
source, kind = sys.argv[1:]
folder = pathlib.Path("/srv/models/draft-" + kind)
shutil.rmtree(folder, ignore_errors=True)
shutil.copytree(source, folder)
(file,) = folder.glob("*.safetensors")
weights = load_file(file)
generator = torch.Generator().manual_seed(0)
if kind == "random":
    weights = {name: 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
else:
    order = torch.randperm(weights["fc.weight"].shape[1], generator=generator)
    weights["fc.weight"] = weights["fc.weight"][:, order].contiguous()
save_file(weights, file)
file.chmod(0o644)
print(folder)
"""
"""Makes a draft with random weights, or one for another target: for the same network with its hidden units in another
order, which nothing in the files tells."""


def spoilt_draft(target: Target, kind: str) -> dict[str, Any]:
    """The server's arguments with a spoilt draft."""
    arguments = target.server_arguments()
    source = arguments["speculative-draft-model-path"]
    folder = target.sh(f"{target.release()}/bin/python - {source} {kind} <<'END'\n{SPOIL}END")
    return arguments | {"speculative-draft-model-path": folder}


@pytest.mark.parametrize("kind", ["random", "other-target"])
def test_a_draft_that_does_not_fit_is_found_out_and_the_former_deployment_serves_again(
    target: Target, kind: str
) -> None:
    before = target.state()
    done = target.deploy("--skip-tags", "load", service_server_arguments=spoilt_draft(target, kind))
    output = plain(done.stdout)
    assert done.returncode != 0
    assert "accept length of a single request: 1" in output
    assert "allowed is more than 2.5: the draft does not fit the target" in output
    assert f"The former deployment {before.deployment} was activated again and is ready" in output
    assert target.state().deployment == before.deployment
    assert target.is_healthy()


def test_eagle_in_place_of_eagle3_is_refused_before_anything_is_touched(target: Target, unharmed: State) -> None:
    arguments = target.server_arguments() | {"speculative-algorithm": "EAGLE"}
    done = target.deploy(service_server_arguments=arguments)
    assert done.returncode != 0
    assert "LlamaForCausalLMEagle3 is for EAGLE3; speculative-algorithm is EAGLE" in plain(done.stdout)
    assert "Nothing that serves was touched" in plain(done.stdout)


def test_eagle_in_place_of_eagle3_is_refused_by_the_server_where_the_checks_are_overridden(target: Target) -> None:
    before = target.state()
    arguments = target.server_arguments() | {"speculative-algorithm": "EAGLE"}
    done = target.deploy(service_server_arguments=arguments, preflight_accepted=["draft_algorithm", "draft_width"])
    output = plain(done.stdout)
    assert done.returncode != 0
    assert "needs --speculative-algorithm EAGLE3, given is EAGLE" in output
    assert f"The former deployment {before.deployment} was activated again and is ready" in output
    assert target.state().deployment == before.deployment
    assert target.is_healthy()


def test_a_missed_limit_may_be_kept_but_the_deploy_is_no_success(target: Target, unharmed: State) -> None:
    done = target.deploy(
        "--tags", "smoke,load,summary", acceptance_on_failure="keep", acceptance_accept_length_floor=9,
        acceptance_load_concurrency=2, acceptance_ttft_p95_limit=0.0001, acceptance_throughput_loss_limit=99,
    )  # fmt: skip
    output = plain(done.stdout)
    assert done.returncode != 0
    assert "(more than 9.0), MISSED" in output
    assert "95th percentile of the time to the first token: " in output
    assert "allowed is at most 0.0001 s. It serves all the same, as acceptance_on_failure is keep" in output
    assert "(at most 99.0) " in output
    assert "The former deployment" not in output


def gate(target: Target) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(target.sh("curl -s http://127.0.0.1:30000/server_info"))["internal_states"][0]
    return state["spec_gate"]


def test_an_interrupted_comparison_gives_the_gate_back(target: Target, unharmed: State) -> None:
    load = target.rehearsal.popen_fab(
        "load", "--concurrency=2", "--requests=40", "--warm-up=0", "--throughput-loss-limit=99", "--json"
    )
    eventually(lambda: gate(target)["settings"]["forced"] == "closed")
    load.send_signal(signal.SIGTERM)  # SIGINT would be ignored where the tests run in a shell's background
    output, _ = load.communicate(timeout=60)
    assert load.returncode == 1
    entry = json.loads(output)["hosts"][0]
    assert entry["reasons"] == ["interrupted after 40 requests; those in flight were given up"]
    assert entry["requests"]["answered"] == 40
    assert {kind for kind, figures in entry["kinds"].items() if figures["accept_length"] > 1.2} == {
        "chat", "code", "summary", "json",
    }  # fmt: skip
    assert entry["skipped_prompts"] == []
    assert gate(target)["settings"]["forced"] is None
