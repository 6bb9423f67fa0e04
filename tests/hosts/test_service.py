"""The unit on a rehearsal host: secrets, hardening, devices, orphans, and a second service beside it.

The tests share a host and run in this order: each finds what the last one left.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from deploy_target import Target, eventually, plain, recap
from rehearsal_commands import Rehearsal

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

KEY, NEW_KEY, ADMIN_KEY, TOKEN = (f"{name}-5kVq0zT8w3Ybn2" for name in ("key", "new-key", "admin-key", "token"))
SECRETS = {"service_api_key": KEY, "service_admin_api_key": ADMIN_KEY, "service_credentials": {"hf-token": TOKEN}}
URL = "http://127.0.0.1:30000"


@pytest.fixture(scope="module")
def target(rehearsal_host: Rehearsal) -> Target:
    return Target(rehearsal_host)


def answer(target: Target, path: str, key: str | None = None) -> tuple[int, str]:
    """Status and text that a client with *key* gets."""
    header = f"--header 'Authorization: Bearer {key}'" if key else ""
    # Without sudo, which would log the key.
    done = target.rehearsal.ssh(f"curl --silent {header} --write-out '\\n%{{http_code}}' {URL}{path}")
    text, _, status = done.stdout.strip().rpartition("\n")
    return int(status), text


def score(target: Target) -> float:
    """The exposure of the unit, from 0 (best) to 10, as systemd judges it."""
    found = re.search(r"exposure level for sglang.service: ([0-9.]+)", target.sh("systemd-analyze security sglang"))
    assert found
    return float(found[1])


def test_a_server_with_keys_is_deployed_and_proved_and_the_output_has_no_secret(target: Target, tmp_path: Path) -> None:
    done = target.deploy("-vv", "--skip-tags", "load", **SECRETS)
    assert done.returncode == 0, done.stdout
    assert "proof proved" in plain(done.stdout)
    assert not any(secret in done.stdout for secret in (KEY, ADMIN_KEY, TOKEN))
    # What the diagnostics keep has none either.
    assert target.rehearsal.fab("verify-worker", "--save", str(tmp_path)).returncode == 0
    assert not any(secret in next(tmp_path.iterdir()).read_text() for secret in (KEY, ADMIN_KEY, TOKEN))
    assert target.rehearsal.fab("status").returncode == 0


def test_the_same_secrets_change_nothing(target: Target) -> None:
    done = target.deploy("--tags", "release,patch,service", **SECRETS)
    assert (done.returncode, recap(done.stdout)["changed"]) == (0, 0), done.stdout


def test_only_who_has_a_key_is_answered_and_no_answer_tells_one(target: Target) -> None:
    assert answer(target, "/server_info")[0] == 401
    assert answer(target, "/server_info", ADMIN_KEY)[0] == 401
    status, text = answer(target, "/server_info", KEY)
    assert status == 200
    assert json.loads(text)["api_key"] != KEY
    assert KEY not in text
    assert ADMIN_KEY not in text
    assert answer(target, "/flush_cache", KEY)[0] == 401
    assert answer(target, "/flush_cache", ADMIN_KEY)[0] == 200
    assert answer(target, "/health")[0] == 200


def test_no_command_line_environment_log_or_readable_file_has_a_secret(target: Target) -> None:
    # In brackets, so that the looking commands do not find themselves.
    pattern = f"{KEY[4:-1]}[{KEY[-1]}]"
    assert target.sh(f"ps axeww | grep -c '{pattern}' || true") == "0"
    assert target.sh(f"journalctl --boot | grep -c '{pattern}' || true") == "0"
    folders = "/opt/sglang/deployments /etc /run /var/lib /var/log /var/cache /tmp /var/tmp"
    files = target.sh(f"grep --recursive --text --files-with-matches '{pattern}' {folders} 2>/dev/null || true").split()
    modes = {target.sh(f"stat --format='%U %a' {file}") for file in files}
    assert modes == {"root 600", "sglang 400"}, files
    assert target.sh("cat /run/credentials/sglang.service/hf-token") == TOKEN


def test_it_is_reached_on_the_loopback_alone(target: Target) -> None:
    pids = "|".join(target.sh("systemctl show --property=MainPID --value sglang; pgrep --uid sglang").split())
    sockets = target.sh("ss --no-header --listening --tcp --numeric --processes").splitlines()
    own = [line.split()[3] for line in sockets if re.search(rf"pid=({pids}),", line)]
    assert "127.0.0.1:30000" in own
    # The ranks' store, which PyTorch binds to every interface; from outside no packet reaches it.
    (store,) = (address for address in own if not address.startswith("127.0.0.1:"))
    host = target.sh("hostname --all-ip-addresses")
    for port, reached in {"22": True, store.rpartition(":")[2]: False}.items():
        with closing(socket.socket()) as client:
            client.settimeout(2)
            assert (client.connect_ex((host, int(port))) == 0) == reached, port


def test_its_exposure(target: Target) -> None:
    assert score(target) < 2.5


def test_compiled_kernels_have_a_folder_of_the_release(target: Target) -> None:
    release = target.release().rpartition("/")[2]
    assert target.sh(f"stat --format=%U /var/cache/sglang/{release}") == "sglang"
    environment = target.sh("tr '\\0' '\\n' </proc/$(systemctl show --property=MainPID --value sglang)/environ")
    assert f"TRITON_CACHE_DIR=/var/cache/sglang/{release}/triton" in environment.splitlines()


def test_a_new_key_is_a_new_start_that_ends_orphans_and_has_the_gpu_hosts_exposure(target: Target) -> None:
    orphan = "systemd-run --scope --uid=sglang --unit=orphan bash -c 'exec -a sglang::scheduler sleep 1000'"
    target.sh(f"{orphan} >/dev/null 2>&1 & systemd-run --unit=stranger --uid=ops --collect sleep 1000")
    eventually(lambda: target.sh("pgrep --count --uid sglang --full sglang::scheduler") == "2")
    done = target.deploy(
        "--skip-tags", "load", **(SECRETS | {"service_api_key": NEW_KEY}), service_devices=["char-nvidia*"]
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"ending process \d+ of a former run \(sglang::scheduler", target.sh("journalctl --unit sglang"))
    assert target.sh("systemctl is-active orphan.scope || true") == "inactive"
    assert target.sh("systemctl is-active stranger; systemctl stop stranger") == "active"
    assert [answer(target, "/server_info", key)[0] for key in (KEY, NEW_KEY)] == [401, 200]
    assert score(target) < 4.0


@pytest.fixture
def second(target: Target, tmp_path: Path) -> Iterator[Path]:
    """An inventory with a second service on the same host, which is gone afterwards."""
    variables = {"service_name": "sglang-b", "service_port": 30001}
    path = tmp_path / "second.yml"
    path.write_text(json.dumps({"sglang_hosts": {"vars": variables}}))
    yield path
    target.sh("systemctl disable --now sglang-b; rm -rf /opt/sglang-b /etc/systemd/system/sglang-b.service")


def test_a_second_service_has_a_root_of_its_own(target: Target, second: Path) -> None:
    inventories = ["--inventory=inventory/rehearsal", f"--inventory={second}"]
    before = target.state()
    done = target.deploy(*inventories)
    assert done.returncode != 0
    assert "/opt/sglang/current is what sglang.service runs" in plain(done.stdout)
    variables = json.loads(second.read_text())
    variables["sglang_hosts"]["vars"]["release_root"] = "/opt/sglang-b"
    second.write_text(json.dumps(variables))
    done = target.deploy(*inventories, "--skip-tags", "load", release_environment={"UV_CACHE_DIR": "/opt/sglang/cache"})
    assert done.returncode == 0, done.stdout
    assert "proof proved" in plain(done.stdout)
    assert target.state() == before
    assert target.sh("systemctl show --property=User --value sglang sglang-b").split() == ["sglang", "sglang-b"]
    packages = "lib/python3*/site-packages/sglang/__init__.py"
    links = target.sh(f"stat --format=%i /opt/sglang/releases/*/{packages} /opt/sglang-b/releases/*/{packages}")
    assert len(set(links.split())) == 1  # of one cache
    assert target.is_healthy()
