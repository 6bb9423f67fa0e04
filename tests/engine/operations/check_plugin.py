"""The entry points: when they do something, when they refuse, and the cost shape."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_cpu_engine import plugin


@pytest.mark.parametrize("text", ["30", "30,x", "30;1", "-1,1", "1,-1", "inf,1", "nan,1", "1,2,3"])
def test_a_wrong_cost_is_refused_with_what_is_allowed(monkeypatch, text):
    monkeypatch.setenv(plugin.FORWARD_COST, text)
    with pytest.raises(SystemExit, match="SGLANG_CPU_ENGINE_FORWARD_MS"):
        plugin.install()


def test_another_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(plugin, "version", lambda _name: "0.5.13")
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.13 is installed; install 0\.5\.12\.post1"):
        plugin.install()


def test_nothing_happens_unless_asked_for(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(plugin, "version", lambda _name: "0.5.13")
    plugin.install()


def test_cost_shape(monkeypatch):
    """A clock that stands still but for the forward's own 10 ms: sleeping makes up for the rest."""
    clock, slept = [0.0], []

    def forward(_runner, _forward_batch, **_keywords):
        clock[0] += 0.010
        return "output"

    monkeypatch.setattr(ModelRunner, "forward", forward)
    monkeypatch.setattr(plugin, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=slept.append))
    plugin._give_cost_shape(30, 0.5)

    def run(tokens, draft=False):
        runner = SimpleNamespace(is_draft_worker=draft)
        batch = SimpleNamespace(input_ids=torch.zeros(tokens))
        assert ModelRunner.forward(runner, batch, skip_attn_backend_init=True) == "output"

    run(1), run(60), run(100), run(100, draft=True)
    assert slept == pytest.approx([0.020, 0.020, 0.040])
    plugin._give_cost_shape(0, 0)
    run(1)
    assert slept[-1] == 0, "a forward that is slower than its cost is not delayed"
