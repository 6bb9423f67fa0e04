"""What deploy.yml refuses before it speaks to any host; the host of these inventories cannot be reached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = "gpu-1 ansible_ssh_executable=/bin/false"


def deploy(tmp_path: Path, *arguments: str, hosts: str = HOST, variables: str = "threshold=5") -> tuple[int, str]:
    inventory = tmp_path / "inventory.ini"
    inventory.write_text(f"[sglang_hosts]\n{hosts}\n[all:vars]\n{variables}\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, "deploy.yml", *arguments],
        cwd=ROOT,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1", "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("given", ["abc", "-1", "5.5", "", "1e3"])
def test_a_wrong_threshold_is_refused(tmp_path: Path, given: str) -> None:
    status, output = deploy(tmp_path, "-e", f"threshold={given}")
    assert status != 0
    assert f'threshold is "{given}". Allowed is a non-negative integer' in output
    assert "-e threshold=5" in output
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
    status, output = deploy(tmp_path, "-e", "threshold=0")
    assert status != 0
    assert "Cannot become root on gpu-1" in output


@pytest.mark.parametrize(
    ("hosts", "arguments"), [("", ()), (HOST, ("--limit", "gpu-9")), (HOST, ("--limit", "localhost"))]
)
def test_a_play_without_hosts_is_an_error(tmp_path: Path, hosts: str, arguments: tuple[str, ...]) -> None:
    status, output = deploy(tmp_path, *arguments, hosts=hosts)
    assert status != 0
    assert "matched no host" in output or "leaves us with no hosts to target" in output
