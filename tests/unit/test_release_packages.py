"""Which of the distribution's packages the role release installs, asked of this machine's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TASKS = yaml.safe_load((ROOT / "roles/release/tasks/prepare.yml").read_text())
(SCRIPT,) = [
    task["ansible.builtin.command"]["argv"][2] for task in TASKS if task.get("register") == "_release_missing"
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "headers", "compiler", "missing"),
    [
        (("compiler", "headers"), "", False, ["g++", "python{}.{}-dev"]),
        (("compiler", "headers"), "", True, ["python{}.{}-dev"]),
        # An interpreter that uv installs brings its headers.
        (("compiler", ""), "", False, ["g++"]),
        # The lock of the rehearsal hosts and the router's have no kernels.
        (("", ""), "", False, []),
        (("compiler", "headers"), "there", True, []),
        # Not the distribution's: no package of it has them, which the next task says.
        (("compiler", "headers"), "elsewhere", True, ["/elsewhere/Python.h"]),
    ],
)
def test_what_compiles_is_installed_where_it_is_missing(
    tmp_path: Path, asked: tuple[str, str], headers: str, compiler: bool, missing: list[str]
) -> None:
    include = {"": "/usr/include/not-there", "there": tmp_path, "elsewhere": "/elsewhere"}[headers]
    (tmp_path / "Python.h").touch()
    if compiler:
        (tmp_path / "g++").symlink_to("/bin/true")
    given = f"import sysconfig; sysconfig.get_paths = {{'posix_prefix': {{'include': '{include}'}}}}.get\n"
    done = subprocess.run(
        [sys.executable, "-c", given + SCRIPT, *asked],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [name.format(*sys.version_info) for name in missing]
