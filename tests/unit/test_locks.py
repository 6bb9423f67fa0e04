"""The lock files of the releases fit what SGLang 0.5.12.post1 asks for, and each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "files/locks"
SERIES = Path(__file__).resolve().parents[2] / "files/spec_gate/spec_gate/series"


def pins(lock: Path) -> dict[str, str]:
    """Name to version of each package; the last one where markers tell several apart."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", lock.read_text(), flags=re.MULTILINE))


@pytest.fixture
def cuda() -> dict[str, str]:
    (lock,) = LOCKS.glob("*-cuda13.txt")
    return pins(lock)


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda lock: lock.stem)
def test_each_pin_has_a_hash(lock: Path) -> None:
    text = lock.read_text()
    assert len(re.findall(r"^[a-z0-9-]+==.* \\\n    --hash=sha256:[0-9a-f]{64}", text, flags=re.MULTILINE)) == len(
        re.findall(r"^[a-z0-9-]+==", text, flags=re.MULTILINE)
    )


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("sglang-*-c*.txt")), ids=lambda lock: lock.stem)
def test_a_release_has_a_series_and_can_build_what_comes_as_source(lock: Path) -> None:
    assert (SERIES / pins(lock)["sglang"] / "manifest.json").is_file()
    assert "setuptools" in pins(lock), "what is built from source on the host needs it there"


def test_the_kernels_are_those_that_sglang_asks_for_at_start(cuda: dict[str, str]) -> None:
    """assert_pkg_version in sglang/srt/entrypoints/engine.py; and FlashInfer wants its parts to be of one version."""
    assert cuda["flashinfer-python"] == cuda["flashinfer-cubin"] == "0.6.11.post1"
    assert cuda["sglang-kernel"] == "0.4.2.post2"


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("sglang-*-c*.txt")), ids=lambda lock: lock.stem)
def test_sglangs_metrics_know_the_routes_of_fastapi(lock: Path) -> None:
    """From 0.137 on they do not, and /v1/loads answers 500: sgl-project/sglang#28887."""
    assert tuple(map(int, pins(lock)["fastapi"].split("."))) < (0, 137)


def test_the_table_of_versions_is_that_of_the_lock(cuda: dict[str, str]) -> None:
    pinned = [cuda[name] for name in ("sglang", "flashinfer-python", "sglang-kernel", "torch")]
    assert f"| {' | '.join(pinned)} | 13.0 |" in (LOCKS.parents[1] / "docs/gpu-host.md").read_text()


def test_the_kernels_are_for_the_cuda_that_torch_is_built_for(cuda: dict[str, str]) -> None:
    """sglang-kernel 0.4.2.post2 on PyPI is built for CUDA 13, as torch 2.11.0 is; Blackwell needs 12.8 or newer."""
    assert cuda["torch"] == "2.11.0"
    assert cuda["cuda-python"].startswith("13.")
    assert [name for name in cuda if re.search(r"-cu1[0-2]$", name)] == []
    assert "nvidia-nccl-cu13" in cuda


def test_both_lock_files_pin_the_same_versions(cuda: dict[str, str]) -> None:
    (cpu,) = LOCKS.glob("*-cpu.txt")
    differing = {name: (version, cuda.get(name)) for name, version in pins(cpu).items() if cuda.get(name) != version}
    assert differing == {}
