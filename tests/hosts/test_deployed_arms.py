"""`fab compare` and `fab report` on a deployed host: other arms serve, the deployed one is back, and the page shows it.

The tests share the host with test_deploy.py and leave its deployment as they found it. They run in this order.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from deploy_target import ROOT, State, Target, eventually
from rehearsal_commands import Rehearsal

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def target(rehearsal_host: Rehearsal) -> Target:
    """The host, with a deployment that serves and has its documents."""
    target = Target(rehearsal_host)
    done = target.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert Path(page_of(done.stdout)).is_file()
    return target


def page_of(output: str) -> str:
    """Where the deploy says that its page is: on the last line."""
    label, _, path = output.strip().splitlines()[-1].partition(" ")
    assert label == "report", output[-2000:]
    return path.strip()


def found_on(target: Target) -> tuple[str, str, list[str]]:
    """The active deployment, the one on record for a roll-back, and all that there are."""
    links = target.sh(f"readlink {ROOT}/current; readlink {ROOT}/previous || true").split("\n")
    return links[0], [*links, ""][1], target.sh(f"ls {ROOT}/deployments").split()


def test_arms_are_proved_and_measured_and_the_deployment_is_back(target: Target) -> None:
    before = found_on(target)
    done = target.rehearsal.fab(
        "compare", "--arms=gated,plain", "--concurrency=2", "--rounds=3", "--requests=6", "--json", timeout=600
    )
    (entry,) = json.loads(done.stdout)["hosts"]
    # On a busy machine the client may be too slow for its figures to count; then that is all that is wrong.
    assert entry["reasons"] == entry["invalid"]
    assert done.returncode == (3 if entry["invalid"] else 0)
    turns = [(found["round"], found["arm"]) for found in entry["measurements"]]
    assert turns == [(1, "gated"), (1, "plain"), (2, "plain"), (2, "gated"), (3, "gated"), (3, "plain")]
    assert all(found["requests"]["answered"] == 6 for found in entry["measurements"])
    arms = {arm["name"]: arm for arm in entry["arms"]}
    assert arms["gated"]["proof"].startswith("proved: its one rank runs the patched EAGLEWorker")
    assert arms["plain"]["proof"].startswith("proved: its one rank runs the patched release without speculation")
    speculated = {found["arm"]: found["accept_length"] is not None for found in entry["measurements"]}
    assert speculated == {"gated": True, "plain": False}
    if entry["invalid"]:
        assert {difference["says"] for difference in entry["differences"]} <= {"too few rounds"}
    else:
        (difference,) = entry["differences"]
        low, high = difference["interval"]
        assert low < difference["ratio"] < high
        assert (difference["says"] == "within the noise") == (low <= 1 <= high)
    assert entry["restored"]["proof"].startswith("proved")
    assert found_on(target) == before
    assert target.is_healthy()


def test_an_interrupted_comparison_goes_back(target: Target) -> None:
    before = found_on(target)
    with target.rehearsal.popen_fab("compare", "--arms=plain,gated", "--concurrency=2", "--json") as comparison:
        eventually(lambda: found_on(target)[0] != before[0])
        comparison.send_signal(signal.SIGINT)
        output, errors = comparison.communicate(timeout=300)
    assert comparison.returncode == 1, errors
    (entry,) = json.loads(output)["hosts"]
    assert entry["reasons"] == ["interrupted after 0 measurements"]
    assert entry["restored"]["proof"].startswith("proved")
    assert found_on(target) == before
    assert target.rehearsal.fab("verify-worker").returncode == 0


def report(target: Target) -> dict[str, Any]:
    done = target.rehearsal.fab("report", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_report_shows_the_deploy_and_the_last_comparison(target: Target) -> None:
    found = report(target)
    (host,) = found["hosts"]
    assert (host["state"], host["headline"]) == ("partial", "deployed and proved; not run: load test")
    assert "CPU engine" in host["engine"]
    assert host["arguments"]["speculative-algorithm"] == "EAGLE3"
    # The last one was interrupted, and that is what it says.
    assert host["comparison"]["document"]["reasons"] == ["interrupted after 0 measurements"]
    html = Path(found["html"]).read_text(encoding="utf-8")
    assert "deployed and proved; not run: load test" in html
    assert "its one rank runs the patched EAGLEWorker" in html


def test_a_deploy_that_fails_writes_its_page_with_the_reason_first(target: Target, unharmed: State) -> None:
    done = target.deploy("--tags", "smoke", acceptance_accept_length_floor=99)
    assert done.returncode != 0
    html = Path(page_of(done.stdout)).read_text(encoding="utf-8")
    first_screen = html[html.index("<header>") : html.index("<main>")]
    assert "rehearsal-1: the deploy FAILED" in first_screen
    assert "allowed is more than 99" in first_screen
    assert "what was active before it still is" in first_screen
    assert report(target)["state"] == "failed"
