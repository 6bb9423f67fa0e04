"""The roles' variables: documented, typed, named after their role, and the same in both places that state a default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
# The variables of the command line and of the playbooks, and the one that the roles release and service share.
SHARED = {"threshold", "rollback_to", "release_root", "keep_releases", "deploy_serial", "purge"}


def load(role: str, path: str) -> dict:
    file = ROOT / "roles" / role / path
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def entry_points(role: str) -> dict[str, dict]:
    return load(role, "meta/argument_specs.yml")["argument_specs"]


def options(role: str) -> dict[str, dict]:
    return {name: option for entry in entry_points(role).values() for name, option in entry.get("options", {}).items()}


@pytest.mark.parametrize("role", ROLES)
def test_each_default_is_documented_with_the_same_value(role: str) -> None:
    defaults = load(role, "defaults/main.yml")
    documented = {name: option["default"] for name, option in options(role).items() if "default" in option}
    assert {name: value for name, value in documented.items() if name not in SHARED - defaults.keys()} == defaults


def test_the_shared_root_has_one_default() -> None:
    default = load("release", "defaults/main.yml")["release_root"]
    assert options("service")["release_root"]["default"] == default
    assert f"default('{default}')" in load("service", "vars/main.yml")["_service_root"]


def test_the_batches_have_one_default() -> None:
    plays = yaml.safe_load((ROOT / "playbooks/deploy.yml").read_text())
    default = options("preflight")["deploy_serial"]["default"]
    assert [f"default({default})" in play["serial"] for play in plays if "serial" in play] == [True]


@pytest.mark.parametrize("role", ROLES)
def test_each_option_has_a_type_and_a_description(role: str) -> None:
    for name, option in options(role).items():
        assert option.get("type"), name
        assert option.get("description"), name


@pytest.mark.parametrize("role", ROLES)
def test_variables_are_named_after_their_role(role: str) -> None:
    assert {name for name in options(role) if not name.startswith(f"{role}_")} <= SHARED
    assert all(name.startswith(f"_{role}_") for name in load(role, "vars/main.yml"))


@pytest.mark.parametrize("role", ROLES)
def test_a_role_uses_no_private_variable_of_another(role: str) -> None:
    others = "|".join(other for other in ROLES if other != role)
    for path in (ROOT / "roles" / role).rglob("*"):
        if path.suffix in {".yml", ".j2"}:
            assert not re.search(rf"(?<![a-z_])_({others})_[a-z]", path.read_text()), path


@pytest.mark.parametrize("role", ROLES)
def test_each_private_variable_is_used(role: str) -> None:
    texts = [path.read_text() for path in (ROOT / "roles" / role).rglob("*") if path.suffix in {".yml", ".j2"}]
    for name in load(role, "vars/main.yml"):
        assert sum(len(re.findall(rf"\b{name}\b", text)) for text in texts) > 1, name


@pytest.mark.parametrize("role", ROLES)
def test_no_task_is_polled(role: str) -> None:
    """Ansible goes on polling a host that is gone, for hours: `poll` seconds less of `async` with each connection."""
    for path in (ROOT / "roles" / role).rglob("*.yml"):
        assert not re.search(r"^ *async:", path.read_text(), flags=re.MULTILINE), path


def included(task: dict, path: Path) -> Path | None:
    """The file of tasks that a task of the file `path` includes; None where a variable names it."""
    for action in ("include_tasks", "import_tasks"):
        if given := task.get(f"ansible.builtin.{action}"):
            file = given["file"] if isinstance(given, dict) else given
            return next((folder / file for folder in path.parents if (folder / file).is_file()), None)
    for action in ("include_role", "import_role"):
        if given := task.get(f"ansible.builtin.{action}"):
            file = ROOT / "roles" / given["name"] / "tasks" / f"{given.get('tasks_from', 'main')}.yml"
            return file if file.is_file() else None
    return None


def variables_set(tasks: list[dict], path: Path) -> set[str]:
    """Variables that tasks set, those of their blocks and of what they include too."""
    names: set[str] = set()
    for task in tasks:
        names |= {task["register"]} if "register" in task else set()
        names |= set(task.get("ansible.builtin.set_fact", {}))
        for part in ("block", "rescue", "always"):
            names |= variables_set(task.get(part, []), path)
        if file := included(task, path):
            names |= variables_set(yaml.safe_load(file.read_text()) or [], file)
    return names


def variables_read(text: str, path: Path) -> set[str]:
    """Words of an expression, and of the role's variables that it is made of."""
    of_role = yaml.safe_load(file.read_text()) if (file := path.parents[1] / "vars/main.yml").is_file() else {}
    found: set[str] = set()
    words = set(re.findall(r"\w+", text))
    while words - found:
        found |= words
        words = {word for name in words for word in re.findall(r"\w+", str(of_role.get(name, "")))}
    return found


def tasks_of_play(play: dict) -> list[dict]:
    return [task for part in ("pre_tasks", "tasks", "post_tasks", "handlers") for task in play.get(part, [])]


def blocks(tasks: list[dict]) -> list[dict]:
    """The blocks of a file of tasks or plays, inner ones too."""
    tasks = [task for entry in tasks for task in (tasks_of_play(entry) if "hosts" in entry else [entry])]
    inner = [task for outer in tasks for part in ("block", "rescue", "always") for task in outer.get(part, [])]
    return [task for task in tasks if "block" in task] + (blocks(inner) if inner else [])


@pytest.mark.parametrize("path", sorted([*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")]))
def test_no_block_changes_its_own_condition(path: Path) -> None:
    """Each task of a block, also one that is included there, evaluates `when` anew: the rest would be skipped."""
    for block in blocks(yaml.safe_load(path.read_text()) or []):
        read = variables_read(str(block.get("when", "")), path)
        assert not variables_set(block["block"], path) & read, block["name"]


@pytest.mark.parametrize("inventory", sorted(path.name for path in (ROOT / "inventory").iterdir()))
def test_the_example_inventories_set_documented_variables_only(inventory: str) -> None:
    documented = {name for role in ROLES for name in options(role)}
    prefixes = tuple(f"{role}_" for role in ROLES)
    texts = [path.read_text() for path in (ROOT / "inventory" / inventory).rglob("*.yml")]
    named = {name for text in texts for name in re.findall(r"^\s*([a-z_]+):", text, flags=re.MULTILINE)}
    assert "threshold" in named
    assert {name for name in named if name.startswith(prefixes)} <= documented


def test_every_variable_is_listed_for_people() -> None:
    page = (ROOT / "docs" / "variables.md").read_text()
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "variables.py"], check=True, capture_output=True, text=True
    ).stdout
    assert page == made, "run: python docs/variables.py > docs/variables.md"
