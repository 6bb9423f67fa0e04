"""Writes the report when a deploy ends, however it ends: how it ended, then the page; and says where the page is.

Where a host could not be reached any more it also says where that leaves the hosts, since no task can.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: deploy_report
    type: notification
    short_description: The report of a deploy, written at its end
    description:
      - The role acceptance names a folder for the documents of a run on each host (the fact C(acceptance_folder)), and
        deploy and the roll-back say how far a host is (C(deploy_turn)). A run that fails skips all later plays, so that
        only a callback sees its end.
      - At the end C(outcome.json) is written into each folder, and C(fab report) makes the page.
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "deploy_report"

    def __init__(self) -> None:
        super().__init__()
        self._folders: dict[str, Path] = {}
        self._serving = False
        self._hosts: set[str] = set()
        self._turns: dict[str, str] = {}
        self._taken: set[str] = set()
        self._lost: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._serving = play.hosts == ["sglang_hosts"]

    def v2_runner_on_ok(self, result: Any) -> None:
        if self._serving:
            self._hosts.add(result._host.get_name())
        facts = result._result.get("ansible_facts") or {}
        if "acceptance_folder" in facts:
            self._folders[result._host.get_name()] = Path(facts["acceptance_folder"])
        if "deploy_turn" in facts:
            self._turns[result._host.get_name()] = facts["deploy_turn"]
        if "deploy_taken" in facts:
            (self._taken.add if facts["deploy_taken"] else self._taken.discard)(result._host.get_name())

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            self._note_failure(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._note_failure(result)
        if self._serving:
            host = result._host.get_name()
            self._lost[host] = result._task.delegate_to or host

    def _note_failure(self, result: Any) -> None:
        """The last failure counts: after one that is rescued, the rescue tells the reason and what serves now."""
        said = str(result._result.get("msg") or "no reason given")
        # The message of a task that only fails is a sentence of its own.
        speaks_for_itself = result._task.action.rpartition(".")[2] in ("fail", "assert")
        name = "" if speaks_for_itself else f"{result._task.get_name()}: "
        self._failures[result._host.get_name()] = name + said

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if self._lost and (self._folders or self._turns):
            self._display.display(left_behind(sorted(self._hosts), self._turns, self._taken, self._lost))
        if not self._folders:
            return
        for host, folder in self._folders.items():
            counts = stats.summarize(host)
            failed = bool(counts["failures"] or counts["unreachable"])
            document = outcome(host, self._turns.get(host) == "done" and not failed, self._failures)
            (folder / "outcome.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        self._display.display(self._report())

    def _report(self) -> str:
        """Where the page is, or why there is none."""
        root = next(iter(self._folders.values())).parent.parent
        command = [str(Path(sys.executable).with_name("fab")), "report", "--json", "--from", str(root)]
        command += ["--limit", ",".join(self._folders)]
        command += [f"--inventory={source}" for source in context.CLIARGS["inventory"] or ()]
        repository = Path(__file__).resolve().parent.parent.parent
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"No report was written: {(done.stderr or done.stdout).strip()}"
        return f"report    {json.loads(done.stdout)['html']}"


def left_behind(hosts: list[str], turns: dict[str, str], taken: set[str], lost: dict[str, str]) -> str:
    """Where a run leaves *hosts* that ended because of those *lost*: their names to that of the host out of reach."""
    said = []
    for host, gone in lost.items():
        if host not in turns:
            said.append(f"{gone} could not be reached. {host} was not switched.")
            continue
        said.append(
            f"{gone} could not be reached any more while {host} had its turn. {host} serves the former deployment or "
            "the new one, which need not have proved itself; nothing was gone back from."
        )
        if host in taken:
            said.append(f"The routers send {host} no requests, unless it was being taken from them or put back.")
    done = [host for host in hosts if turns.get(host) == "done"]
    waiting = [host for host in hosts if host not in turns and host not in lost]
    if done:
        said.append(f"Done before, and kept: {', '.join(done)}.")
    if waiting:
        said.append(f"Not reached, and not switched: {', '.join(waiting)}.")
    said.append(f"When {', '.join(dict.fromkeys(lost.values()))} can be reached again, run the same command once more.")
    return "\n".join(said)


def outcome(host: str, ok: bool, failures: dict[str, str]) -> dict[str, Any]:
    """The `specgate.outcome/1` document of one host: whether its run came to its end, else the reason."""
    others = "; ".join(f"{name}: {reason}" for name, reason in failures.items() if name != host)
    reason = failures.get(host) or (f"the run failed on another host: {others}" if others else "the run did not end")
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": "specgate.outcome/1", "host": host, "ended": ended, "ok": ok, "reason": None if ok else reason}
