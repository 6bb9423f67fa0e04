"""Runs the checks in gate/ by SGLang's own interpreter, on a patched SGLang: its real scheduler, step by step."""

import json
import subprocess
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import pytest
from uv import find_uv_bin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

CHECKS = Path(__file__).parent / "gate"
PYTEST = ["-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", CHECKS, "--confcutdir", CHECKS]
PYTEST += ["-p", "no:cacheprovider", "-W", "ignore", "-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup"]


@pytest.fixture(scope="module")
def model_with_prompts(pair, prompts, tmp_path_factory):
    """The rehearsal model, and prompts of several questions each, beside it."""
    folder = tmp_path_factory.mktemp("pair")
    for part in ("target", "draft"):
        (folder / part).symlink_to(pair / part)
    longer = [list(islice(chain.from_iterable((prompts * 2)[i : i + 8]), 56)) for i in range(24)]
    (folder / "prompts.json").write_text(json.dumps({"prompts": longer}))
    return folder


@pytest.fixture(scope="module")
def checks_environment(engine_python, engine_environment, gated, model_with_prompts, tmp_path_factory):
    beside = tmp_path_factory.mktemp("beside")
    install = [find_uv_bin(), "pip", "install", "--quiet", "--python", engine_python, "--target", beside]
    subprocess.run([*install, *(f"{name}=={version(name)}" for name in ("hypothesis", "pytest-xdist"))], check=True)
    return engine_environment | {
        "PYTHONPATH": f"{gated}:{beside}",
        "SPECGATE_PAIR": str(model_with_prompts),
    }


def test_gate(engine_python, checks_environment):
    """All checks at once, as many as there are cores."""
    done = subprocess.run(
        [engine_python, *PYTEST, *CHECKS.glob("check_*.py")],
        env=checks_environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
