"""The verdict on each case, as a pure function of the evidence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from verdict_cases import CASES, SERIES, Case, healthy, table

from diagnostics.proof import verdict
from diagnostics.proof.chain import option_words
from diagnostics.proof.evidence import load, reference
from diagnostics.proof.verdict import Verdict, judge
from diagnostics.proof.worker import selected_worker


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    found = judge(case.evidence())
    assert (found.verdict, found.reason) == (case.verdict, found.reason)
    for words in case.says:
        assert words in found.reason


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case_leaves_the_evidence_as_it_was(case: Case) -> None:
    evidence = case.evidence()
    before = copy.deepcopy(evidence)
    judge(evidence)
    assert evidence == before


def test_only_proved_without_a_link_that_is_refuted_or_unknown() -> None:
    for case in CASES:
        found = judge(case.evidence())
        states = {link.state for link in found.links}
        assert (found.verdict == "proved") == (not states & {"refuted", "unknown"}), case.name
        for link in found.links:
            assert (link.state in ("refuted", "unknown")) == bool(link.reason), (case.name, link)


def paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(found for key, value in items for found in paths(value, (*path, key)))]


NEEDED = ("processes", "main_pid", "interpreter", "rank_files", "server", "unit", "deployment", "manifest", "log")


@pytest.mark.parametrize("lost", NEEDED)
def test_lost_evidence_is_never_a_proof_of_more(lost: str) -> None:
    evidence = healthy(2) | {lost: None if lost not in ("processes", "rank_files") else []}
    found = judge(evidence)
    # Unit and deployment are claims, and a log can be rotated: without them the ranks still speak.
    assert found.verdict in (("proved",) if lost in ("unit", "deployment", "log") else ("refuted", "unknown")), (
        found.reason
    )


def test_missing_details_never_raise_and_never_prove_by_absence() -> None:
    whole = healthy(2)
    proofs = []
    for path in paths(whole)[1:]:
        evidence = copy.deepcopy(whole)
        parent: Any = evidence
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = None
        found = judge(evidence)
        if found.verdict == "proved":
            proofs.append(path)
    essential = {"code_sha256", "patched_sha256", "sha256", "source_code_sha256", "worker", "worker_module", "listener"}
    assert not [path for path in proofs if path[0] not in ("log", "reference") and path[-1] in essential]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = [path for path in paths(healthy(2)) if path and path != ("host",)]


@settings(max_examples=500)
@given(path=st.sampled_from(PLACES), value=JSON)
@example(path=("unit",), value=[1])
@example(path=("rank_files", 1, "file"), value=None)
@example(path=("server",), value="up")
@example(path=("server", "info", "arguments", "node_rank"), value=float("inf"))
def test_any_value_anywhere_gives_a_verdict(path: tuple[Any, ...], value: Any) -> None:
    evidence: Any = copy.deepcopy(healthy(2))
    parent = evidence
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    found = judge(evidence)
    json.dumps(verdict.document([found]))
    assert {type(text) for link in found.links for text in (link.claimed, link.seen, link.where)} <= {str}


def test_wrong_sentence_names_both_files_and_the_way_out() -> None:
    case = next(case for case in CASES if case.name == "wrong worker's file patched")
    assert judge(case.evidence()).reason == (
        "the patch is in eagle_worker_v2.py, but these processes run EAGLEWorker from eagle_worker.py, because top-k 4 "
        "forces disable_overlap_schedule=True. Deploy with the v1 series or set top-k 1."
    )


def test_a_server_without_a_port_is_unknown() -> None:
    evidence = healthy()
    evidence["server"] = {"address": None, "port": None, "listener": None, "info": None, "error": "not asked"}
    evidence["problems"] = [{"what": "the server's address", "why": "'http' is not a port"}]
    reasons = [link.reason for link in judge(evidence).links if link.name == "answers"]
    assert reasons == [
        "the server's address could not be examined: 'http' is not a port: correct it and restart sglang.service"
    ]
    assert judge(evidence).verdict == "unknown"


def test_unreachable_host_is_unknown() -> None:
    found = judge({"schema": "specgate.evidence/1", "host": "gpu-2", "error": "Connection refused"})
    assert (found.verdict, found.links) == ("unknown", ())
    assert "Connection refused" in found.reason


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("proved", "proved"), "proved"),
        (("proved", "unknown"), "unknown"),
        (("proved", "unknown", "refuted"), "refuted"),
        ((), "unknown"),
    ],
)
def test_overall(parts: tuple[Any, ...], whole: str) -> None:
    assert verdict.overall([Verdict("h", part, "") for part in parts]) == whole


def test_document_names_the_worker_and_its_schema() -> None:
    made = verdict.document([judge(healthy()), judge(healthy(2))])
    assert (made["schema"], made["verdict"], made["worker"]) == ("specgate.verdict/1", "proved", "EAGLEWorker")
    assert made["hosts"][0]["worker"] == "EAGLEWorker"
    assert {link["state"] for link in made["hosts"][0]["links"]} == {"proved"}


def test_notes_name_what_else_was_seen() -> None:
    cases = {case.name: case for case in CASES}
    orphan = judge(cases["orphan of a former server"].evidence())
    assert any("orphaned scheduler" in note and "77" in note for note in orphan.notes)
    assert any("70000 MiB" in note for note in orphan.notes)
    assert any("pid 900" in note for note in judge(cases["two servers, one is the unit"].evidence()).notes)


@pytest.mark.parametrize(
    ("arguments", "version", "worker"),
    [
        ({"speculative_algorithm": None, "disable_overlap_schedule": False}, None, None),
        ({"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True}, "0.5.12.post1", "EAGLEWorker"),
        ({"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": False}, "0.5.12.post1", "EAGLEWorkerV2"),
        ({"speculative_algorithm": "EAGLE3", "disable_overlap_schedule": True}, "0.5.13", "EAGLEWorkerV2"),
        (
            {"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True, "enable_multi_layer_eagle": True},
            "0.5.12.post1",
            "MultiLayerEagleWorker",
        ),
        ({"speculative_algorithm": "STANDALONE", "disable_overlap_schedule": True}, "0.5.10", "StandaloneWorker"),
        ({"speculative_algorithm": "NGRAM", "disable_overlap_schedule": True}, "0.5.12", "NGRAMWorker"),
    ],
)
def test_selected_worker(arguments: dict[str, Any], version: str | None, worker: str | None) -> None:
    assert selected_worker(arguments, version)[0] == worker


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["p", "--a", "1", "--b"], ["1"]),
        (["p", "--b"], None),
        (["p", "--a"], []),
        (["p", "--a=1", "x"], ["1"]),
        (["p", "--a", "1", "2", "--a", "3", "4"], ["3", "4"]),
    ],
)
def test_option_words(command: list[str], words: list[str] | None) -> None:
    assert option_words(command, "--a") == words


def test_series_of_the_cases_is_not_a_shipped_one() -> None:
    assert SERIES not in [manifest["series"] for manifest in reference()]


def test_documentation_shows_the_cases() -> None:
    page = (Path(__file__).parents[2] / "docs/verify-worker.md").read_text(encoding="utf-8")
    assert table() in page, "replace the table by the output of: PYTHONPATH=. python tests/unit/verdict_cases.py"


def real_evidence(host: str) -> Any:
    """What `--save` wrote of a rehearsal host: rehearsal-4 served on one rank, rehearsal-1 on two."""
    return {document["host"]: document for document in load(Path(__file__).parents[1] / "data/evidence")}[host]


def test_real_evidence_of_a_rehearsal_host() -> None:
    evidence = real_evidence("rehearsal-4")
    found = judge(evidence)
    assert (found.verdict, found.worker, found.notes) == ("proved", "EAGLEWorker", ()), found.reason
    evidence["interpreter"]["modules"]["sglang.srt.speculative.eagle_worker"]["sha256"] = "0"
    assert judge(evidence).verdict == "refuted"


def test_real_evidence_of_two_ranks() -> None:
    found = judge(real_evidence("rehearsal-1"))
    assert (found.verdict, found.worker, found.notes) == ("proved", "EAGLEWorker", ()), found.reason
    assert found.reason.startswith("all 2 ranks run the patched EAGLEWorker")


@pytest.mark.parametrize(
    ("host", "outcome", "words"),
    [
        ("h200-two-ranks", "proved", "all 2 ranks run the patched EAGLEWorker,"),
        ("h200-four-ranks", "proved", "all 4 ranks run the patched EAGLEWorker,"),
        ("h200-different-rank", "refuted", "eagle_worker_v2.py was changed after rank 1 had loaded it"),
        ("h200-killed-rank", "refuted", "no server of SGLang's on port 30300"),
    ],
)
def test_real_evidence_of_several_gpus_without_a_unit(host: str, outcome: str, words: str) -> None:
    """What benchmarks/tensor_parallel.py kept: one of several servers that were started by hand, told by its port."""
    found = judge(real_evidence(host))
    assert found.verdict == outcome
    assert words in found.reason
    (service,) = (link for link in found.links if link.name == "service")
    assert service.state == ("refuted" if host == "h200-killed-rank" else "not applicable")


@pytest.mark.parametrize("rank", [0, 1])
def test_real_evidence_of_two_ranks_one_of_which_loaded_other_code(rank: int) -> None:
    evidence = real_evidence("rehearsal-1")
    (identity,) = (
        entry["document"]["identity"]
        for entry in evidence["rank_files"]
        if entry["document"]["identity"]["tp_rank"] == rank
    )
    (loaded,) = (entry for entry in identity["modules"] if entry["module"] == identity["worker_module"])
    loaded["code_sha256"] = "0" * 64
    found = judge(evidence)
    assert found.verdict == "refuted"
    assert f"eagle_worker.py was changed after rank {rank} had loaded it" in found.reason


THRESHOLD = "speculative-disable-batch-threshold"


def plain_arm(**resolved: Any) -> dict[str, Any]:
    """A host that serves the patched release without speculation, as an arm of a comparison does."""
    evidence = healthy()
    arguments = {"speculative_algorithm": None, "disable_overlap_schedule": False} | resolved
    for found in (evidence["server"]["info"]["arguments"], evidence["log"]["facts"]["current"]["arguments"]):
        found.update(arguments, speculative_disable_batch_threshold=0)
    evidence["log"]["facts"]["current"].update(speculation=None, speculation_line=None)
    command = [*evidence["processes"][0]["command"][:-4], f"--{THRESHOLD}", "0"]
    evidence["processes"][0]["command"] = evidence["unit"]["exec_start"] = command
    evidence["deployment"].update(threshold=0, server_arguments={"port": 30000, "tp-size": 1, THRESHOLD: 0})
    identities = [
        evidence["rank_files"][0]["document"]["identity"],
        evidence["log"]["facts"]["current"]["identities"][0],
        evidence["server"]["info"]["gates"][0]["identity"],
    ]
    for found in identities:
        modules = [entry for entry in found["modules"] if not entry["module"].endswith("eagle_worker")]
        found.update(
            worker="TpModelWorker", worker_module="sglang.srt.managers.tp_worker", threshold=0, modules=modules
        )
    for gate in (evidence["rank_files"][0]["document"]["gate"], evidence["server"]["info"]["gates"][0]):
        gate.update(mode="off", threshold=0)
    return evidence


def test_an_arm_without_speculation_is_proved_to_be_one() -> None:
    found = judge(plain_arm(), speculation=False)
    assert (found.verdict, found.reason) == (
        "proved",
        f"its one rank runs the patched release without speculation, series {SERIES}, threshold 0",
    )


def test_without_being_asked_for_no_speculation_refutes() -> None:
    assert "there is nothing to gate" in judge(plain_arm()).reason


def test_an_arm_that_speculates_after_all_is_refuted() -> None:
    found = judge(healthy(), speculation=False)
    assert (found.verdict, found.reason) == (
        "refuted",
        "this server speculates with EAGLEWorker, and was meant not to: deploy again",
    )
    evidence = plain_arm()
    for entry in (evidence["rank_files"][0]["document"], evidence["server"]["info"]["gates"][0]):
        entry["identity"].update(worker="EAGLEWorker", worker_module="sglang.srt.speculative.eagle_worker")
    found = judge(evidence, speculation=False)
    assert (found.verdict, found.reason) == (
        "refuted",
        "rank 0 runs EAGLEWorker, but its arguments select no speculation: deploy again",
    )


def test_an_arm_whose_overlap_schedule_is_not_as_claimed_is_refuted() -> None:
    found = judge(plain_arm(disable_overlap_schedule=True), speculation=False)
    assert (found.verdict, found.reason) == (
        "refuted",
        "the overlap schedule is off, the deployment says on: SGLang chose otherwise; see fab logs",
    )


def test_an_arm_of_which_no_rank_has_reported_is_not_proved() -> None:
    evidence = plain_arm()
    evidence["rank_files"], evidence["server"]["info"]["gates"] = [], [None]
    evidence["log"]["facts"]["current"]["identities"] = []
    assert judge(evidence, speculation=False).verdict != "proved"
