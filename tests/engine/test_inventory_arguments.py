"""The example inventories for GPU hosts: SGLang's own parser takes each of their arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diagnostics.inventory import load_hosts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins/filter"))
from systemd import server_arguments

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine

PARSE = """\
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([vars(parser.parse_args(each)) for each in json.load(sys.stdin)], default=str))
"""


def words(inventory: str) -> list[str]:
    """The words of the command line that the service would be started with."""
    (host,) = load_hosts([str(ROOT / "inventory/blackwell" / inventory)])
    arguments = host.given(["service_server_arguments"])["service_server_arguments"]
    return [word for line in server_arguments(arguments) for word in line.replace('"', "").split()]


def test_sglang_takes_each_argument_of_the_example_inventories(engine_python) -> None:
    names = ("rtx-pro-6000", "b200")
    done = subprocess.run(
        [engine_python, "-c", PARSE],
        input=json.dumps([words(name) for name in names]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rtx, b200 = json.loads(done.stdout)
    for parsed in (rtx, b200):
        assert (parsed["tensor_parallel_size"], parsed["speculative_algorithm"]) == (8, "EAGLE3")
        assert parsed["speculative_draft_model_path"] == "/srv/models/kimi-k2.5-eagle3-mla"
        assert max(parsed["cuda_graph_bs"]) == parsed["max_running_requests"]
    assert rtx["disable_custom_all_reduce"]
    assert rtx["enforce_disable_flashinfer_allreduce_fusion"]
    assert not b200["disable_custom_all_reduce"]
    assert b200["enable_flashinfer_allreduce_fusion"]
