"""What the role release removes after a deploy, and what it must never remove."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_plugins import load

prune = load("roles/release/library/prune_releases.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Releases r1 (the oldest) to r5, each with one deployment d1 to d5."""
    for number in range(1, 6):
        write(tmp_path / f"releases/r{number}/release.json", {}, number)
        write(tmp_path / f"deployments/d{number}/deployment.json", {"release": f"r{number}"}, number)
    return tmp_path


def write(path: Path, document: dict[str, str], time: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    os.utime(path, (time, time))


def removed(root: Path, keep: int, protected: set[str] = frozenset()) -> list[str]:
    return sorted(release.id for release in prune.to_remove(prune.read_releases(root).values(), protected, keep))


def test_those_used_last_stay(root: Path) -> None:
    assert removed(root, 3) == ["r1", "r2"]
    assert removed(root, 9) == []


def test_a_new_deployment_of_an_old_release_counts_as_use(root: Path) -> None:
    write(root / "deployments/d6/deployment.json", {"release": "r1"}, 6)
    assert removed(root, 3) == ["r2", "r3"]


def test_what_is_protected_stays_beside_those_that_are_kept(root: Path) -> None:
    assert removed(root, 1, {"r1", "r3"}) == ["r2", "r4"]


def test_half_built_releases_go_first(root: Path) -> None:
    (root / "releases/half").mkdir()
    assert removed(root, 5) == ["half"]


def test_a_deployment_that_cannot_be_read_stops_it(root: Path) -> None:
    (root / "deployments/d1/deployment.json").write_text("{")
    with pytest.raises(ValueError, match=r"d1/deployment.json cannot be read"):
        prune.read_releases(root)


def test_the_links_are_read_although_they_are_relative_and_may_be_missing(root: Path) -> None:
    assert prune.linked(root) == set()
    (root / "current").symlink_to("deployments/d5")
    (root / "previous").symlink_to("deployments/d1")
    assert prune.linked(root) == {"d1", "d5"}


def test_a_process_is_found_by_its_program_and_by_the_files_it_has_mapped(root: Path) -> None:
    for name, number in {"cmdline": 2, "maps": 4}.items():
        process = root / f"proc/{number}"
        process.mkdir(parents=True)
        text = {
            "cmdline": f"{root}/releases/r2/bin/python\0-m\0sglang.launch_server\0",
            "maps": f"7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so\n7f02 r-xp 0 08:01 2 {root}/releases/r4/lib/a.so\n",
        }
        (process / name).write_text(text[name])
    assert prune.running(root / "releases", root / "proc") == {"r2", "r4"}


def test_a_real_process_is_found(root: Path) -> None:
    with subprocess.Popen([f"{root}/releases/r1/bin/python", "-c", "input()"], executable=sys.executable,
                          stdin=subprocess.PIPE) as process:  # fmt: skip
        assert "r1" in prune.running(root / "releases")
        process.communicate(b"\n")


def test_removing_takes_the_deployments_and_the_cache_along_and_leaves_the_others(root: Path) -> None:
    (root / "caches/r2/triton").mkdir(parents=True)
    (root / "caches/r3").mkdir()
    prune.remove(root, root / "caches", prune.read_releases(root)["r2"])
    left = {str(path.relative_to(root)) for parent in ("releases", "deployments", "caches")
            for path in (root / parent).iterdir()}  # fmt: skip
    assert left == {f"{kind}/{name}{number}" for kind, name in (("releases", "r"), ("deployments", "d"))
                    for number in (1, 3, 4, 5)} | {"caches/r3"}  # fmt: skip
