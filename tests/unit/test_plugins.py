"""The pure parts of the playbooks' plug-ins and of their module."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ansible.errors import AnsibleFilterError

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what an annotation means
    spec.loader.exec_module(module)
    return module


addresses = load("plugins/filter/addresses.py")
systemd = load("plugins/filter/systemd.py")
digest = load("plugins/lookup/source_sha256.py")
variables = load("plugins/action/known_variables.py")
state = load("roles/service/library/server_state.py")


@pytest.mark.parametrize(("given", "host"), [("::1", "[::1]"), ("192.0.2.1", "192.0.2.1"), ("gpu-1.lan", "gpu-1.lan")])
def test_an_address_of_a_url(given: str, host: str) -> None:
    assert addresses.url_host(given) == host


def test_arguments_take_the_form_that_their_type_says() -> None:
    arguments = {
        "tp-size": 8,
        "enable-metrics": True,
        "disable-radix-cache": False,
        "api-key": None,
        "cuda-graph-bs": [1, 2, 4],
        "model-path": "/srv/models/a b",
        "json": {"a": 1},
    }
    assert systemd.server_arguments(arguments) == [
        "--tp-size 8",
        "--enable-metrics",
        "--cuda-graph-bs 1 2 4",
        '--model-path "/srv/models/a b"',
        r'--json "{\"a\": 1}"',
    ]


@pytest.mark.parametrize("text", ["a\nb", "\n"])
def test_a_line_break_is_refused(text: str) -> None:
    with pytest.raises(AnsibleFilterError, match="line break"):
        systemd.server_arguments({"model-path": text})
    with pytest.raises(AnsibleFilterError, match="NAME"):
        systemd.environment_lines({"NAME": text})


def test_the_environment_is_quoted_and_sorted() -> None:
    assert systemd.environment_lines({"B": 'a "b" \\ $c `d`', "A": 1}) == ['A="1"', 'B="a \\"b\\" \\\\ \\$c \\`d\\`"']


def test_the_digest_depends_on_names_and_bytes_only(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        (root / "package").mkdir(parents=True)
        (root / "package/module.py").write_text("x = 1\n")
    os.utime(two / "package/module.py", (0, 0))
    (two / "package/__pycache__").mkdir()
    (two / "package/__pycache__/module.pyc").write_bytes(b"compiled")
    assert digest.source_sha256(one) == digest.source_sha256(two)
    (two / "package/module.py").write_text("x = 2\n")
    assert digest.source_sha256(one) != digest.source_sha256(two)
    (two / "package/module.py").rename(two / "package/other.py")
    (two / "package/other.py").write_text("x = 1\n")
    assert digest.source_sha256(one) != digest.source_sha256(two)


def test_the_digest_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest.source_sha256(tmp_path)


def test_every_documented_variable_is_known() -> None:
    documented = variables.documented_variables(ROOT / "roles")
    names = set().union(*documented.values())
    assert {"threshold", "release_root", "service_port"} <= names
    assert variables.unknown_variables(names | {"ansible_user"}, documented, every=True) == {}


def test_a_persons_own_variables_are_free_in_the_inventory_and_not_on_the_command_line() -> None:
    documented = {"service": {"service_port"}}
    assert variables.unknown_variables({"models", "service_prot"}, documented, every=False) == {
        "service_prot": "service_port"
    }
    assert variables.unknown_variables({"models"}, documented, every=True) == {"models": None}


@pytest.mark.parametrize(
    ("active", "restarts", "fresh", "dead"),
    [
        ("active", "0", True, False),
        ("activating", "0", True, False),
        ("deactivating", "0", True, False),
        ("failed", "0", False, True),
        ("inactive", "0", False, True),
        ("active", "1", True, True),
        ("activating", "1", True, True),
        ("active", "1", False, False),
    ],
)
def test_a_server_that_systemd_had_to_start_again_counts_as_dead_only_where_it_was_just_started(
    active: str, restarts: str, fresh: bool, dead: bool
) -> None:
    assert state.is_dead({"ActiveState": active, "NRestarts": restarts}, fresh) is dead
