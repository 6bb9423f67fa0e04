"""Reads the facts of a host in one round trip and judges them, as `fab doctor` does."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

# Ansible loads plug-ins by their files: the project's own packages are not importable by themselves.
if (root := str(Path(__file__).resolve().parents[2])) not in sys.path:
    sys.path.insert(0, root)

from diagnostics.connect import HostUnreachable
from diagnostics.doctor import check, checks, doctor, expected

DOCUMENTATION = """
    name: host_checks
    short_description: Refuses a host that is not fit to serve, or to run the router
    description:
      - Runs the collector of C(diagnostics/doctor) on the host, in check mode too, and judges what it read. Changes
        nothing. Fails when a check failed or could not be made, with each of them and what to do.
      - Compares with the host's variables; one that is not set has its role's default.
    options:
      router:
        description: Judges the machine alone, and the ports of the router, which needs neither a GPU nor a model.
        type: bool
        default: false
"""


def refusal(host: str, service: str, entry: dict[str, Any]) -> str:
    """What failed or is unknown, one line each."""
    # A bare GPU host may have got its driver before.
    first = f"{host} is not fit to {service}. Nothing that serves was touched."
    return "\n".join([first, *entry["reasons"], "Checks that are named in preflight_accepted only warn."])


class ActionModule(ActionBase):  # type: ignore[misc]
    _VALID_ARGS = frozenset({"router"})
    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        wanted = self._expected(variables, boolean(self._task.args.get("router", False)))
        command = f"python3 -I - {shlex.quote(json.dumps(expected.request(wanted)))}"
        answer = self._low_level_execute_command(command, in_data=doctor.COLLECTOR.read_bytes())
        try:
            entry = doctor.entry(doctor.facts_of(answer["stdout"], answer["stderr"]), wanted)
        except HostUnreachable as error:
            raise AnsibleActionFail(f"{error}. Nothing that serves was touched.") from error
        shown = check.lines(check.Check(**each) for each in entry["checks"])
        notable = check.lines(check.Check(**each) for each in entry["checks"] if each["state"] == check.WARN)
        result = {"changed": False, "failed": not entry["ok"], "state": entry["state"]}
        if entry["ok"]:
            return result | {"all": shown, "warnings_found": notable}
        service = "run the router" if wanted.router else "serve"
        # Ansible prints the whole result of a task that failed: the message has what is needed.
        return result | {"msg": refusal(variables["inventory_hostname"], service, entry)}

    def _expected(self, variables: dict[str, Any], router: bool) -> expected.Expected:
        given = {name: self._templar.template(variables[name]) for name in expected.VARIABLES if name in variables}
        try:
            wanted = expected.from_variables(given, router)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise AnsibleActionFail(
                f"The variables of the checks cannot be used: {error}. Nothing that serves was touched."
            ) from error
        if strangers := sorted(set(wanted.accepted) - set(checks.NAMES)):
            raise AnsibleActionFail(
                f"preflight_accepted names {', '.join(strangers)}; allowed are {', '.join(checks.NAMES)}. "
                "Nothing that serves was touched."
            )
        return wanted
