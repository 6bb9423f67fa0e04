"""A test run that gets SIGTERM, as from `timeout`, takes down what its fixtures started."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

SERVED = """
import os, signal, subprocess, time
import pytest

@pytest.fixture
def server():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print("taken down", flush=True)

def test_that_is_interrupted(server):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""


def test_sigterm_takes_down_what_fixtures_started(tmp_path: Path) -> None:
    (tmp_path / "test_served.py").write_text(SERVED)
    # With the tests' conftest.py, which pytest would only find above the file.
    command = [sys.executable, "-m", "pytest", "--capture=no", "--noconftest", "-p", "conftest", "test_served.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout  # interrupted
    assert "taken down" in done.stdout
