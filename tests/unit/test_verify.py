"""`fab verify-worker` without a host: its options, documents and exit statuses."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fabric.main import make_program
from verdict_cases import CASES, healthy, in_file

from diagnostics.connect import HostUnreachable
from diagnostics.inventory import REPOSITORY, Host
from diagnostics.proof import evidence, verdict, verify

LOGS = REPOSITORY / "tests/data/logs"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Exit status and output of the command line, in this process: a fresh one takes seconds to start."""

    def command(*arguments: str) -> tuple[int, str]:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(errors="strict")  # as outside of pytest
        with pytest.raises(SystemExit) as end:
            make_program().run(["fab", "--search-root", str(REPOSITORY), "verify-worker", *arguments])
        return int(end.value.code or 0), capfd.readouterr().out

    return command


def kept(folder: Path, *names: str) -> str:
    """A folder of evidence on the cases of these names, a host each."""
    cases = {case.name: case for case in CASES}
    evidence.save([cases[name].evidence() | {"host": name} for name in names], folder)
    return str(folder)


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("healthy",), 0),
        (("healthy", "healthy, two ranks"), 0),
        (("healthy", "still loading"), 3),
        (("healthy", "still loading", "unit failed"), 1),
    ],
)
def test_exit_status(run: Run, tmp_path: Path, names: tuple[str, ...], status: int) -> None:
    found, output = run("--evidence", kept(tmp_path / "kept", *names), "--json")
    document = json.loads(output)
    assert found == status
    assert document["verdict"] == {0: "proved", 1: "refuted", 3: "unknown"}[status]
    assert sorted(host["host"] for host in document["hosts"]) == sorted(names)


def test_people_see_each_host_and_its_reason_first(run: Run, tmp_path: Path) -> None:
    _, output = run("--evidence", kept(tmp_path / "kept", "healthy", "unit failed", "orphan of a former server"))
    first = output.splitlines()[:3]
    assert first[0].startswith("PROVED  healthy: its one rank runs the patched EAGLEWorker")
    assert first[2].startswith("REFUTED  unit failed: sglang.service is failed")
    assert "note  orphan of a former server: an orphaned scheduler" in output


@pytest.mark.parametrize(
    ("name", "status", "worker"),
    [
        ("0.5.12.post1-cpu-gate.log", 3, "EAGLEWorker"),
        ("0.5.12.post1-h200-v2.log", 1, "EAGLEWorkerV2"),
        ("0.5.12.post1-cpu-no-speculation.log", 1, None),
    ],
)
def test_log_alone(run: Run, name: str, status: int, worker: str | None) -> None:
    found, output = run("--log", str(LOGS / name), "--json")
    document = json.loads(output)
    assert (found, document["schema"], document["worker"]) == (status, "specgate.verdict/1", worker)


HOSTILE = {"tp_rank": [], "pid": 3}, {"threshold": [1]}, {"worker": "\ud800"}


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
@pytest.mark.parametrize("options", [("--json",), ()])
def test_a_hostile_identity_gives_a_verdict(
    run: Run, tmp_path: Path, changes: dict[str, Any], options: tuple[str, ...]
) -> None:
    line = "spec_gate identity " + json.dumps(healthy()["rank_files"][0]["document"]["identity"] | changes)
    (tmp_path / "log").write_text(line + "\n")
    status, output = run("--log", str(tmp_path / "log"), *options)
    assert status == 3
    if options:
        assert json.loads(output)["verdict"] == "unknown"
    else:
        assert output.startswith("UNKNOWN")


@pytest.mark.parametrize("unit", [[1], "up"])
def test_evidence_of_any_shape_gives_a_verdict(run: Run, tmp_path: Path, unit: Any) -> None:
    evidence.save([healthy() | {"unit": unit}], tmp_path)
    status, output = run("--evidence", str(tmp_path), "--json")
    assert (status, json.loads(output)["verdict"]) == (3, "unknown")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--log", "/no/such/log"), "/no/such/log cannot be read"),
        (("--log", str(LOGS)), "cannot be read"),
        (("--evidence", "/no/such/folder"), "holds no evidence"),
        (("--evidence", "a", "--log", "b"), "allowed is one of"),
        (("--timeout", "soon"), "--timeout is 'soon'"),
        (("--timeout", "0"), "at least 1"),
        (("--save", "/proc/no/folder"), "--save /proc/no/folder cannot be written"),
    ],
)
def test_wrong_use(run: Run, arguments: tuple[str, ...], words: str) -> None:
    status, output = run(*arguments, "--json")
    document = json.loads(output)
    assert (status, document["ok"], document["hosts"]) == (2, False, [])
    assert words in document["error"]


def host(name: str) -> Host:
    return Host(name, name, "ssh", (), "/opt/sglang", "sglang")


def test_one_host_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextlib.contextmanager
    def connect(host: Host, timeout: float) -> Iterator[Any]:
        if host.name == "down":
            raise HostUnreachable("down: no route to host")
        if host.name == "odd":
            raise KeyError("port")
        yield host.name

    def gather(connection: str, host: Host, timeout: float) -> evidence.Evidence:
        return healthy() | {"host": host.name}

    monkeypatch.setattr(verify, "connect", connect)
    monkeypatch.setattr(evidence, "gather", gather)
    found = verify.from_hosts([host(name) for name in ("up", "down", "odd", "also-up")], 5, tmp_path / "kept")
    assert [one.host for one in found] == ["up", "down", "odd", "also-up"]
    assert [one.verdict for one in found] == ["proved", "unknown", "unknown", "proved"]
    assert "no route to host" in found[1].reason
    assert "unexpected KeyError: 'port'" in found[2].reason
    assert {one.host: one.verdict for one in verify.from_folder(tmp_path / "kept")} == {
        one.host: one.verdict for one in found
    }


def test_the_timeout_covers_all_that_is_done_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    @contextlib.contextmanager
    def connect(host: Host, timeout: float) -> Iterator[Any]:
        never.wait()
        yield host.name

    monkeypatch.setattr(verify, "connect", connect)
    try:
        (found,) = verify.from_hosts([host("slow")], 0.1)
    finally:
        never.set()
    assert (found.host, found.verdict) == ("slow", "unknown")
    assert "no result within 0.1 s" in found.reason


class Broken:
    """A connection that runs a command and gets nothing of use back."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def run(self, *arguments: object, **options: object) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Result:
    def __init__(self, exited: int, stdout: str, stderr: str = "") -> None:
        self.exited, self.stdout, self.stderr = exited, stdout, stderr


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Result(127, "", "python3 is not installed\n"), "python3 is not installed"),
        (Result(0, "Welcome to gpu-1\n{}"), "login scripts"),
        (Result(0, "Welcome to gpu-1\n"), "login scripts"),
        (Result(1, ""), "exit status 1"),
        (OSError("Socket is closed"), "the connection broke: OSError: Socket is closed"),
        (EOFError(), "the connection broke"),
    ],
)
def test_what_a_host_can_do_is_evidence_too(outcome: Any, words: str) -> None:
    document = evidence.gather(Broken(outcome), host("gpu-1"), 5)  # type: ignore[arg-type]
    assert document["host"] == "gpu-1"
    assert words in document["error"]


def test_a_greeting_before_the_evidence_does_no_harm() -> None:
    answer = Result(0, "Welcome to gpu-1\n" + json.dumps({"schema": evidence.SCHEMA}) + "\n")
    assert evidence.gather(Broken(answer), host("gpu-1"), 5)["error"] is None  # type: ignore[arg-type]


def test_ranks_that_are_alike_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    verify.show([verdict.judge(healthy(8))])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("proved loaded") == len(healthy()["manifest"]["files"])
    assert "and 7 more" in shown
    assert "ranks :" not in shown, "the ranks are named"


def test_a_rank_that_differs_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = healthy(8)
    in_file(spoilt, rank=5)["modules"][0]["code_sha256"] = "another"
    verify.show([verdict.judge(spoilt)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "refuted loaded, rank 5" in shown
    assert "and 6 more" in shown
