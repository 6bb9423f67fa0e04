"""Values as systemd's files want them: command-line arguments of ExecStart= and lines of an EnvironmentFile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def _exec_word(text: str) -> str:
    """One word of ExecStart=; systemd would expand ``%`` and ``$`` and split at white space (systemd.service(5))."""
    if "\n" in text:
        raise AnsibleFilterError(f"a line break cannot stand in an argument of a unit: {text!r}")
    text = text.replace("%", "%%").replace("$", "$$")
    if text and not any(character in text for character in " \t\"'\\;"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def server_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """``{"tp-size": 8, "enable-metrics": True}`` to ``["--tp-size 8", "--enable-metrics"]``, one option a line.

    True is a bare option, False and None leave it out, a list gives several words, a mapping is JSON.
    """
    lines = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words = [f"--{name}"]
        if isinstance(value, Mapping):
            words.append(_exec_word(json.dumps(value)))
        elif isinstance(value, list | tuple):
            words += [_exec_word(str(item)) for item in value]
        elif value is not True:
            words.append(_exec_word(str(value)))
        lines.append(" ".join(words))
    return lines


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    """``{"NAME": "a b"}`` to ``['NAME="a b"']``, sorted by name (systemd.exec(5), EnvironmentFile=)."""
    lines = []
    for name, value in sorted(environment.items()):
        text = str(value)
        if "\n" in text:
            raise AnsibleFilterError(f"a line break cannot stand in the environment variable {name}")
        escaped = "".join("\\" + c if c in '"\\`$' else c for c in text)
        lines.append(f'{name}="{escaped}"')
    return lines


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"server_arguments": server_arguments, "environment_lines": environment_lines}
