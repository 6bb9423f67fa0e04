"""Runs the checks in operations/ by SGLang's own interpreter, which has torch; the one of this test has not."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

OPERATIONS = Path(__file__).parent / "operations"
PYTEST = ["-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", OPERATIONS, "--noconftest", "-p", "no:cacheprovider"]


def test_operations(engine_python, engine_environment):
    """In one process, because to import SGLang takes longer than all of them."""
    done = subprocess.run(
        [engine_python, *PYTEST, "-o", "python_files=check_*.py", OPERATIONS],
        env=engine_environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_with_another_sglang_does_not_start(engine_python, engine_environment, cpu_engine, tmp_path):
    """SGLang only logs the exceptions of a plug-in; the engine must end the process by itself."""
    (tmp_path / "sglang-0.5.13.dist-info").mkdir()
    (tmp_path / "sglang-0.5.13.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.13\n")
    shutil.copytree(cpu_engine, tmp_path, dirs_exist_ok=True)
    done = subprocess.run(
        [engine_python, "-m", "sglang.launch_server", "--model-path", tmp_path, "--device", "cpu"],
        env=engine_environment | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "sglang-cpu-engine: cannot run SGLang without a GPU" in done.stderr
    assert "SGLang 0.5.13 is installed; install 0.5.12.post1" in done.stderr
