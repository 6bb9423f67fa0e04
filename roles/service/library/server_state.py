"""Tells whether a unit's server is ready, still starting, or dead."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

DOCUMENTATION = """
    module: server_state
    short_description: Tells whether a unit's server is ready, starting or dead
    description:
      - Looks at the unit and at its health URL until the server is no longer starting, but no longer than O(wait).
      - A server counts as dead when its unit is neither active nor on its way there, or, with O(fresh), when systemd
        had to start it again, since a server that dies while starting is started over and over.
    options:
      unit: {type: str, required: true, description: The unit.}
      url: {type: str, required: true, description: Answers with 200 when the server is ready.}
      wait: {type: int, default: 15, description: Seconds to wait for a change at most.}
      fresh: {type: bool, default: false, description: The unit has been started by this run.}
"""
RETURN = """
    state: {type: str, returned: always, description: "C(ready), C(starting) or C(dead)."}
    unit: {type: dict, returned: always, description: The unit's properties that were looked at.}
    health: {type: str, returned: always, description: The last answer of the URL.}
"""

PROPERTIES = ("ActiveState", "SubState", "Result", "NRestarts", "ExecMainCode", "ExecMainStatus")


def unit_properties(unit: str) -> dict[str, str]:
    output = subprocess.run(
        ["systemctl", "show", f"--property={','.join(PROPERTIES)}", unit], check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def is_dead(unit: dict[str, str], fresh: bool) -> bool:
    return unit["ActiveState"] in ("failed", "inactive") or (fresh and unit["NRestarts"] != "0")


def health(url: str) -> str:
    """``"200"`` when ready, else another status or the error. SGLang generates a token for the answer: seconds."""
    try:
        return str(open_url(url, timeout=20, use_proxy=False).getcode())
    except Exception as error:
        return str(getattr(error, "code", None) or error)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "wait": {"type": "int", "default": 15},
            "fresh": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    deadline = time.monotonic() + given["wait"]
    while True:
        unit = unit_properties(given["unit"])
        if is_dead(unit, given["fresh"]):
            module.exit_json(changed=False, state="dead", unit=unit, health="not asked")
        answer = health(given["url"]) if unit["ActiveState"] == "active" else "not asked"
        if answer == "200":
            module.exit_json(changed=False, state="ready", unit=unit, health=answer)
        if time.monotonic() > deadline:
            module.exit_json(changed=False, state="starting", unit=unit, health=answer)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
