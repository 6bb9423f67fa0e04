"""What the gate reports: identity, transitions, and the status file that must never stop the server."""

import json
import logging
import os
from pathlib import Path

import pytest
from spec_gate import status
from spec_gate.policy import Policy, Settings


class Worker:
    pass


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def policy():
    return Policy(Settings(threshold=5))


def reporter(policy, directory, clock, rank=0):
    identity = status.identity(policy, worker=Worker, tp_rank=rank, tp_size=2, sglang_version="1.2.3")
    return status.Reporter(identity, directory, clock)


def lines(caplog, kind):
    start = f"spec_gate {kind} "
    return [json.loads(r.message.removeprefix(start)) for r in caplog.records if r.message.startswith(start)]


@pytest.fixture(autouse=True)
def _info(caplog):
    caplog.set_level(logging.INFO)


def test_the_identity_line_names_this_process_and_its_worker(policy, clock, caplog):
    reporter(policy, None, clock)
    (identity,) = lines(caplog, "identity")
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert identity["schema"] == "spec_gate.identity/1"
    assert identity["pid"] == os.getpid()
    assert identity["start_ticks"] == int(fields[19])
    assert (identity["worker"], identity["worker_module"]) == ("Worker", __name__)
    assert (identity["tp_rank"], identity["tp_size"], identity["sglang_version"]) == (0, 2, "1.2.3")
    assert identity["policy"] == Settings(threshold=5).describe()


def test_the_status_file_holds_identity_and_gate(policy, clock, tmp_path):
    report = reporter(policy, tmp_path, clock, rank=1)
    policy.decide(7)
    report.transition(status.gate(policy, 7), policy.steps)
    document = json.loads((tmp_path / "rank-1.json").read_text())
    assert document["schema"] == "spec_gate.rank/1"
    assert document["identity"] == report.identity
    assert document["gate"] == {
        "mode": "closed",
        "threshold": 5,
        "transitions": 1,
        "open_steps": 0,
        "closed_steps": 1,
        "reason": "running 7 >= threshold 5",
        "running": 7,
        "forced": None,
        "profile": None,
        "acceptance": None,
        "break_even": None,
        "passed_probes": 0,
        "failed_probes": 0,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


def test_the_status_file_is_written_once_an_interval(policy, clock, tmp_path):
    report = reporter(policy, tmp_path, clock)
    asked = []

    def state():
        asked.append(clock.now)
        return status.gate(policy, 0)

    for _ in range(40):
        report.tick(state)
        clock.now += status.FILE_INTERVAL_S / 8
    assert asked == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_readers_never_see_a_half_written_file(policy, clock, tmp_path):
    report = reporter(policy, tmp_path, clock)
    report.tick(lambda: status.gate(policy, 0))
    before = (tmp_path / "rank-0.json").open()
    clock.now += 10
    report.tick(lambda: status.gate(policy, 3))
    assert json.loads(before.read())["gate"]["running"] == 0, "the file that was open was written to, not replaced"


def test_transitions_are_rate_limited_and_the_last_one_is_logged_with_the_number_left_out(policy, clock, caplog):
    report = reporter(policy, None, clock)
    for step in range(1, 6):
        report.transition(status.gate(policy, step), step)
    assert [line["step"] for line in lines(caplog, "transition")] == [1]
    clock.now += status.TRANSITION_INTERVAL_S
    report.tick(dict)
    assert [(line["step"], line.get("suppressed")) for line in lines(caplog, "transition")] == [(1, None), (5, 3)]


def test_only_rank_0_logs_transitions(policy, clock, caplog):
    reporter(policy, None, clock, rank=1).transition(status.gate(policy, 7), 1)
    assert lines(caplog, "transition") == []


def test_a_folder_that_cannot_be_written_is_logged_once_and_again_after_it_worked(policy, clock, tmp_path, caplog):
    folder = tmp_path / "missing"
    report = reporter(policy, folder, clock)

    def warnings_after_ticks():
        for _ in range(3):
            clock.now += 2
            report.tick(lambda: status.gate(policy, 0))
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    assert warnings_after_ticks() == 1
    folder.mkdir()
    assert warnings_after_ticks() == 1
    assert (folder / "rank-0.json").is_file()
    (folder / "rank-0.json").unlink()
    folder.rmdir()
    assert warnings_after_ticks() == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_reach_the_server(policy, clock, tmp_path, caplog):
    (tmp_path / "rank-0.json.new").symlink_to("/dev/full")
    report = reporter(policy, tmp_path, clock)
    report.tick(lambda: status.gate(policy, 0))
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, None),
        ({"RUNTIME_DIRECTORY": "/run/sglang"}, Path("/run/sglang")),
        ({"RUNTIME_DIRECTORY": "/run/sglang:/run/other"}, Path("/run/sglang")),
        ({"SPEC_GATE_RUNTIME_DIRECTORY": "/tmp/x"}, Path("/tmp/x")),
        ({"RUNTIME_DIRECTORY": "/run/sglang", "SPEC_GATE_RUNTIME_DIRECTORY": "/tmp/x"}, Path("/run/sglang")),
    ],
)
def test_where_the_status_files_go(environment, folder):
    assert status.runtime_directory(environment) == folder
