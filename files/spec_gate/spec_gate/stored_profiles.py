"""Which of the profiles stored on a host is that of a server.

    python -m spec_gate.stored_profiles DIRECTORY SERVER ARGUMENTS...

prints one JSON line for a server that would be started with these arguments: `key`, what a profile of it is bound to;
`profile`, the `id`, `path` and content of the newest that is, or null; and `refused`, why each other one is not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_gate import profile as profiles


def choose(directory: Path, key: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[dict[str, str]]]:
    """The newest profile in `directory` that has `key`, as `{"path", **document}`; and the others with the reason."""
    fitting: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for path in sorted(directory.glob("*.json")):
        try:
            profile = profiles.load(path)
        except profiles.ProfileError as error:
            refused.append({"path": str(path), "reason": str(error)})
            continue
        differing = profiles.mismatch(profile.key, key)
        if differing is not None:
            refused.append({"path": str(path), "reason": differing})
        else:
            fitting.append({"path": str(path), **json.loads(path.read_text(encoding="utf-8"))})
    return max(fitting, key=lambda document: document["made"], default=None), refused


def main() -> None:
    """Print the line for the command line's arguments; SGLang refuses those that it does not know."""
    from sglang.srt.server_args import prepare_server_args

    from spec_gate.server_key import server_key

    key = server_key(prepare_server_args(sys.argv[2:]))
    found, refused = choose(Path(sys.argv[1]), key)
    print(json.dumps({"key": key, "profile": found, "refused": refused}))


if __name__ == "__main__":
    main()
