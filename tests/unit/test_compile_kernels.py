"""Which of FlashInfer's modules are compiled ahead, and what is said when one cannot be."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_plugins import load

compile_kernels = load("roles/service/files/compile_kernels.py")

SAMPLING, ATTENTION, COMM = (
    ("sampling", "gen_sampling_module"),
    ("attention", "gen_trtllm_gen_fmha_module"),
    ("comm", "gen_trtllm_comm_module"),
)


@pytest.mark.parametrize(
    ("cards", "arguments", "found"),
    [
        (["12.0"], {"attention-backend": "triton"}, [SAMPLING]),
        (["10.0"], {"sampling-backend": "pytorch"}, [SAMPLING]),
        (
            ["10.0"],
            {"attention-backend": "trtllm_mla", "enable-flashinfer-allreduce-fusion": True},
            [SAMPLING, ATTENTION, COMM],
        ),
        (["10.3"], {"speculative-draft-attention-backend": "trtllm_mha"}, [SAMPLING, ATTENTION]),
        # FlashInfer has neither for these cards.
        (["12.0"], {"attention-backend": "trtllm_mha", "enable-flashinfer-allreduce-fusion": True}, [SAMPLING]),
        (["9.0"], {"enable-flashinfer-allreduce-fusion": False}, [SAMPLING]),
    ],
)
def test_the_modules_follow_from_the_arguments_and_the_cards(
    cards: list[str], arguments: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    assert compile_kernels.modules(arguments, cards) == found


class Spec:
    """As JitSpec in flashinfer/jit/core.py."""

    name = "sampling"

    def __init__(self, is_aot: bool = False, fault: Exception | None = None) -> None:
        self.is_aot, self.fault, self.built = is_aot, fault, 0

    def build(self, verbose: bool) -> None:
        self.built += 1
        if self.fault:
            raise self.fault

    def get_library_path(self) -> Path:
        return Path("/cache/sampling.so")


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """A stand-in of the package, in which one module is described by it."""
    spec = Spec()
    sampling = types.ModuleType("flashinfer.jit.sampling")
    sampling.gen_sampling_module = lambda: spec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.jit.sampling", sampling)
    monkeypatch.setattr(compile_kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compile_kernels, "capabilities", lambda: ["9.0", "12.0"])
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "x")  # so that it is put back
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    return spec


def test_it_is_compiled_for_the_cards_and_sees_none(spec: Spec, capsys: pytest.CaptureFixture[str]) -> None:
    compile_kernels.main({})
    assert spec.built == 1
    environment = compile_kernels.os.environ
    assert (environment["FLASHINFER_CUDA_ARCH_LIST"], environment["CUDA_VISIBLE_DEVICES"]) == ("9.0 12.0", "")
    assert capsys.readouterr().out == "sampling: /cache/sampling.so\n"


def test_what_came_compiled_is_left(spec: Spec) -> None:
    spec.is_aot = True
    compile_kernels.main({})
    assert spec.built == 0


def test_a_fault_ends_it_with_the_end_of_the_compilers_words(spec: Spec) -> None:
    spec.fault = RuntimeError("\n".join(["Ninja build failed.", *map(str, range(100)), "fatal: no such file"]))
    with pytest.raises(SystemExit) as ended:
        compile_kernels.main({})
    reason = str(ended.value.code)
    assert reason.startswith("gen_sampling_module: RuntimeError:\n")
    assert reason.endswith("99\nfatal: no such file")
    assert len(reason.splitlines()) == 1 + compile_kernels.REASON_LINES


def test_without_the_tool_that_names_the_cards_it_fails(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compile_kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "/not-there")
    with pytest.raises(SystemExit, match="FlashInfer: FileNotFoundError:"):
        compile_kernels.main({})
    assert spec.built == 0


def test_without_flashinfer_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    compile_kernels.main({})
    assert "not installed" in capsys.readouterr().out
