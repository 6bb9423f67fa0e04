"""The main job on a rehearsal host: check mode, a first deploy, a second one, a stop.

The tests share a host and run in this order, because a first deploy takes minutes: each finds what the last one left.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
from deploy_target import ROOT, State, Target, eventually, plain, recap
from rehearsal_commands import REPOSITORY, Rehearsal

sys.path.insert(0, str(REPOSITORY / "plugins/filter"))
from systemd import environment_lines, server_arguments

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def target(rehearsal_host: Rehearsal) -> Target:
    return Target(rehearsal_host)


def test_systemd_reads_back_the_words_and_the_environment_that_were_written(target: Target) -> None:
    awkward = [
        "",
        " ",
        "a b",
        "50%",
        "$HOME",
        "${HOME}",
        'say "yes"',
        "it's",
        "back\\slash",
        "a;b",
        "tab\there",
        "ümlaut",
    ]
    words = " ".join(line.partition(" ")[2] for line in server_arguments({"words": awkward}))
    program = "import os, sys; print(sys.argv[1:], os.environ['AWKWARD'])"
    environment = "\n".join(environment_lines({"AWKWARD": "".join(awkward)}))
    unit = f'[Service]\nEnvironmentFile=/run/words.env\nExecStart=python3 -c "{program}" {words}\n'
    for path, text in (("/run/words.env", environment), ("/run/systemd/system/words.service", unit)):
        target.sh(f"printf %s {shlex.quote(text)} >{path}")
    target.sh("systemctl daemon-reload; systemctl start words")
    eventually(lambda: "['" in target.sh("journalctl --unit=words --output=cat"))
    assert f"{awkward} {''.join(awkward)}" in target.sh("journalctl --unit=words --output=cat")


def test_check_mode_on_a_fresh_host_touches_nothing(target: Target) -> None:
    done = target.deploy("--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert target.sh("find /opt /srv -mindepth 1; find /etc -name '*sglang*'; getent passwd sglang || true") == ""


def test_first_deploy_proves_and_tests_itself(target: Target) -> None:
    done = target.deploy()
    assert done.returncode == 0, done.stdout
    output = plain(done.stdout)
    assert "proof proved" in output
    assert re.search(r"load (\d+) of \1 requests answered at C=10", output)
    assert re.search(r"gate closed for [1-9]\d* of \d+ steps, ([2-9]|\d\d+) transitions, open after the load", output)
    assert target.is_healthy()
    assert "disabled" not in target.sh("systemctl is-enabled sglang")


def test_doctor_finds_the_deployed_host_fit_and_looks_at_what_is_deployed(target: Target) -> None:
    done = target.rehearsal.fab("doctor", "--json")
    assert done.returncode == 0, done.stdout
    (entry,) = json.loads(done.stdout)["hosts"]
    found = {each["name"]: each for each in entry["checks"]}
    assert found["port"]["found"] == "30000 is the service's"
    assert found["draft_algorithm"]["state"] == found["draft_width"]["state"] == "pass"
    deployed = target.deployed()["server_arguments"]
    assert entry["facts"]["deployed_arguments"]["model-path"] == deployed["model-path"]


def test_second_deploy_changes_nothing(target: Target, unharmed: State) -> None:
    done = target.deploy("--skip-tags", "load")
    assert done.returncode == 0, done.stdout
    assert recap(done.stdout)["changed"] == 0


def test_check_mode_on_a_deployed_host_finds_nothing_to_change(target: Target, unharmed: State) -> None:
    done = target.deploy("--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert recap(done.stdout)["changed"] == 0


def test_releases_share_their_bytes_with_the_cache_and_patching_left_the_cache_alone(target: Target) -> None:
    manifest = json.loads(next((REPOSITORY / "files/spec_gate/spec_gate/series").glob("*/manifest.json")).read_text())
    packages = json.loads(target.sh(f"cat {target.release()}/release.json"))["site_packages"]
    assert int(target.sh(f"stat --format=%h {packages}/sglang/__init__.py")) >= 2
    for file in manifest["files"]:
        assert target.sh(f"stat --format=%h {packages}/{file['path']}") == "1"
        cached = target.sh(f"sha256sum {ROOT}/cache/archive-*/*/{file['path']}").split()
        assert cached[::2] == [file["upstream_sha256"]]


def test_a_stop_waits_for_the_running_request_and_counts_as_success(target: Target) -> None:
    request = subprocess.Popen(
        ["ssh", "-F", target.rehearsal.directory / "ssh_config", "rehearsal-1",
         "curl --silent http://127.0.0.1:30000/generate --header 'Content-Type: application/json' --data "
         """'{"text": "Tell me a story.", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": true}}'"""],
        stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    eventually(lambda: "#running-req: 1" in target.sh("journalctl -u sglang --lines=3") or request.poll() is not None)
    assert request.poll() is None, "the request was over before the stop"
    target.rehearsal.ssh("sudo systemctl stop sglang", timeout=120)
    answer = json.loads(request.communicate(timeout=60)[0])
    assert answer["meta_info"]["completion_tokens"] == 1500
    assert target.sh("systemctl show --property=ActiveState,Result sglang") == "Result=success\nActiveState=inactive"
    assert target.sh("pgrep --count --uid sglang || true") == "0"


def test_a_deploy_starts_a_stopped_service_again(target: Target) -> None:
    done = target.deploy("--tags", "service")
    assert done.returncode == 0, done.stdout
    assert target.is_healthy()
