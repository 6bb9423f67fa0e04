"""Refuses variables that would be ignored without a word: misspelt ones, and those that fab would not see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

DOCUMENTATION = """
    name: known_variables
    short_description: Refuses misspelt and misplaced variables
    description:
      - Compares the extra variables (C(-e)) and those of the inventory that begin with a role's name with the
        options in the roles' C(meta/argument_specs.yml). Names that begin with C(ansible_) are Ansible's own.
    options:
      roles:
        description: Folder that holds the roles.
        required: true
      inventory_only:
        description: Names that are refused as extra variables, because C(fab) reads them from the inventory.
        type: list
        elements: str
        default: []
"""


def documented_variables(roles: Path) -> dict[str, set[str]]:
    """Role name to the names of its options, over all entry points of its argument specification."""
    documented: dict[str, set[str]] = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        entry_points = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"].values()
        documented[path.parts[-3]] = {name for entry in entry_points for name in entry.get("options", {})}
    return documented


def unknown_variables(given: Iterable[str], documented: dict[str, set[str]], every: bool) -> dict[str, str | None]:
    """Undocumented names of ``given`` to the nearest documented one, or None where nothing is near.

    With ``every`` false only names that begin with a role's name and an underscore are judged.
    """
    known = sorted(set().union(*documented.values()))
    unknown: dict[str, str | None] = {}
    for name in sorted(set(given) - set(known)):
        if name.startswith("ansible_") or not (every or name.startswith(tuple(f"{role}_" for role in documented))):
            continue
        unknown[name] = next(iter(difflib.get_close_matches(name, known, n=1)), None)
    return unknown


def refusal(unknown: dict[str, str | None], where: str) -> str:
    """One sentence for each unknown variable."""
    return " ".join(
        f"Unknown variable '{name}' {where}." + (f" Did you mean '{near}'?" if near else "")
        for name, near in unknown.items()
    )


class ActionModule(ActionBase):  # type: ignore[misc]
    _VALID_ARGS = frozenset({"roles", "inventory_only"})
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        documented = documented_variables(Path(self._task.args["roles"]))
        extra = load_extra_vars(self._loader)
        problems = [
            refusal(unknown_variables(extra, documented, every=True), "on the command line (-e)"),
            refusal(unknown_variables(set(task_vars or {}) - set(extra), documented, every=False), "in the inventory"),
            *(
                f"'{name}' is given on the command line (-e), where `fab` does not see it and would look at what the "
                "inventory names. Set it in the inventory."
                for name in self._task.args.get("inventory_only", [])
                if name in extra
            ),
        ]
        if any(problems):
            raise AnsibleActionFail(
                " ".join(filter(None, problems))
                + " Nothing was touched. All variables are listed in docs/variables.md."
            )
        return {"changed": False, "known": sorted(set().union(*documented.values()))}
