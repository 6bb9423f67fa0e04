"""What a batch of hosts behind a router does when one of them fails at the end of its turn.

The playbooks' own tasks run on this machine; no host may be restarted or stopped while the router sends it requests.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml
from test_deploy_refusals import LOCAL, ROOT, deploy, local_play


def batch_with_a_router(tmp_path: Path, **hosts: dict[str, str]) -> tuple[str, list[str]]:
    """What a failed turn of `hosts` says, and what was done to whom in this order; `new` is what is deployed.

    Each host has a former deployment, `old`, unless its `former` is empty; `fails` is what fails on it. Of the role
    service the recording is the real one; its other tasks and the router's write down what they would do.
    """
    tasks = yaml.safe_load((ROOT / "playbooks/tasks/roll.yml").read_text())
    block = next(task for task in tasks if "block" in task)
    steps = [step for step in block["block"] if step["name"] in {"Switch", "Finish"}]
    look = tasks[0]
    service, router = tmp_path / "roles/service/tasks", tmp_path / "roles/router/tasks"
    for folder in (service, router, tmp_path / "roles/service/vars"):
        folder.mkdir(parents=True)
    for name in ("record.yml", "withdraw.yml"):
        text = (ROOT / "roles/service/tasks" / name).read_text()
        (service / name).write_text(re.sub(r"\n *(owner|group): root", "", text))
    role_variables = yaml.safe_load((ROOT / "roles/service/vars/main.yml").read_text())
    (service.parent / "vars/main.yml").write_text(
        yaml.safe_dump({
            "_service_root": "{{ playbook_dir }}/{{ inventory_hostname }}",
            "_service_fact": "{{ _service_root }}/facts/sglang.fact",
            "_service_recorded_id": role_variables["_service_recorded_id"],
            "_service_commit": "echo commit",
        })
    )  # fmt: skip
    done = "- ansible.builtin.shell: echo '{{ inventory_hostname }} %s' >>'{{ playbook_dir }}/done'\n"
    fails = "- ansible.builtin.fail: {msg: %s}\n  when: fails == '%s' and service_active_id == 'new'\n"
    (service / "active.yml").write_text(
        "- ansible.builtin.set_fact:\n    service_active_id: '{{ serves | default(former) }}'\n"
        "    service_active: \"{{ {'address': inventory_hostname, 'port': 1, 'release': 'r', 'threshold': 5,"
        " 'keys': []} if serves | default(former) else {} }}\"\n"
    )
    (service / "compare.yml").write_text(
        "- ansible.builtin.import_tasks: active.yml\n"
        "- ansible.builtin.slurp: {src: '{{ _service_fact }}'}\n  register: _service_recorded\n  failed_when: false\n"
        "- ansible.builtin.set_fact: {service_restart: true, service_switched: true}\n"
        "- ansible.builtin.set_fact: {service_former_id: '{{ former }}'}\n"
    )
    (service / "activate.yml").write_text(
        done % "starts {{ service_deployment_id }}"
        + "- ansible.builtin.set_fact: {serves: '{{ service_deployment_id }}'}\n"
    )
    (service / "stop.yml").write_text(done % "stops")
    (router / "drain.yml").write_text(fails % ("busy", "drain") + done % "drained")
    (router / "put_back.yml").write_text(done % "put back" + fails % ("unhealthy", "put back"))
    lines = []
    for name, given in hosts.items():
        variables = {"former": "old", "fails": ""} | given
        lines.append(" ".join([name, LOCAL, "service_name=sglang", *(f"{k}='{v}'" for k, v in variables.items())]))
        root = tmp_path / name
        root.mkdir()
        if variables["fails"] == "record":
            (root / "facts").touch()
        elif variables["former"]:
            (root / "facts").mkdir()
            (root / "facts/sglang.fact").write_text('{"deployment": "old"}\n')
            (root / "previous").symlink_to("deployments/older")
    lines += ["[sglang_router]", f"front {LOCAL}"]
    turn = [look, block | {"block": steps}]
    playbook = local_play(tmp_path, turn, serial="100%", vars={"service_deployment_id": "new"})
    status, output = deploy(tmp_path, hosts="\n".join(lines), playbook=playbook)
    assert status != 0
    return output, (tmp_path / "done").read_text().splitlines()


def undrained(done: list[str], *routed: str) -> list[str]:
    """What was started or stopped while the router sent requests to it; at first it does to those `routed`."""
    takes = set(routed)
    found = []
    for entry in done:
        host, _, what = entry.partition(" ")
        if what == "put back":
            takes.add(host)
        elif what == "drained":
            takes.discard(host)
        elif host in takes:
            found.append(entry)
    return found


def of(host: str, done: list[str]) -> list[str]:
    return [what for name, _, what in (entry.partition(" ") for entry in done) if name == host]


def test_no_host_is_put_back_before_all_of_its_batch_are_recorded(tmp_path: Path) -> None:
    output, done = batch_with_a_router(tmp_path, healthy={}, full={"fails": "record"})
    assert undrained(done, "healthy", "full") == []
    for host, reason in {
        "healthy": "The deploy failed on another host",
        "full": "Create the folder of local facts",
    }.items():
        assert of(host, done) == ["drained", "starts new", "starts old", "put back"]
        assert f"fatal: [{host}]: FAILED! => changed: false msg: |- {reason}" in output
    assert "was activated again and is ready. The routers send it requests again." in output
    assert (tmp_path / "healthy/facts/sglang.fact").read_text() == '{"deployment": "old"}\n'
    assert os.readlink(tmp_path / "healthy/previous") == "deployments/older"


def test_a_batch_that_goes_back_after_a_host_was_put_back_is_drained_again(tmp_path: Path) -> None:
    output, done = batch_with_a_router(
        tmp_path, healthy={}, sick={"fails": "put back"}, busy={"fails": "drain"}, first={"former": ""}
    )
    assert undrained(done, "healthy", "sick", "busy") == []
    turn = ["drained", "starts new", "put back"]
    assert of("healthy", done) == of("sick", done) == [*turn, "drained", "starts old", "put back"]
    assert of("first", done) == ["starts new", "put back", "drained", "stops"]
    # It has proved itself, so it goes on serving, and that is what the record says.
    assert of("busy", done) == [*turn, "put back"]
    records = {name: (tmp_path / name / "facts/sglang.fact") for name in ("healthy", "sick", "busy", "first")}
    assert records["healthy"].read_text() == records["sick"].read_text() == '{"deployment": "old"}\n'
    assert json.loads(records["busy"].read_text())["deployment"] == "new"
    assert not records["first"].exists()
    assert os.readlink(tmp_path / "sick/previous") == "deployments/older"
    assert os.readlink(tmp_path / "busy/previous") == "deployments/old"
    assert "the new deployment, which has proved itself, goes on serving. busy The routers send it requests" in output


def test_a_roll_does_not_go_on_after_a_host_that_was_lost_in_its_turn(tmp_path: Path) -> None:
    """Ansible's own count of the batch's lost hosts has let it begin the next one."""
    lost, begin = yaml.safe_load((ROOT / "playbooks/tasks/roll.yml").read_text())[1:3]
    hosts = f"lost {LOCAL} deploy_turn=begun\nnext {LOCAL}"
    lost["ansible.builtin.import_tasks"] = "tasks/lost.yml"
    status, output = deploy(tmp_path, hosts=hosts, playbook=local_play(tmp_path, [lost, begin], serial=1))
    assert status != 0
    assert "next: lost was lost in its turn, so the roll ends. This host was not touched." in output
    assert "ok: [next]" not in output
