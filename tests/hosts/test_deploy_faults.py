"""Every fault that a deploy must survive: what served serves on, or again, and the play says why.

The tests share the host with test_deploy.py and leave it as they found it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deploy_target import ROOT, PlaybookUnderWay, State, Target, eventually, plain

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

OTHER_RELEASE = {"release_plugins": ["files/cpu_engine"] * 2}
"""Makes the deploy build another release, of the same packages."""


def rooted_at(root: str, tmp_path: Path) -> list[str]:
    """The rehearsal inventory with another folder for the releases; with -e it is refused, as fab would not see it."""
    (tmp_path / "root.yml").write_text(json.dumps({"sglang_hosts": {"vars": {"release_root": root}}}))
    return ["--inventory=inventory/rehearsal", f"--inventory={tmp_path / 'root.yml'}"]


@contextmanager
def changed(target: Target, change: str, undo: str) -> Iterator[None]:
    """A host on which `change` was run, until `undo`."""
    target.sh(change)
    try:
        yield
    finally:
        target.sh(undo)


def test_a_port_that_another_program_uses_is_refused(target: Target, unharmed: State) -> None:
    start = "systemd-run --unit=stranger python3 -m http.server --bind 127.0.0.1 30009"
    with changed(target, start, "systemctl stop stranger"):
        eventually(lambda: "30009" in target.sh("ss --listening --tcp --numeric"))
        done = target.deploy(service_port=30009)
    assert done.returncode != 0
    assert "port 30009 is in use by stranger.service" in plain(done.stdout)
    assert "Nothing that serves was touched" in plain(done.stdout)


def test_a_disk_without_room_is_refused(target: Target, unharmed: State, tmp_path: Path) -> None:
    with changed(target, "mkdir -p /mnt/small && mount -t tmpfs -o size=64M tmpfs /mnt/small", "umount /mnt/small"):
        done = target.deploy(*rooted_at("/mnt/small", tmp_path))
        left = target.sh("ls -A /mnt/small")
    assert done.returncode != 0
    assert "MiB are free at /mnt/small; a new release needs 7000" in plain(done.stdout)
    assert left == ""


def test_a_disk_that_fills_up_during_the_build_fails_the_deploy_with_the_reason(
    target: Target, unharmed: State, tmp_path: Path
) -> None:
    with changed(target, "mkdir -p /mnt/small && mount -t tmpfs -o size=200M tmpfs /mnt/small", "umount /mnt/small"):
        done = target.deploy(*rooted_at("/mnt/small", tmp_path), release_disk_mb=1)
        sealed = target.sh("ls /mnt/small/releases/*/release.json 2>/dev/null || true")
    assert done.returncode != 0
    assert "could not install the packages" in plain(done.stdout)
    assert "No space left on device" in plain(done.stdout)
    assert "What serves was not touched" in plain(done.stdout)
    assert sealed == ""


def test_without_network_a_new_release_fails_with_the_reason(target: Target, unharmed: State, tmp_path: Path) -> None:
    route = target.sh("ip route show default")
    with changed(target, "ip route delete default", f"ip route add {route}; rm -rf /opt/elsewhere"):
        done = target.deploy(*rooted_at("/opt/elsewhere", tmp_path))
    assert done.returncode != 0
    assert "could not install uv into /opt/elsewhere/tools. That needs a package index" in plain(done.stdout)


def test_without_network_what_is_built_is_deployed(target: Target, unharmed: State) -> None:
    route = target.sh("ip route show default")
    with changed(target, "ip route delete default", f"ip route add {route}"):
        done = target.deploy("--tags", "release,patch,service")
    assert done.returncode == 0, done.stdout


def test_an_upstream_file_with_one_byte_changed_is_refused(target: Target, unharmed: State) -> None:
    file = target.sh(f"ls {ROOT}/cache/archive-*/*/sglang/srt/speculative/eagle_worker.py")
    # By rename, as everything that is linked into a release must be written.
    change = f"cp -p {file} {file}.kept && sed 's/EAGLE/EAGLF/;q' {file} > {file}.new && mv {file}.new {file}"
    with changed(target, change, f"mv {file}.kept {file}"):
        done = target.deploy(**OTHER_RELEASE)
    assert done.returncode != 0
    output = plain(done.stdout)
    assert "sglang/srt/speculative/eagle_worker.py" in output
    assert "Nothing was patched, and what serves was not touched" in output
    assert target.sh(f"ls {ROOT}/releases/*/release.json") == f"{target.release()}/release.json"


def test_a_finished_release_that_was_altered_is_refused(target: Target, unharmed: State) -> None:
    file = target.sh(f"ls {target.release()}/lib/python3*/site-packages/sglang/srt/server_args.py")
    with changed(target, f"cp -p {file} {file}.kept && echo '# by hand' >> {file}", f"mv {file}.kept {file}"):
        done = target.deploy()
    assert done.returncode != 0
    assert "sglang/srt/server_args.py" in plain(done.stdout)


def test_a_release_that_serves_is_not_built_anew(target: Target, unharmed: State) -> None:
    document = f"{target.release()}/release.json"
    with changed(target, f"mv {document} {document}.kept", f"mv {document}.kept {document}"):
        done = target.deploy()
    assert done.returncode != 0
    assert "would be deleted under the running server" in plain(done.stdout)


def test_a_unit_that_systemd_refuses_is_refused_each_time(target: Target, unharmed: State) -> None:
    shim = "/usr/local/bin/systemd-analyze"
    with changed(target, f"printf '#!/bin/sh\\nexit 1\\n' >{shim} && chmod +x {shim}", f"rm {shim}"):
        for _ in range(2):
            done = target.deploy("--tags", "release,patch,service", threshold=7)
            assert done.returncode != 0
            assert "cmd: - systemd-analyze - verify" in plain(done.stdout)


def test_a_server_that_dies_at_start_is_rolled_back_and_the_old_one_serves_meanwhile_and_again(target: Target) -> None:
    before = target.state()
    watch = "while sleep 1; do systemctl show --property=MainPID --value sglang; done"
    with changed(target, f"systemd-run --unit=watch --collect sh -c '{watch}'", "systemctl stop watch"):
        # Its port is not the former one's, which must be waited for on its own.
        done = target.deploy(
            service_port=30010,
            service_server_arguments=target.server_arguments() | {"no-such-argument": True},
            **OTHER_RELEASE,
        )
        seen = target.sh("journalctl --unit=watch --output=cat").split()
    output = plain(done.stdout)
    assert done.returncode != 0
    assert "died while starting" in output
    assert re.search(r"^ *sglang serve: error: .*no-such-argument$", done.stdout, re.MULTILINE), "no lines of its log"
    assert f"The former deployment {before.deployment} was activated again and is ready" in output
    after = target.state()
    assert after.deployment == before.deployment
    assert target.is_healthy()
    # One server until the switch, one that died, one since.
    pids = list(dict.fromkeys(pid for pid in seen if pid.isdigit() and pid != "0"))
    assert pids[0] == str(before.main_pid)
    assert pids[-1] == str(after.main_pid)
    assert len(pids) <= 3


def test_a_killed_scheduler_is_reported_by_the_load_test_and_systemd_starts_the_service_again(target: Target) -> None:
    before = target.state()
    load = target.rehearsal.popen_fab("load", "--concurrency=10", "--requests=400", "--warm-up=0", "--json")
    eventually(lambda: '"running": 0' not in target.sh("cat /run/sglang/rank-0.json"))
    target.sh("kill -KILL $(pgrep --full --uid sglang sglang::scheduler)")
    output, _ = load.communicate(timeout=300)
    assert load.returncode == 1
    entry = json.loads(output)["hosts"][0]
    counts = entry["requests"]
    errors = counts["failed"] + counts["lost"] + counts["unreached"]
    assert counts["sent"] == counts["answered"] + errors < 400
    assert sum(error["count"] for error in entry["errors"]) == errors > 0
    reasons = "\n".join(entry["reasons"])
    assert f"requests without an answer: {errors} (" in reasons
    assert f"{400 - counts['sent']} of 400 were not sent any more" in reasons
    assert "GET /server_info: " in reasons
    eventually(lambda: target.state().main_pid not in (0, before.main_pid))
    eventually(target.is_healthy)
    assert target.state().deployment == before.deployment
    assert target.sh("systemctl show --property=NRestarts --value sglang") == "1"
    assert target.rehearsal.fab("verify-worker").returncode == 0


def test_one_killed_rank_of_two_ends_the_service_and_systemd_starts_both_again(target: Target) -> None:
    former = target.state().deployment
    two_ranks = target.server_arguments() | {"tp-size": 2}
    done = target.deploy("--skip-tags", "load", service_server_arguments=two_ranks)
    assert done.returncode == 0, done.stdout
    before = target.state()
    restarts = target.sh("systemctl show --property=NRestarts --value sglang")
    assert "all 2 ranks run the patched EAGLEWorker" in target.rehearsal.fab("verify-worker").stdout
    load = target.rehearsal.popen_fab("load", "--concurrency=10", "--requests=400", "--warm-up=0", "--json")
    eventually(lambda: '"running": 0' not in target.sh("cat /run/sglang/rank-1.json"))
    target.sh("kill -KILL $(pgrep --full --uid sglang sglang::scheduler_TP1)")
    verdict = target.rehearsal.fab("verify-worker")
    assert verdict.returncode in (1, 3), verdict.stdout  # a rank is missing, or the service is starting again
    output, _ = load.communicate(timeout=300)
    assert load.returncode == 1
    counts = json.loads(output)["hosts"][0]["requests"]
    assert counts["sent"] == counts["answered"] + counts["failed"] + counts["lost"] + counts["unreached"] < 400
    eventually(lambda: target.state().main_pid not in (0, before.main_pid))
    eventually(target.is_healthy, seconds=300)
    assert target.state().deployment == before.deployment
    assert int(target.sh("systemctl show --property=NRestarts --value sglang")) == int(restarts) + 1
    assert "all 2 ranks run the patched EAGLEWorker" in target.rehearsal.fab("verify-worker").stdout
    done = target.rehearsal.run_playbook("playbooks/rollback.yml", "-e", f"rollback_to={former}")
    assert done.returncode == 0, done.stdout


def test_what_a_cut_off_deploy_switched_to_is_gone_back_from_when_its_second_run_fails(target: Target) -> None:
    former = target.state().deployment
    with PlaybookUnderWay(target, "deploy.yml", "-e", json.dumps({"threshold": 6})) as deploy:
        deploy.run_until("acceptance : Run the diagnostics on the controller")
        deploy.kill()
    assert target.state().deployment != former
    done = target.deploy("--skip-tags", "load", threshold=6, acceptance_accept_length_floor=99)
    assert done.returncode != 0
    assert f"The former deployment {former} was activated again and is ready" in plain(done.stdout)
    assert target.state().deployment == former
    assert target.rehearsal.fab("verify-worker").returncode == 0


def test_a_roll_back_by_hand_and_back(target: Target) -> None:
    first = target.state().deployment
    done = target.deploy("--skip-tags", "load", threshold=0)
    assert done.returncode == 0, done.stdout
    second = target.state().deployment
    assert second != first
    done = target.rehearsal.run_playbook("playbooks/rollback.yml")
    assert done.returncode == 0, done.stdout
    assert target.state().deployment == first
    done = target.rehearsal.run_playbook("playbooks/rollback.yml", "-e", "rollback_to=000000000000")
    assert done.returncode != 0
    assert "has no deployment '000000000000'" in plain(done.stdout)
    assert target.state().deployment == first
