"""The report that Ansible writes when a run ends, of plays whose tasks touch no host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from report_runs import TIME, deploy, write

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *tasks: dict[str, Any]) -> tuple[int, str]:
    """Run *tasks* for hosts a and b, which have the documents of a good deploy up to then; status and output."""
    documents = {name: found for name, found in deploy().items() if name != "outcome"}
    for host in ("a", "b"):
        write(tmp_path / "reports", host, TIME, documents)
    (tmp_path / "hosts.ini").write_text("[sglang_hosts]\na\nb\n")
    folder = {"acceptance_folder": f"{tmp_path}/reports/{{{{ inventory_hostname }}}}/{TIME}"}
    play = {
        "hosts": "sglang_hosts",
        "gather_facts": False,
        "any_errors_fatal": True,
        "tasks": [{"ansible.builtin.set_fact": folder}, *tasks],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "hosts.ini", tmp_path / "play.yml"],
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout


def outcome(tmp_path: Path, host: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "reports" / host / TIME / "outcome.json").read_text())
    return found


DONE = {"ansible.builtin.set_fact": {"deploy_turn": "done"}}


FAIL = {"ansible.builtin.fail": {"msg": "no tokens"}}


def test_a_run_that_came_to_its_end_though_failures_were_put_right_or_ignored(tmp_path: Path) -> None:
    rescued = {"block": [FAIL], "rescue": [{"ansible.builtin.debug": {"msg": "put right"}}]}
    status, output = run(tmp_path, rescued, FAIL | {"ignore_errors": True}, DONE)
    assert status == 0
    page = Path(output.strip().splitlines()[-1].removeprefix("report").strip())
    assert page.parent == tmp_path / "reports"
    assert "All 2 hosts are deployed, proved and tested" in page.read_text(encoding="utf-8")
    assert (outcome(tmp_path, "a")["ok"], outcome(tmp_path, "a")["reason"]) == (True, None)


def test_a_run_that_failed_tells_what_the_rescue_said_on_each_host(tmp_path: Path) -> None:
    on_b = {"when": "inventory_hostname == 'b'"}
    rescue = {"ansible.builtin.fail": {"msg": "no tokens\nd1 serves again"}}
    status, output = run(tmp_path, {"block": [FAIL | on_b], "rescue": [rescue | on_b]}, DONE)
    assert status != 0
    assert outcome(tmp_path, "b")["ok"] is outcome(tmp_path, "a")["ok"] is False
    assert outcome(tmp_path, "b")["reason"] == "no tokens\nd1 serves again"
    assert outcome(tmp_path, "a")["reason"] == "the run failed on another host: b: no tokens\nd1 serves again"
    page = Path(output.strip().splitlines()[-1].removeprefix("report").strip()).read_text(encoding="utf-8")
    assert "0 of 2 hosts are deployed, proved and tested" in page
    assert page.index("b: the deploy FAILED: no tokens") < page.index("<main>")


def test_a_host_that_did_not_come_to_its_end_is_not_done_and_a_page_that_cannot_be_written_fails_no_run(
    tmp_path: Path,
) -> None:
    (tmp_path / f"reports/{TIME}.html").mkdir(parents=True)
    status, output = run(tmp_path, DONE | {"when": "inventory_hostname == 'a'"})
    assert status == 0
    assert outcome(tmp_path, "a")["ok"] is True
    assert (outcome(tmp_path, "b")["ok"], outcome(tmp_path, "b")["reason"]) == (False, "the run did not end")
    assert "No report was written" in output
    assert "cannot be written" in output


def test_a_host_that_is_lost_in_its_turn_leaves_words_about_all_of_them(tmp_path: Path) -> None:
    turn = {"ansible.builtin.set_fact": {"deploy_turn": "begun", "deploy_taken": True}}
    on_a, on_b = ({"when": f"inventory_hostname == '{host}'"} for host in "ab")
    lost = {"ansible.builtin.ping": {}, "vars": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1",
            "ansible_port": 1}}  # fmt: skip
    status, output = run(tmp_path, turn | on_a, DONE | on_a, turn | on_b, lost | on_b)
    said = " ".join(output.split())
    assert status != 0
    assert "b could not be reached any more while b had its turn. b serves the former deployment or the new one" in said
    assert "The routers send b no requests, unless it was being taken from them or put back. Done before" in said
    assert "and kept: a. When b can" in said
    (tmp_path / "again").mkdir()
    status, output = run(tmp_path / "again", lost | on_b)
    said = " ".join(output.split())
    assert status != 0
    assert "b could not be reached. b was not switched. Not reached, and not switched: a. When b can be" in said
