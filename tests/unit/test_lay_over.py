"""A fork's sources in place of the released ones: what is kept, what is refused, and no link is written through."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from test_plugins import load

lay_over = load("roles/release/files/lay_over.py")

INSTALLED = {"torch": "2.11.0", "numpy": "2.3.0"}
RELEASED = ["torch==2.11.0", "numpy", "flashinfer_python==0.6.11.post1"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: RELEASED)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages with a released sglang, one file of which is a link into a cache."""
    package = tmp_path / "packages/sglang/srt"
    package.mkdir(parents=True)
    for name in ("_core.cpython-311-x86_64-linux-gnu.so", "gone.py", "kept.py"):
        (package / name).write_text("released")
    (package.parent / "_version.py").write_text("released")
    (package.parent / "__init__.py").write_text("")
    (tmp_path / "cached.py").hardlink_to(package / "kept.py")
    return tmp_path / "packages"


def archive(tmp_path: Path, dependencies: str = '"torch==2.11.0"', init: str = "sglang/__init__.py") -> Path:
    fork = tmp_path / "fork"
    (fork / "sglang/srt").mkdir(parents=True)
    (fork / "pyproject.toml").write_text(f"[project]\nname = 'sglang'\ndependencies = [{dependencies}]\n")
    for name in (init, "sglang/srt/kept.py", "sglang/srt/new.py"):
        (fork / name).write_text("forked")
    subprocess.run(["tar", "-czf", tmp_path / "fork.tar.gz", "-C", fork, "."], check=True)
    return tmp_path / "fork.tar.gz"


def test_the_forks_files_replace_the_released_ones_but_for_what_is_built(packages: Path, tmp_path: Path) -> None:
    lay_over.lay_over(archive(tmp_path), packages)
    found = {str(path.relative_to(packages)): path.read_text() for path in packages.rglob("*") if path.is_file()}
    assert found == {
        "sglang/__init__.py": "forked",
        "sglang/_version.py": "released",
        "sglang/srt/_core.cpython-311-x86_64-linux-gnu.so": "released",
        "sglang/srt/kept.py": "forked",
        "sglang/srt/new.py": "forked",
    }
    assert (tmp_path / "cached.py").read_text() == "released"


def test_what_an_interrupted_run_left_does_no_harm(packages: Path, tmp_path: Path) -> None:
    (packages / ".fork/sglang").mkdir(parents=True)
    (packages / ".fork/sglang/old.py").touch()
    lay_over.lay_over(archive(tmp_path), packages)
    assert not (packages / "sglang/old.py").exists()


@pytest.mark.parametrize(("dependencies", "reason"), [
    ('"torch==2.12.0"', "torch is 2.11.0, asked for is torch==2.12.0"),
    ('"flash-attn-5>=1"', "flash-attn-5 is not locked, asked for is flash-attn-5>=1"),
])  # fmt: skip
def test_a_fork_that_asks_for_other_packages_is_refused(
    packages: Path, tmp_path: Path, dependencies: str, reason: str
) -> None:
    with pytest.raises(SystemExit, match=reason):
        lay_over.lay_over(archive(tmp_path, dependencies), packages)
    assert (packages / "sglang/srt/gone.py").exists()


def test_what_the_lock_leaves_out_for_hosts_without_a_gpu_is_no_lack() -> None:
    assert lay_over.unmet(["flashinfer-python==0.6.12", "numpy>=2", "uvloop; sys_platform == 'win32'"],
                          {"flashinfer-python"}) == []  # fmt: skip


def test_a_folder_without_sglang_is_refused(packages: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the folder of the fork is no SGLang"):
        lay_over.lay_over(archive(tmp_path, init="other.py"), packages)
