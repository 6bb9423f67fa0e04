"""What deploy.yml refuses, and what it does with all hosts when one of them failed.

Most is refused before it speaks to any host: the host of those inventories cannot be reached. The rest runs the
playbooks' own tasks on this machine, with nothing but the activation left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOST = "gpu-1 ansible_ssh_executable=/bin/false"


ARGUMENTS = 'service_server_arguments={"model-path": "/m", "max-running-requests": 8}'
LOCAL = "ansible_connection=local ansible_python_interpreter='{{ ansible_playbook_python }}'"


def deploy(
    tmp_path: Path,
    *arguments: str,
    hosts: str = HOST,
    variables: str = "threshold=5",
    playbook: str | Path = "deploy.yml",
) -> tuple[int, str]:
    inventory = tmp_path / "inventory.ini"
    inventory.write_text(f"[sglang_hosts]\n{hosts}\n[all:vars]\n{variables}\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook, *arguments],
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1", "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("given", ["abc", "-1", "5.5", "", "1e3", "Auto"])
def test_a_wrong_threshold_is_refused(tmp_path: Path, given: str) -> None:
    status, output = deploy(tmp_path, "-e", f"threshold={given}")
    assert status != 0
    assert f'threshold is "{given}". Allowed is a non-negative integer' in output
    assert "-e threshold=5" in output
    assert "Nothing was touched" in output


@pytest.mark.parametrize(
    ("budget", "arguments", "reason"),
    [
        ("5 minutes", '{"speculative-algorithm": "EAGLE3"}', 'calibration_budget is "5 minutes". Allowed is a time'),
        ("0s", '{"speculative-algorithm": "EAGLE3"}', 'calibration_budget is "0s". Allowed is a time'),
        ("5m", "{}", "service_server_arguments has no speculative-algorithm: there is nothing to measure"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, budget: str, arguments: str, reason: str) -> None:
    given = json.loads(arguments) | {"model-path": "/m", "max-running-requests": 8}
    variables = {"threshold": "auto", "calibration_budget": budget, "service_server_arguments": given}
    status, output = deploy(tmp_path, "-e", json.dumps(variables))
    assert status != 0
    assert reason in output
    assert "Nothing was touched" in output


@pytest.mark.parametrize("given", ["0", '"some"', '[1, "0%"]', '[1, "101%"]', "{}"])
def test_a_wrong_batch_is_refused(tmp_path: Path, given: str) -> None:
    status, output = deploy(tmp_path, "-e", f'{{"deploy_serial": {given}}}')
    assert status != 0
    assert f"deploy_serial is {given}. Allowed is how many hosts switch at a time" in output
    assert "Nothing was touched" in output


@pytest.mark.parametrize("given", ["true", "5.0"])
def test_a_threshold_of_another_type_is_refused(tmp_path: Path, given: str) -> None:
    status, output = deploy(tmp_path, "-e", f'{{"threshold": {given}}}')
    assert status != 0
    assert "Allowed is a non-negative integer" in output


def test_a_missing_threshold_is_refused(tmp_path: Path) -> None:
    status, output = deploy(tmp_path, variables="")
    assert status != 0
    assert "threshold is missing. Allowed is a non-negative integer" in output


def test_a_misspelt_extra_variable_is_refused_with_the_nearest(tmp_path: Path) -> None:
    status, output = deploy(tmp_path, "-e", "treshold=5", "-e", "service_port=30001")
    assert status != 0
    assert "Unknown variable 'treshold' on the command line (-e). Did you mean 'threshold'?" in output
    assert "'service_port'" not in output


def test_a_misspelt_variable_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "extra.yml").write_text("treshold: 5\n")
    status, output = deploy(tmp_path, "-e", f"@{tmp_path / 'extra.yml'}")
    assert status != 0
    assert "Did you mean 'threshold'?" in output


def test_a_misspelt_variable_of_a_role_in_the_inventory_is_refused(tmp_path: Path) -> None:
    status, output = deploy(tmp_path, variables="threshold=5\nservice_prot=30001")
    assert status != 0
    assert "Unknown variable 'service_prot' in the inventory. Did you mean 'service_port'?" in output


def test_good_variables_are_followed_by_a_connection(tmp_path: Path) -> None:
    """Without this, the tests above could pass because nothing is accepted."""
    status, output = deploy(tmp_path, "-e", "threshold=0", variables=ARGUMENTS)
    assert status != 0
    assert "Cannot become root on gpu-1" in output


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    hosts = "gpu-1 ansible_host=127.0.0.1 ansible_port=1"
    status, output = deploy(tmp_path, "-e", "threshold=0", variables=ARGUMENTS, hosts=hosts)
    assert status != 0
    assert "gpu-1 cannot be reached: " in output
    assert "--limit 'all:!gpu-1'. Nothing that serves was touched." in output
    assert "Cannot become root" not in output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{}", "service_server_arguments has nothing. It must name model-path and max-running-requests"),
        ('{"model-path": "/m"}', "service_server_arguments has model-path. It must name model-path and"),
        (
            '{"model-path": "/m", "max-running-requests": 8, "port": 1}',
            "port, speculative-disable-batch-threshold, speculative-gate-profile, config have",
        ),
        ('{"model-path": "/m", "max-running-requests": 8, "--tp-size": 1}', "written without leading dashes"),
        ('{"model-path": "/m", "max-running-requests": 8, "api-key": "k"}', "service_server_arguments has api-key."),
        ('{"model-path": "/m", "max-running-requests": 8, "admin-api-key": "k"}', "has admin-api-key."),
    ],
)
def test_wrong_arguments_of_the_server_are_refused(tmp_path: Path, given: str, reason: str) -> None:
    status, output = deploy(tmp_path, variables=f"threshold=5\nservice_server_arguments={given}")
    assert status != 0
    assert reason in output
    assert "Nothing was touched" in output
    assert "Cannot become root" not in output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("acceptance_max_errors=-1", "acceptance_max_errors is -1. Allowed is a number from 0 to 1000000"),
        ("acceptance_throughput_loss_limit=101", "is 101. Allowed is a number from 0 to 100: per cent, or 0"),
        ("acceptance_ttft_p95_limit=nan", "acceptance_ttft_p95_limit is nan. Allowed is a number from 0 to 86400"),
        ("acceptance_accept_length_floor=high", "'acceptance_accept_length_floor' is of type"),
        ("acceptance_on_failure=stay", "must be one of: roll-back, keep, got: stay"),
    ],
)
def test_limits_of_acceptance_that_are_none_are_refused(tmp_path: Path, given: str, reason: str) -> None:
    status, output = deploy(tmp_path, "-e", given, "-e", "threshold=0", variables=ARGUMENTS)
    assert status != 0
    assert reason in output
    assert "Cannot become root" not in output


@pytest.mark.parametrize("name", ["release_root", "service_name"])
@pytest.mark.parametrize("playbook", ["deploy.yml", "playbooks/rollback.yml"])
def test_what_fab_reads_from_the_inventory_is_refused_on_the_command_line(
    tmp_path: Path, name: str, playbook: str
) -> None:
    status, output = deploy(tmp_path, "-e", f"{name}=/opt/other", playbook=playbook)
    assert status != 0
    assert f"'{name}' is given on the command line (-e), where `fab` does not see it" in output
    assert "Set it in the inventory. Nothing was touched" in output


@pytest.mark.parametrize("given", ["127.0.0.1", "localhost", None])
def test_a_server_that_its_router_cannot_reach_is_refused(tmp_path: Path, given: str | None) -> None:
    address = f"\nservice_address={given}" if given else ""
    hosts = f"{HOST}\n[sglang_router]\nfront ansible_ssh_executable=/bin/false"
    status, output = deploy(tmp_path, hosts=hosts, variables=f"threshold=5\n{ARGUMENTS}{address}")
    assert status != 0
    assert f"service_address is {given or '127.0.0.1'}, and the inventory has a router" in output
    assert "Nothing was touched" in output
    assert "Cannot become root" not in output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "has no former deployment"),
        ("r9", "has no deployment 'r9', and none of a release of that name"),
        ("r1", "has 2 deployments of the release 'r1'"),
    ],
)
def test_a_roll_back_to_nothing_or_to_one_of_several_is_refused(tmp_path: Path, given: str, reason: str) -> None:
    for name, release in {"d1": "r1", "d2": "r1", "d3": "r3"}.items():
        folder = tmp_path / "sglang/deployments" / name
        folder.mkdir(parents=True)
        (folder / "deployment.json").write_text(json.dumps({"id": name, "release": release}))
    host = f"gpu-1 {LOCAL} ansible_become=false release_root={tmp_path}/sglang"
    status, output = deploy(tmp_path, "-e", f"rollback_to={given}", hosts=host, playbook="playbooks/rollback.yml")
    assert status != 0
    assert f"gpu-1 {reason}" in output
    assert '{"d1": "r1", "d2": "r1", "d3": "r3"}. No host was touched.' in output


def test_the_last_healthy_host_is_not_drained_nor_any_without_its_router(tmp_path: Path) -> None:
    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            workers = [{"url": f"http://{host}", "id": host, "is_healthy": host == "a"} for host in ("a", "b")]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"workers": workers}).encode())

        def log_message(self, *_: object) -> None:
            pass

    def drain(play: str) -> str:
        asked = {"router_hosts": ["front"], "router_worker": "http://a", "router_worker_key": ""}
        role = {"name": "router", "tasks_from": "drain"}
        tasks = [{"ansible.builtin.include_role": role, "vars": asked | {"router_batch": ["http://a"]}}]
        (tmp_path / play).mkdir()
        hosts = f"a {LOCAL}\nb {LOCAL}\n[sglang_router]\nfront {LOCAL}"
        variables = f"router_port={server.server_address[1]}"
        status, output = deploy(
            tmp_path, "--limit=a", hosts=hosts, variables=variables, playbook=local_play(tmp_path / play, tasks)
        )
        assert status != 0
        return output

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    output = drain("answers")
    assert "a: the router on front finds no other host healthy" in output
    assert "See to b first" in output
    server.shutdown()
    server.server_close()
    assert "a: the router on front does not answer (" in drain("silent")


@pytest.mark.parametrize("given", [(), ("-e", "purge=other")])
def test_a_purge_that_does_not_name_the_service_is_refused(tmp_path: Path, given: tuple[str, ...]) -> None:
    status, output = deploy(tmp_path, *given, playbook="playbooks/purge.yml")
    assert status != 0
    assert "the service that would be removed here is sglang. Name it to confirm: -e purge=sglang" in output
    assert "UNREACHABLE" not in output


@pytest.mark.parametrize(
    ("hosts", "arguments"), [("", ()), (HOST, ("--limit", "gpu-9")), (HOST, ("--limit", "localhost"))]
)
def test_a_play_without_hosts_is_an_error(tmp_path: Path, hosts: str, arguments: tuple[str, ...]) -> None:
    status, output = deploy(tmp_path, *arguments, hosts=hosts)
    assert status != 0
    assert "matched no host" in output or "leaves us with no hosts to target" in output


# In a deploy they come after the role cuda, which may have installed a driver and rebooted the host.
AFTER_PROVISIONING = [
    *(ROOT / "roles/release/tasks").iterdir(),
    ROOT / "roles/service/tasks/place.yml",
    ROOT / "roles/preflight/tasks/host.yml",
    ROOT / "roles/router/tasks/check.yml",
    ROOT / "plugins/action/host_checks.py",
]


@pytest.mark.parametrize("path", AFTER_PROVISIONING, ids=lambda path: str(path.relative_to(ROOT)))
def test_after_provisioning_no_refusal_claims_that_nothing_was_touched(path: Path) -> None:
    assert not re.search(r"Nothing\s+was\s+touched", path.read_text())


def local_play(tmp_path: Path, tasks: list[dict], **play: Any) -> Path:
    """A playbook of `tasks` that finds the files of playbooks/, to run on this machine without root."""
    for name in ("tasks", "templates"):
        (tmp_path / name).symlink_to(ROOT / "playbooks" / name)
    play = {"hosts": "sglang_hosts", "gather_facts": False, "any_errors_fatal": True, "tasks": tasks} | play
    playbook = tmp_path / "playbook.yml"
    playbook.write_text(yaml.safe_dump([play], sort_keys=False))
    return playbook


def test_when_one_host_fails_its_batch_goes_back_and_the_roll_ends(tmp_path: Path) -> None:
    """The rescue of deploy.yml itself; of the role service only the activation is replaced, by one that may fail."""
    _, _, begin, block, _, end = yaml.safe_load((ROOT / "playbooks/tasks/roll.yml").read_text())
    role = tmp_path / "roles/service/tasks"
    role.mkdir(parents=True)
    touch = "ansible.builtin.file: {path: '{{ playbook_dir }}/{{ inventory_hostname }}.%s', state: touch}\n"
    (role / "compare.yml").write_text("- ansible.builtin.set_fact: {service_restart: true}")
    (role / "activate.yml").write_text(
        "- ansible.builtin.fail: {msg: no answer}\n  when: inventory_hostname == 'stuck'\n"
        "- ansible.builtin.set_fact: {service_switched: false}\n"
        "- " + touch % "{{ service_deployment_id }}"
    )
    (role / "stop.yml").write_text("- " + touch % "stopped")
    stage = {
        "name": "Smoke-test",
        "ansible.builtin.fail": {"msg": "no tokens"},
        "when": "inventory_hostname == 'broken'",
    }
    hosts = "\n".join(
        f"{name} {LOCAL} service_name=sglang {state}"
        for name, state in {
            "broken": "service_switched=True service_former_id=f1",
            "healthy": "service_switched=True service_former_id=f2",
            "stuck": "service_switched=True service_former_id=f3",
            "first": "service_switched=True service_former_id=''",
            "idle": "service_switched=False service_former_id=f5",
        }.items()
    )
    hosts = f"before {LOCAL}\n{hosts}\nlater {LOCAL}"
    playbook = local_play(tmp_path, [begin, block | {"block": [stage]}, end], serial=[1, 5])
    status, output = deploy(tmp_path, hosts=hosts, playbook=playbook)
    assert status != 0
    assert {path.name for path in tmp_path.glob("*.*")} - {"inventory.ini", "playbook.yml"} == {
        "broken.f1",
        "healthy.f2",
        "first.stopped",
    }
    elsewhere = "The deploy failed on another host of the batch, so this one does not keep it either."
    others = "Done before, and kept: before. Not reached, and not switched: later. Where to look: `fab status`"
    for name, message in {
        "broken": f"Smoke-test: no tokens The former deployment f1 was activated again and is ready. {others}",
        "healthy": f"{elsewhere} The former deployment f2 was activated again and is ready. {others}",
        "stuck": f"{elsewhere} GOING BACK FAILED TOO: the former deployment f3 does not serve. no answer",
        "first": f"{elsewhere} There was no former deployment to go back to, so the service was stopped;",
        "idle": f"{elsewhere} This run had switched nothing, so there was nothing to go back to",
    }.items():
        assert f"fatal: [{name}]: FAILED! => changed: false msg: |- {message}" in output, output


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ('preflight_accepted=["iomu"]', "preflight_accepted names iomu; allowed are init, distribution,"),
        ('preflight_gpus={"count": "eight"}', "The variables of the checks cannot be used: invalid literal for int()"),
        ("preflight_memory_mb=999999999", "memory: "),
    ],
)
def test_an_unfit_host_and_wrong_expectations_are_refused(tmp_path: Path, variables: str, reason: str) -> None:
    """The checks run on this machine, which is asked for more memory than there is."""
    status, output = deploy(
        tmp_path, hosts=f"gpu-1 {LOCAL}", variables=f"{ARGUMENTS}\n{variables}",
        playbook=local_play(tmp_path, [{"host_checks": None}]),
    )  # fmt: skip
    assert status != 0
    assert reason in output
    assert "was touched" in output


ROUTER_FACTS = {
    "schema": "specgate.host_facts/1",
    "init": "systemd",
    "os": {"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian 12"},
    "architecture": "x86_64",
    "kernel": "6.1.0-40-amd64",
    "container": "",
    "memory": {"MemTotal": 2 << 20, "HugePages_Total": 0},
    "transparent_huge_pages": "always [madvise] never",
    "disk": {"path": "/opt", "free": 4 << 30},
    "listeners": {"30080": [{"pid": 7, "program": "python", "unit": "sglang-router.service"}], "30081": []},
    "clock": "yes",
    "reboot_required": False,
    "deployed_arguments": None,
    "models": {},
    "problems": [],
}
STRANGER = {"30080": [], "30081": [{"pid": 8, "program": "nginx", "unit": "nginx.service"}]}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        ({"listeners": STRANGER}, "port 30081 is in use by nginx.service 8 nginx (unit, process id, program), not by"),
        ({"memory": {"MemTotal": 1 << 18}}, "preflight_memory_mb asks for 512 MiB"),
    ],
)
def test_a_routers_host_needs_neither_gpus_nor_models(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    """The Blackwell example names GPUs, CUDA and models for all hosts. A stand-in for python3 tells the facts."""
    (tmp_path / "facts.json").write_text(json.dumps(ROUTER_FACTS | facts))
    programs = {"python3": f"exec cat {tmp_path}/facts.json", "id": "echo 0"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    tasks = yaml.safe_load((ROOT / "playbooks/tasks/check_router.yml").read_text())
    playbook = local_play(tmp_path, tasks, hosts="sglang_router")
    inventory = tmp_path / "mine"
    shutil.copytree(ROOT / "inventory/blackwell/rtx-pro-6000", inventory)
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text())
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts["all"]["children"]["sglang_router"] = {"hosts": {"router-1": local}}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook],
        cwd=ROOT,
        env=os.environ | {
            "ANSIBLE_NOCOLOR": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSIBLE_ROLES_PATH": f"{ROOT}/roles"
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    output = " ".join(done.stdout.split())
    assert (done.returncode == 0) == (reason == ""), output
    assert reason in output


@pytest.mark.parametrize("measured", [True, False])
def test_the_summary_tells_the_profile_the_number_it_stands_for_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """Of a profile that was stored before as well."""
    monkeypatch.setenv("ANSIBLE_ROLES_PATH", str(ROOT / "roles"))
    recommended = {"threshold": 8, "low_mark": 7, "kv_token_threshold": 4096}
    profile = {"id": "0123456789ab", "path": "/p.json", "made": "2026-01-01", "acceptance_seen": 3.3}
    profile |= {"recommended": recommended, "why": "speculation pays below 8 requests"}
    facts = {
        "release_root": str(tmp_path),
        "service_name": "sglang",
        "service_address": "127.0.0.1",
        "service_port": 30000,
        "service_deployment_id": "d1",
        "release_id": "r1",
        "calibration_profile": profile,
        "calibration_refused": [{"path": "/q.json", "reason": "driver was 1 and is 2"}],
        "calibration_measured": measured,
    }
    task = {"ansible.builtin.include_tasks": "tasks/summary.yml"}
    playbook = local_play(tmp_path, [task])
    status, output = deploy(
        tmp_path, "-e", json.dumps(facts), hosts=f"gpu-1 {LOCAL}", variables="threshold=auto", playbook=playbook
    )
    assert status == 0, output
    assert "gpu-1 serves on 127.0.0.1:30000, gate decides by profile 0123456789ab" in output
    assert "threshold 8 would be the number for an acceptance of 3.3, and 4096 KV tokens; speculation pays" in output
    assert f"profile /p.json, measured {'by this run' if measured else '2026-01-01'}" in output
    assert ("not used /q.json: driver was 1 and is 2" in output) == measured


@pytest.mark.parametrize("deployed", [True, False])
def test_the_summary_tells_the_threshold_only_of_a_deployment_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployed: bool
) -> None:
    """With `--tags verify,summary` the variable need not be what serves."""
    monkeypatch.setenv("ANSIBLE_ROLES_PATH", str(ROOT / "roles"))
    facts = f"release_root={tmp_path} service_name=sglang service_address=127.0.0.1 service_port=30000"
    facts += " service_deployment_id=d1 release_id=r1" if deployed else ""
    task = {"ansible.builtin.include_tasks": "tasks/summary.yml"}
    status, output = deploy(tmp_path, hosts=f"gpu-1 {LOCAL} {facts}", playbook=local_play(tmp_path, [task]))
    assert status == 0
    assert "gpu-1 serves on 127.0.0.1:30000" in output
    assert ("closes at 5 running requests" in output) == deployed


SMOKE = {"name": "accept length of a single request", "found": 1.0, "rule": "more than", "allowed": 1.2, "kept": False}


def test_a_missed_limit_is_kept_only_where_that_is_asked_for_and_nothing_else_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role acceptance itself; in place of `fab` a program that prints what it would."""
    monkeypatch.setenv("ANSIBLE_ROLES_PATH", str(ROOT / "roles"))
    fab = tmp_path / "fab"
    fab.write_text('#!/bin/sh\necho "$1"\nexit $2\n')
    fab.chmod(0o755)
    facts = f"{LOCAL} release_root={tmp_path} service_name=sglang service_address=127.0.0.1 service_port=30000"

    def accept(**hosts: tuple[str, list[str], int]) -> tuple[int, str]:
        lines = []
        for name, (on_failure, reasons, status) in hosts.items():
            entry = {"ok": False, "reasons": reasons, "limits": [SMOKE]}
            document = json.dumps({"hosts": [entry]}).replace('"', '\\"')
            lines.append(f'{name} {facts} acceptance_on_failure={on_failure} printed="{document}" status={status}')
        command = [str(fab), "{{ printed }}", "{{ status }}"]
        tasks = [
            {
                "ansible.builtin.include_role": {"name": "acceptance"},
                "vars": {"acceptance_task": "smoke", "_acceptance_command": command},
            },
            {"ansible.builtin.include_tasks": "tasks/summary.yml"},
        ]
        for name in ("tasks", "templates"):
            (tmp_path / name).unlink(missing_ok=True)
        return deploy(tmp_path, hosts="\n".join(lines), playbook=local_play(tmp_path, tasks))

    status, output = accept(gpu=("keep", ["missed"], 1))
    assert status != 0
    assert "accept length of a single request: 1 (more than 1.2), MISSED" in output
    assert "gpu: missed. It serves all the same, as acceptance_on_failure is keep." in output
    status, output = accept(
        back=("roll-back", ["missed"], 1), other=("keep", ["missed", "restarted"], 1), slow=("keep", ["slow"], 3)
    )
    assert status != 0
    assert "It serves all the same" not in output
    for name, said in {"back": "1. missed.", "other": "1. missed; restarted.", "slow": "3. slow."}.items():
        assert f"{name}: `fab smoke` ended with status {said}" in output
