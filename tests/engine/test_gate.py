"""The gate in real SGLang on the CPU engine: outputs, what it reports, and the crash of the naive patch."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from spec_gate import loaded, patching, series

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
VERSION = "0.5.12.post1"
EAGLE_WORKER = "sglang/srt/speculative/eagle_worker.py"

TREE = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
TREE += ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]

# What one would write first: at five requests or more a plain decode of the target, while the batch still carries the
# draft's input, sized for the tree.
NAIVE_PATCH = b"""\
--- sglang/srt/speculative/eagle_worker.py
+++ sglang/srt/speculative/eagle_worker.py
@@ -482,2 +482,12 @@
         else:
+            if batch.batch_size() >= 5:
+                plain = self.target_worker.forward_batch_generation(
+                    batch.get_model_worker_batch()
+                )
+                return GenerationBatchResult(
+                    logits_output=plain.logits_output,
+                    next_token_ids=plain.next_token_ids,
+                    num_correct_drafts=0,
+                    can_run_cuda_graph=plain.can_run_cuda_graph,
+                )
             set_time_batch(batch.reqs, "set_spec_draft_start_time", trace_only=True)
"""


def python_prints(python, code):
    return subprocess.run([python, "-I", "-"], input=code, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def released(make_overlay):
    return make_overlay()


@pytest.fixture(scope="module")
def requests(prompts):
    """Ten prompts with the number of tokens wanted: the batch shrinks one by one, and the last is long alone."""
    return [(prompt, 40 + 8 * index if index < 9 else 320) for index, prompt in enumerate(prompts[:10])]


def answers(server, requests):
    """Greedy output ids of requests that are sent at the same time."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: server.generate(*request)["output_ids"], requests))


@pytest.fixture(scope="module")
def expected(start_server, released, requests):
    """What the released server answers, with speculation."""
    with start_server(*TREE, PYTHONPATH=str(released)) as server:
        return answers(server, requests)


@pytest.fixture(scope="module")
def gated_at_5(start_server, gated, tmp_path_factory):
    """A server that closes at five requests, and the folder of its status file."""
    folder = tmp_path_factory.mktemp("runtime")
    options = [*TREE, "--speculative-disable-batch-threshold", "5", "--speculative-gate-dwell-steps", "2"]
    with start_server(*options, PYTHONPATH=str(gated), SPEC_GATE_RUNTIME_DIRECTORY=str(folder)) as server:
        yield server, folder


def gate(server):
    return server.client.get("/server_info").json()["internal_states"][0]["spec_gate"]


def transition_lines(server):
    marker = "spec_gate transition "
    return [json.loads(line.split(marker)[1]) for line in server.log.read_text().splitlines() if marker in line]


def test_the_released_files_give_the_committed_manifest(engine_python, released, tmp_path):
    shutil.copytree(series.DIRECTORY / VERSION, tmp_path / VERSION)
    before = {path.name: path.read_bytes() for path in (tmp_path / VERSION).iterdir()}
    build = [engine_python, "-m", "spec_gate.series", "build", "--site-packages", released]
    environment = os.environ | {"PYTHONPATH": str(released)}
    subprocess.run([*build, "--series-directory", tmp_path], check=True, env=environment)
    assert {path.name: path.read_bytes() for path in (tmp_path / VERSION).iterdir()} == before


REFUSED = {
    "--enable-hierarchical-cache": ["--enable-hierarchical-cache"],
    "--speculative-gate-sync-interval is -1": ["--speculative-gate-sync-interval", "-1"],
    "--speculative-adaptive": ["--speculative-adaptive"],  # which SGLang itself drops with a warning at top-k above 1
    "--enable-dp-attention": ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
    "--pp-size 2": ["--pp-size", "2"],
    "--speculative-gate-low-mark is 6": ["--speculative-gate-low-mark", "6"],
    "--speculative-gate-profile /none.json cannot be read": ["--speculative-gate-profile", "/none.json"],
}


def test_sglang_itself_refuses_what_the_gate_cannot_serve(engine_python, engine_environment, gated, pair):
    options = ["--model-path", str(pair / "target"), "--device", "cpu", *TREE]
    options += ["--speculative-draft-model-path", str(pair / "draft"), "--speculative-disable-batch-threshold", "5"]
    code = f"""
from sglang.srt.server_args import prepare_server_args
from spec_gate.arguments import ArgumentError
prepare_server_args({options})
for word, more in {REFUSED}.items():
    try:
        prepare_server_args({options} + more)
    except ArgumentError as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)
"""
    environment = engine_environment | {"PYTHONPATH": str(gated)}
    result = subprocess.run([engine_python, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_off_is_the_released_server(start_server, gated, requests, expected):
    options = [*TREE, "--speculative-disable-batch-threshold", "0"]
    with start_server(*options, PYTHONPATH=str(gated)) as server:
        assert answers(server, requests) == expected
        state = gate(server)
    assert (state["mode"], state["open_steps"], state["closed_steps"]) == ("off", 0, 0)


def test_closed_from_the_start_gives_the_same_output(start_server, gated, requests, expected):
    options = [*TREE, "--speculative-disable-batch-threshold", "1"]
    with start_server(*options, PYTHONPATH=str(gated)) as server:
        assert answers(server, requests) == expected
        state = gate(server)
    assert state["open_steps"] == 0
    assert state["closed_steps"] > 0


def test_crossing_within_a_running_request_gives_the_same_output(gated_at_5, requests, expected):
    server, _ = gated_at_5
    before = gate(server)
    with ThreadPoolExecutor(1) as pool:
        # The longest is alone at first, then one of ten, then alone again.
        longest = pool.submit(answers, server, requests[-1:])
        while gate(server)["open_steps"] == before["open_steps"]:
            assert not longest.done()
        others = answers(server, requests[:-1])
        closed = gate(server)
        assert not longest.done(), "it must outlive the others, or it has not crossed back"
    assert [*others, *longest.result()] == expected
    after = gate(server)
    assert after["mode"] == "open"
    assert closed["closed_steps"] > before["closed_steps"]
    assert after["open_steps"] > closed["open_steps"]


def test_the_transitions_are_in_the_log(gated_at_5, requests):
    server, _ = gated_at_5
    answers(server, requests)
    for _ in range(50):  # of several transitions in a second the last is logged when the second is over
        lines = transition_lines(server)
        if len(lines) + sum(line.get("suppressed", 0) for line in lines) == gate(server)["transitions"]:
            break
        time.sleep(0.1)
    assert {line["to"] for line in lines} == {"closed", "open"}
    assert all(
        line["reason"] == f"running {line['running']} >= threshold 5" for line in lines if line["to"] == "closed"
    )
    assert len(lines) + sum(line.get("suppressed", 0) for line in lines) == gate(server)["transitions"]


def test_the_process_proves_the_code_that_it_runs(gated_at_5, gated, engine_python):
    server, folder = gated_at_5
    identity = gate(server)["identity"]
    patched = series.load(gated)
    assert (identity["worker"], identity["series"], identity["threshold"]) == ("EAGLEWorker", patched.id, 5)
    files = {file.module: file for file in patched.files}
    assert {module["module"] for module in identity["modules"]} == files.keys()
    for module in identity["modules"]:
        file = files[module["module"]]
        assert module["series"] == patched.id
        assert module["file"] == str(gated / file.path)
        hashing = f"{Path(loaded.__file__).read_text()}\nprint(source_code_sha256({module['file']!r}))"
        assert module["code_sha256"] == python_prints(engine_python, hashing)
    assert json.loads((folder / "rank-0.json").read_text())["identity"] == identity
    assert f"spec_gate identity {json.dumps(identity)}" in server.log.read_text()


def test_the_naive_patch_dies_at_ten_requests_where_the_gate_serves_them(
    start_server, make_overlay, gated_at_5, prompts
):
    ten = [(prompt, 32) for prompt in prompts[:10]]
    naive = make_overlay()
    path = naive / EAGLE_WORKER
    path.write_bytes(patching.patched(path.read_bytes(), NAIVE_PATCH, EAGLE_WORKER))
    died = None
    # start_server fails a test whose server has failed, which this one must.
    with contextlib.suppress(pytest.fail.Exception), start_server(*TREE, PYTHONPATH=str(naive)) as server:
        assert len(*answers(server, ten[:1])) == 32, "one request alone must do well, as it did then"
        with pytest.raises(httpx.HTTPError) as died:
            answers(server, ten)
    assert died is not None
    assert "Scheduler hit an exception" in server.log.read_text()

    assert [len(output) for output in answers(gated_at_5[0], ten)] == [32] * 10
