"""Hosts come from Ansible's inventory as a play sees them, and reach OpenSSH as Ansible would hand them on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnostics.connect import parse_settings
from diagnostics.inventory import Host, UsageError, load_hosts, ssh_options

INVENTORY = """\
sglang_hosts:
  hosts:
    near:
      ansible_host: 192.0.2.7
      ansible_port: 2222
      ansible_user: ops
      ansible_ssh_private_key_file: "{{ inventory_dir }}/keys/id with space"
    far:
      ansible_ssh_common_args: "-F {{ hostvars['near'].ansible_host }}/ssh_config"
      release_root: "/srv/{{ service_name }}/"
      service_port: "{{ 30000 + 1 }}"
  vars:
    service_name: "{{ lookup('ansible.builtin.env', 'SPECGATE_TEST_NAME') }}"
others:
  hosts:
    idle:
sglang_router:
  hosts:
    front:
    near:
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPECGATE_TEST_NAME", "sgl")
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY)
    return str(path)


def write(folder: Path, text: str) -> str:
    path = folder / "hosts.yml"
    path.write_text(text)
    return str(path)


def by_name(hosts: list[Host]) -> dict[str, Host]:
    return {host.name: host for host in hosts}


def test_a_hosts_variables_are_templated_when_they_are_asked_for(tmp_path: Path) -> None:
    """A variable that cannot be used stops only who needs it."""
    text = "all: {hosts: {a: {x: {y: ['{{ z }}', 2]}, z: deep, broken: '{{ nowhere }}'}}}"
    (host,) = load_hosts([write(tmp_path, text)])
    given = host.given(["x", "absent"])
    assert json.loads(json.dumps(given)) == given == {"x": {"y": ["deep", 2]}}
    with pytest.raises(UsageError, match="a: a variable of the inventory cannot be used"):
        host.given(["x", "broken"])


def test_variables_are_those_of_a_play(inventory: str, tmp_path: Path) -> None:
    hosts = by_name(load_hosts([inventory]))
    assert sorted(hosts) == ["far", "idle", "near"]
    near, far, idle = hosts["near"], hosts["far"], hosts["idle"]
    assert near.address == "192.0.2.7"
    assert "Port=2222" in near.ssh_options
    assert 'User="ops"' in near.ssh_options
    assert f'IdentityFile="{tmp_path}/keys/id with space"' in near.ssh_options
    assert far.address == "far"
    assert far.ssh_options[-2:] == ("-F", "192.0.2.7/ssh_config")
    assert (far.service_name, far.release_root, far.unit) == ("sgl", "/srv/sgl", "sgl.service")
    assert far.deployment_path == "/srv/sgl/current/deployment.json"
    assert (idle.service_name, idle.release_root) == ("sglang", "/opt/sglang")
    assert (far.service_port, idle.service_port) == (30001, None)


def test_variables_equal_what_ansible_shows_in_a_play(inventory: str) -> None:
    """The judge is Ansible's own command line, for a variable that ansible-inventory leaves as a template."""
    shown = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "far", "-i", inventory, "-m", "debug", "-a", "var=release_root"],
        env=os.environ | {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(shown.stdout[shown.stdout.index("{") :])
    (far,) = load_hosts([inventory], "far")
    assert far.release_root == document["release_root"].rstrip("/")


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        ("near", ["near"]),
        ("sglang_hosts", ["far", "near"]),
        ("all:!far", ["idle", "near"]),
        ("*ar", ["far", "near"]),
        (None, ["far", "idle", "near"]),
    ],
)
def test_limit_takes_patterns_of_ansible(inventory: str, limit: str | None, names: list[str]) -> None:
    assert sorted(host.name for host in load_hosts([inventory], limit)) == names


def test_a_limit_that_matches_nothing_names_the_known_hosts(inventory: str) -> None:
    with pytest.raises(
        UsageError, match=r"'nowhere' matches no host; known hosts: far, front, idle, near; groups: .*sglang_hosts"
    ):
        load_hosts([inventory], "nowhere")


def test_a_limit_does_not_stick(inventory: str) -> None:
    assert len(load_hosts([inventory], "near")) == 1
    assert len(load_hosts([inventory])) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all:\n  hosts: {}\n", "names no host"),
        ("all: [broken\n", "names no host"),
        ("all:\n  hosts:\n    a:\n      release_root: '{{ nope }}/x'\n", "a: a variable .* cannot be used: .*nope"),
        ("all:\n  hosts:\n    a:\n      release_root: opt/sglang\n", "a: release_root is 'opt/sglang'; .* absolute"),
        ("all:\n  hosts:\n    a:\n      service_port: http\n", "a: service_port is 'http'; .* number"),
        ("all:\n  hosts:\n    a:\n      ansible_connection: local\n", "a: ansible_connection is 'local'; .* SSH only"),
        ("all:\n  hosts:\n    a:\n      ansible_password: secret\n", "a: ansible_password is set; .* keys only"),
    ],
)
def test_an_inventory_that_cannot_serve_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        load_hosts([write(tmp_path, text)])
    assert "secret" not in str(refused.value)


def test_an_inventory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none' does not exist; give an inventory"):
        load_hosts([str(tmp_path / "none")])


def test_inventories_add_up(inventory: str, tmp_path: Path) -> None:
    more = tmp_path / "more.yml"
    more.write_text("sglang_hosts:\n  hosts:\n    third:\n")
    hosts = by_name(load_hosts([inventory, str(more)], "sglang_hosts"))
    assert sorted(hosts) == ["far", "near", "third"]
    assert hosts["third"].service_name == "sgl"  # a variable of the group, from the other file


def test_a_vault_opens_as_it_does_for_ansible(tmp_path: Path) -> None:
    """In a process of its own, because Ansible reads where the password is once, when it is imported."""
    (tmp_path / "password").write_text("open sesame\n")
    (tmp_path / "group_vars").mkdir()
    variables = tmp_path / "group_vars" / "all.yml"
    variables.write_text("service_name: hidden\n")
    environment = os.environ | {"ANSIBLE_VAULT_PASSWORD_FILE": str(tmp_path / "password")}
    vault = Path(sys.executable).with_name("ansible-vault")
    subprocess.run([vault, "encrypt", variables], env=environment, check=True, capture_output=True)
    assert variables.read_text().startswith("$ANSIBLE_VAULT")
    inventory = write(tmp_path, "all:\n  hosts:\n    a:\n")
    script = "import sys; from diagnostics.inventory import load_hosts; print(load_hosts(sys.argv[1:])[0].unit)"
    shown = subprocess.run(
        [sys.executable, "-c", script, inventory], env=environment, check=True, capture_output=True, text=True
    )
    assert shown.stdout == "hidden.service\n"


def test_options_keep_the_order_of_ansibles_plugin() -> None:
    """OpenSSH takes the first value of an option, so another order would mean another connection."""
    options = {
        "ssh_args": "-o ControlMaster=auto",
        "port": 2200,
        "private_key_file": "/k",
        "remote_user": "u",
        "ssh_common_args": "-F 'a b'",
        "ssh_extra_args": "-v",
    }
    assert ssh_options(options) == (
        *("-o", "ControlMaster=auto"),
        *("-o", "Port=2200"),
        *("-o", 'IdentityFile="/k"'),
        *("-o", 'User="u"'),
        *("-F", "a b"),
        "-v",
    )
    assert ssh_options({"ssh_args": None, "port": None}) == ()


HOST = Host("a", "a", "ssh", ("-F", "conf"), "/opt/sglang", "sglang")
BASE = "hostname 192.0.2.9\nport 22\nuser ops\nglobalknownhostsfile /g1 /g2\nuserknownhostsfile ~/k\n"


def test_settings_of_openssh_are_understood(tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.touch()
    settings = parse_settings(f"{BASE}identityfile {key}\nidentityfile ~/.ssh/absent\n", HOST)
    assert (settings.hostname, settings.port, settings.user) == ("192.0.2.9", 22, "ops")
    assert settings.identity_files == (str(key),)
    assert settings.known_hosts_files == (str(Path.home() / "k"), "/g1", "/g2")
    assert (settings.host_key_alias, settings.proxy_command) == (None, None)
    assert settings.key_name == "192.0.2.9"


def test_another_port_is_part_of_the_host_keys_name() -> None:
    assert parse_settings(BASE.replace("port 22", "port 2222"), HOST).key_name == "[192.0.2.9]:2222"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("proxyjump none", None),
        ("proxycommand nc %h %p", "nc %h %p"),
        ("proxyjump gate", "ssh -F conf -W '[192.0.2.9]:22' ssh://gate"),
        ("proxyjump one,two", "ssh -F conf -J one -W '[192.0.2.9]:22' ssh://two"),
        ("proxyjump ops@gate:2200", "ssh -F conf -W '[192.0.2.9]:22' ssh://ops@gate:2200"),
    ],
)
def test_jump_hosts_become_a_command(line: str, command: str | None) -> None:
    assert parse_settings(f"{BASE}{line}\n", HOST).proxy_command == command


def test_a_jump_does_not_jump_itself() -> None:
    host = replace(HOST, ssh_options=("-o", "ProxyJump=gate", "-o", "Port=22"))
    assert parse_settings(f"{BASE}proxyjump gate\n", host).proxy_command == "ssh -W '[192.0.2.9]:22' ssh://gate"
