"""A server's arguments and environment as ExecStart=, an EnvironmentFile or a plain command wants them."""

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


def _options(arguments: Mapping[str, Any]) -> list[list[str]]:
    """The words of each option: true is a bare option, false and None leave it out, a list gives several words."""
    options = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words = [f"--{name}"]
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
        options.append(words)
    return options


def server_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """``{"tp-size": 8, "enable-metrics": True}`` to ``["--tp-size 8", "--enable-metrics"]``, one option a line.

    True is a bare option, False and None leave it out, a list gives several words, a mapping is JSON.
    """
    return [" ".join([name, *map(_exec_word, words)]) for name, *words in _options(arguments)]


def server_words(arguments: Mapping[str, Any]) -> list[str]:
    """The same options as the words of a command that no shell and no systemd reads."""
    return [word for option in _options(arguments) for word in option]


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
        return {
            "server_arguments": server_arguments,
            "server_words": server_words,
            "environment_lines": environment_lines,
        }
