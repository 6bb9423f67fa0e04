"""The unit that the role service writes, as Ansible renders it, of a host with GPUs and of one without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from test_deploy_refusals import LOCAL, ROOT, deploy, local_play

ROLE = ROOT / "roles/service"
DAEMONS = "After=nvidia-persistenced.service nvidia-fabricmanager.service"


def unit(tmp_path: Path, devices: list[str], **variables: str) -> Path:
    release = tmp_path / "release"
    (release / "bin").mkdir(parents=True)
    (release / "bin/python").symlink_to(sys.executable)
    path = tmp_path / "sglang.service"
    given = {
        "service_release": {"id": "r1", "path": str(release), "sglang_version": "0.5.12.post1", "series": "s"},
        "service_server_arguments": {"model-path": "/m", "max-running-requests": 8},
        "service_threshold": 5,
        "service_devices": devices,
    } | variables
    render = {
        "ansible.builtin.template": {"src": str(ROLE / "templates/sglang.service.j2"), "dest": str(path)},
        "vars": given,
    }
    files = [str(ROLE / "defaults/main.yml"), str(ROLE / "vars/main.yml")]
    playbook = local_play(tmp_path, [render], vars_files=files)
    status, output = deploy(tmp_path, hosts=f"gpu {LOCAL}", playbook=playbook)
    assert status == 0, output
    return path


def test_of_a_gpu_host_it_starts_after_the_drivers_daemons_and_finds_what_compiles(tmp_path: Path) -> None:
    path = unit(tmp_path, ["char-nvidia*"], cuda_toolkit_version="13.0.2")
    text = path.read_text()
    # What another toolkit compiled is neither run nor copied.
    assert "CacheDirectory=sglang/r1/cuda-13.0.2\n" in text
    assert "FLASHINFER_WORKSPACE_BASE=/var/cache/sglang/r1/cuda-13.0.2\n" in text
    # An order only: Wants= or Requires= would start what a host without NVSwitches cannot run.
    assert DAEMONS in text.split("[Service]")[0]
    assert text.count("nvidia-fabricmanager") == 1
    assert f"Environment=PATH={tmp_path}/release/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:" in text
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", path]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        about_it = [line for line in checked.stderr.splitlines() if path.name in line]
        assert (checked.returncode, about_it) == (0, []), checked.stderr


def test_without_devices_no_daemon_of_the_driver_is_named(tmp_path: Path) -> None:
    text = unit(tmp_path, []).read_text()
    assert "nvidia" not in text
    assert "CacheDirectory=sglang/r1\n" in text
