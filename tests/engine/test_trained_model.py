"""The rehearsal model's training, weights and tokenizer, and what it is for: chat answers that end, drafts accepted."""

import os
import subprocess
from pathlib import Path

import pytest

from diagnostics.prompts import load_prompts

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("rehearsal_model_checks.py")


@pytest.mark.parametrize(
    "check",
    [
        "training_repeats",
        "target_is_a_llama",
        "generation_uses_its_cache_rightly",
        "unrolling_is_drafting",
        "rotation_depends_on_distance_only",
        "tokenizer_reads_and_writes_everything",
    ],
)
def test_rehearsal_model(check: str, engine_python: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY / "files/rehearsal_model"),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run([engine_python, SCRIPT, check], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_chat_answers_end_and_drafts_are_accepted(start_server) -> None:
    """Over the prompts that the load test sends. With three drafting steps the accept length lies between 1 and 4."""
    speculative = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
    speculative += ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]
    reasons = []
    with start_server(*speculative) as server:
        for prompt in load_prompts():
            request = {"model": "any", "messages": prompt.messages, "max_tokens": 300, "temperature": 0}
            answer = server.client.post("/v1/chat/completions", json=request)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            assert choice["message"]["content"].strip()
            reasons.append(choice["finish_reason"])
        state = server.client.get("/server_info").json()["internal_states"][0]
    assert state["avg_spec_accept_length"] > 3
    assert reasons.count("stop") > 0.75 * len(reasons)
