"""The command line: what it refuses, what it prints, and how it exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, listening, prompt, server_info
from fabric.main import make_program
from invoke.exceptions import Exit, ThreadException
from paramiko import SSHException
from report_runs import TIME, comparison, deploy, write

from diagnostics import journal, render
from diagnostics.connect import HostUnreachable
from diagnostics.fanout import on_each
from diagnostics.inventory import REPOSITORY, Host, UsageError
from diagnostics.load import Plan
from diagnostics.load import load as run_load
from diagnostics.options import integer, load_plan, number
from diagnostics.prompts import SHIPPED, load_prompts, order
from diagnostics.tasks import finish

TASKS = ("calibrate", "load", "logs", "smoke", "status")
SCHEMAS = {"calibrate": "calibration"}


@dataclass(frozen=True)
class Answer:
    """What one run of the command line printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


Fab = Callable[..., Answer]


@pytest.fixture
def fab(capfd: pytest.CaptureFixture[str]) -> Fab:
    """Run Fabric's command line on the repository's fabfile, in this process: a fresh one takes seconds to start."""

    def run(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            make_program().run(["fab", "--search-root", str(REPOSITORY), *arguments])
        out, err = capfd.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return run


@pytest.fixture
def closed(tmp_path: Path) -> str:
    """An inventory of two hosts where nothing listens."""
    path = tmp_path / "hosts.yml"
    path.write_text("all:\n  hosts: {one: , two: }\n  vars: {ansible_host: 127.0.0.1, ansible_port: 1}\n")
    return str(path)


def test_the_tasks_are_listed(fab: Fab) -> None:
    answer = fab("--list")
    assert answer.returncode == 0
    for task in (*TASKS, "compare", "report", "verify-worker"):
        assert f"\n  {task} " in answer.stdout


@pytest.mark.parametrize("task", TASKS)
def test_a_host_that_does_not_answer_is_a_failure_and_hides_no_other(fab: Fab, task: str, closed: str) -> None:
    answer = fab(task, "--inventory", closed, "--json")
    assert answer.returncode == 1, answer.stderr
    document = json.loads(answer.stdout)
    assert document["schema"] == f"specgate.{SCHEMAS.get(task, task)}/1"
    assert document["ok"] is False
    assert [host["host"] for host in document["hosts"]] == ["one", "two"]
    for host in document["hosts"]:
        assert host["ok"] is False
        assert "127.0.0.1:1" in host["reasons"][0]


@pytest.mark.parametrize("task", ["load", "smoke", "status"])
def test_people_read_the_outcome_first(fab: Fab, task: str, closed: str) -> None:
    answer = fab(task, "--inventory", closed)
    assert answer.returncode == 1
    assert "FAILED on 2 of 2 hosts: one, two" in answer.stdout.splitlines()[0]
    assert "one: 127.0.0.1:1: " in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("load", "--concurrency", "abc"), "--concurrency is 'abc'; allowed is an integer of at least 1"),
        (("load", "--concurrency", "0"), "--concurrency is '0'; allowed is an integer of at least 1"),
        (("load", "--requests", "-1"), "--requests is '-1'; allowed is an integer of at least 1"),
        (("load", "--requests", "5", "--duration", "5"), "--requests and --duration are both given"),
        (("load", "--duration", "nan"), "--duration is 'nan'; allowed is a number of seconds of at least 1"),
        (("load", "--prompts", "none.jsonl"), "--prompts 'none.jsonl' cannot be read"),
        (("smoke", "--timeout", "0"), "--timeout is '0'; allowed is a number of seconds of at least 1"),
        (("smoke", "--accept-length-floor", "x"), "--accept-length-floor is 'x'; allowed is a number of tokens"),
        (("smoke", "--limit", "three"), "--limit 'three' matches no host; known hosts: one, two"),
        (("status", "--timeout", ""), "--timeout is ''; allowed is a number of seconds of at least 1"),
        (("compare", "--arms", "gated"), "--arms is 'gated'; allowed are two or more of gated, plain"),
        (("compare", "--concurrency", "1,x"), "--concurrency is 'x'; allowed is an integer of at least 1"),
        (("compare", "--rounds", "0"), "--rounds is '0'; allowed is an integer of at least 1"),
        (("compare",), "a comparison takes one host out of service, and here are one, two; choose with --limit"),
        (("report", "--from", "nowhere"), "'nowhere' is not a folder; deploy first"),
        (("logs", "--lines", "1.5"), "--lines is '1.5'; allowed is an integer of at least 1"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_allowed(
    fab: Fab, closed: str, arguments: tuple[str, ...], message: str
) -> None:
    answer = fab(*arguments, "--inventory", closed, "--json")
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    document = json.loads(answer.stdout)
    assert document["ok"] is False
    assert message in document["error"]


@pytest.mark.parametrize("task", [*TASKS, "verify-worker"])
def test_an_option_that_does_not_exist_is_wrong_use(fab: Fab, task: str) -> None:
    answer = fab(task, "--tiemout", "5", "--json")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "'--tiemout'" in answer.stderr


def test_a_comparison_of_a_host_that_does_not_answer_touches_nothing(fab: Fab, closed: str) -> None:
    answer = fab("compare", "--limit", "one", "--inventory", closed, "--json")
    assert answer.returncode == 1
    (entry,) = json.loads(answer.stdout)["hosts"]
    assert (entry["host"], entry["ok"]) == ("one", False)
    assert "127.0.0.1:1" in entry["reasons"][0]


def test_the_report_is_written_and_says_where(fab: Fab, tmp_path: Path) -> None:
    write(tmp_path / "reports", "gpu-1", TIME, deploy())
    answer = fab("report", "--from", str(tmp_path / "reports"))
    assert answer.returncode == 0
    first, *_, last = answer.stdout.splitlines()
    assert first == "gpu-1: deployed, proved and tested"
    assert last == f"The page: {tmp_path}/reports/{TIME}.html"
    answer = fab("report", "--from", str(tmp_path / "reports"), "--output", str(tmp_path / "a.html"), "--json")
    assert json.loads(answer.stdout)["html"] == f"{tmp_path}/a.html"
    assert (tmp_path / "a.html").is_file()
    assert (tmp_path / "a.json").is_file()


def test_a_comparison_for_people(capfd: pytest.CaptureFixture[str]) -> None:
    (entry,) = comparison()["hosts"]
    entry |= {"restored": {"deployment": "d5", "proof": "proved: it runs"}}
    render.compare([entry])
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.startswith("Comparison passed on gpu-1")
    assert "100.0 (95.0 to 104.0)" in shown
    assert "1.30x [1.10, 1.50] faster" in shown
    assert "active again: d5, proved: it runs" in shown


def test_following_has_no_document(fab: Fab, closed: str) -> None:
    answer = fab("logs", "--follow", "--json", "--inventory", closed)
    assert answer.returncode == 2
    assert "--follow and --json are both given" in answer.stderr


def test_an_inventory_that_is_not_there_exits_with_2(fab: Fab) -> None:
    answer = fab("status", "--inventory", "nowhere.yml")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "inventory 'nowhere.yml' does not exist" in answer.stderr


def host(name: str) -> Host:
    return Host(name, name, "ssh", (), "/opt/sglang", "sglang")


def test_a_host_that_fails_hides_no_other() -> None:
    def work(which: Host) -> dict[str, Any]:
        if which.name == "b":
            raise HostUnreachable("gone")
        return {"ok": True, "reasons": []}

    assert on_each([host("a"), host("b"), host("c")], work) == [
        {"host": "a", "ok": True, "reasons": []},
        {"host": "b", "ok": False, "reasons": ["gone"]},
        {"host": "c", "ok": True, "reasons": []},
    ]


def test_a_bug_on_one_host_is_its_failure_and_hides_no_other() -> None:
    def work(which: Host) -> dict[str, Any]:
        if which.name == "a":
            raise KeyError("bug")
        return {"ok": True, "reasons": []}

    assert on_each([host("a"), host("b")], work) == [
        {"host": "a", "ok": False, "reasons": ["unexpected KeyError: 'bug'"]},
        {"host": "b", "ok": True, "reasons": []},
    ]


def test_a_host_that_is_late_is_a_failure_and_is_not_waited_for() -> None:
    never = threading.Event()

    def work(which: Host) -> dict[str, Any]:
        if which.name == "late":
            never.wait()
        return {"ok": True, "reasons": []}

    try:
        assert on_each([host("late"), host("a")], work, timeout=0.5) == [
            {"host": "late", "ok": False, "reasons": ["no result within 0.5 s"]},
            {"host": "a", "ok": True, "reasons": []},
        ]
    finally:
        never.set()


@dataclass
class Said:
    """What a fake connection answers to a command."""

    stdout: str
    ok: bool = True
    stderr: str = ""


@pytest.mark.parametrize("broken", [OSError("Socket is closed"), EOFError(), SSHException("gone"), ThreadException([])])
def test_a_connection_that_breaks_while_the_journal_is_read(monkeypatch: pytest.MonkeyPatch, broken: Exception) -> None:
    class Connection:
        def run(self, command: str, out_stream: Any = None, **options: Any) -> Said:
            if "journalctl" not in command:
                return Said("4711\n")
            out_stream.write("first\nsec")
            raise broken

    @contextlib.contextmanager
    def connect(host: Host, timeout: float) -> Iterator[Any]:
        yield Connection()

    monkeypatch.setattr(journal, "connect", connect)
    seen: list[str] = []
    with pytest.raises(HostUnreachable, match="the connection broke during 'sudo -n journalctl"):
        journal.journal(host("a"), seen.append, lines=5, pattern=None, follow=True, timeout=5)
    assert seen == ["first"]


@pytest.mark.parametrize("given", ["", " ", "1e3", "0x10", "none", "-1", "4"])
def test_integers_are_checked(given: str) -> None:
    with pytest.raises(UsageError, match="at least 5"):
        integer("n", given, minimum=5)
    assert integer("n", "5", minimum=5) == 5


@pytest.mark.parametrize("given", ["", "inf", "nan", "-1", "1,5", "0.4"])
def test_numbers_are_checked(given: str) -> None:
    with pytest.raises(UsageError, match=r"number of seconds of at least 0\.5"):
        number("n", given, minimum=0.5, unit="seconds")
    assert number("n", "0.5", minimum=0.5, unit="seconds") == 0.5


def test_shipped_prompts_are_of_several_kinds_and_named_once() -> None:
    prompts = load_prompts()
    assert {prompt.kind for prompt in prompts} == {"chat", "code", "summary", "json"}
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert SHIPPED.parent == Path(render.__file__).parent


def test_the_order_is_the_seeds_and_takes_kinds_in_turn() -> None:
    prompts = load_prompts()
    assert order(prompts, 1) == order(prompts, 1)
    assert order(prompts, 1) != order(prompts, 2)
    assert sorted(p.name for p in order(prompts, 1)) == sorted(p.name for p in prompts)
    assert [p.kind for p in order(prompts, 1)[:8]] == ["chat", "code", "summary", "json"] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", r":1: not a prompt \(JSONDecodeError"),
        ('{"name": "a"}', r":1: not a prompt \(KeyError"),
        ('{"name": "a", "kind": "k", "messages": [], "max_tokens": 5}', ":1: messages must not be empty"),
        ('{"name": "a", "kind": "k", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "at least 1"),
    ],
)
def test_prompts_of_ones_own_are_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_prompts(path)


def test_the_load_is_shown_with_its_errors_and_its_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> dict[str, Any]:
        async with listening(ChatServer(), tmp_path) as socket:
            plan = Plan(concurrency=2, requests=4)
            return await run_load(socket, plan, [prompt("plain"), prompt("refused", "code")])

    render.load([{"host": "a[b]", **asyncio.run(scenario())}, {"host": "gone", "ok": False, "reasons": ["no route"]}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Load test FAILED on 2 of 2 hosts: a[b], gone"
    assert "  a[b]: requests without an answer: 2 (2 failed); allowed is at most 0" in lines
    assert "  gone: no route" in lines
    assert any("2 failed: HTTP 400: too long" in line for line in lines)
    assert any("threshold 5: 0 transitions" in line for line in lines)


def test_a_gate_that_something_holds_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> dict[str, Any]:
        async with listening(ChatServer(server_info(settings={"forced": "open"})), tmp_path) as endpoint:
            return await run_load(endpoint, Plan(concurrency=1, requests=1), [prompt("plain")])

    render.load([{"host": "a", **asyncio.run(scenario())}])
    assert "threshold 5, HELD open whatever the load: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "--rate is '0'; allowed is a number of requests a second above 0"),
        (("--rate", "2", "--concurrency", "2"), "--concurrency and --rate are both given"),
        (("--throughput-loss-limit", "101"), "allowed is a number of per cent above 0 and at most 100"),
        (("--ttft-p95-limit", "nan"), "--ttft-p95-limit is 'nan'; allowed is a number of seconds above 0"),
        (("--max-errors", "-1"), "--max-errors is '-1'; allowed is an integer of at least 0"),
    ],
)
def test_wrong_options_of_the_load_are_refused(fab: Fab, closed: str, arguments: tuple[str, ...], message: str) -> None:
    answer = fab("load", *arguments, "--inventory", closed)
    assert answer.returncode == 2
    assert message in answer.stderr


def test_a_plan_fills_in_what_was_not_given() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("concurrency", "rate", "requests", "duration", "warm_up"))
    plan = load_plan(**nothing)
    assert (plan.concurrency, plan.rate, plan.requests, plan.duration, plan.warm_up) == (10, None, 50, None, 10)
    plan = load_plan(**nothing | {"rate": "0.5"})
    assert (plan.concurrency, plan.rate, plan.requests, plan.warm_up) == (None, 0.5, 15, 4)
    plan = load_plan(**nothing | {"rate": "2", "duration": "5"})
    assert (plan.requests, plan.duration) == (None, 5.0)


@pytest.mark.parametrize(("entries", "status"), [
    ([{"ok": True}, {"ok": True}], 0),
    ([{"ok": True}, {"ok": False, "reasons": ["slow"], "invalid": ["slow"]}], 3),
    ([{"ok": False, "reasons": ["bad"]}, {"ok": False, "reasons": ["slow"], "invalid": ["slow"]}], 1),
    ([{"ok": False, "reasons": ["bad", "slow"], "invalid": ["slow"]}], 1),
])  # fmt: skip
def test_invalid_figures_are_neither_success_nor_failure(entries: list[dict[str, Any]], status: int) -> None:
    with pytest.raises(Exit) as end:
        finish("s", entries, True, lambda shown: None)
    assert end.value.code == status
