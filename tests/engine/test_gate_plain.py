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
PYTEST += ["-p", "no:cacheprovider", "-W", "ignore"]


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
    beside = tmp_path_factory.mktemp("hypothesis")
    install = [find_uv_bin(), "pip", "install", "--quiet", "--python", engine_python, "--target", beside]
    subprocess.run([*install, f"hypothesis=={version('hypothesis')}"], check=True)
    return engine_environment | {
        "PYTHONPATH": f"{gated}:{beside}",
        "SPECGATE_PAIR": str(model_with_prompts),
    }


@pytest.mark.parametrize("check", ["plain", "draft_sync", "profile"])
def test_gate(check, engine_python, checks_environment):
    done = subprocess.run(
        [engine_python, *PYTEST, CHECKS / f"check_{check}.py"],
        env=checks_environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]


def test_every_check_is_run():
    assert {path.stem for path in CHECKS.glob("check_*.py")} == {
        f"check_{check}" for check in test_gate.pytestmark[0].args[1]
    }
