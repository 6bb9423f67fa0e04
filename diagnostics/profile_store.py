"""Profiles on the host: where the server reads them, and where the next deploy finds them."""

from __future__ import annotations

import base64
import json
import shlex
from typing import Any

from diagnostics.connect import HostUnreachable, connect, execute
from diagnostics.inventory import Host


def store(host: Host, profile: dict[str, Any], timeout: float) -> str:
    """Write *profile* on *host*, owned by root and readable by all; return its path. Raises HostUnreachable."""
    path = f"{host.release_root}/profiles/{profile['id']}.json"
    text = base64.b64encode((json.dumps(profile, indent=2) + "\n").encode()).decode()
    # Replaced by rename: a server that starts meanwhile never reads half of it.
    script = (
        f"set -e; umask 022; mkdir -p {shlex.quote(path.rpartition('/')[0])}; "
        f"echo {text} | base64 -d >{shlex.quote(path + '.new')}; mv {shlex.quote(path + '.new')} {shlex.quote(path)}"
    )
    with connect(host, timeout) as connection:
        answer = execute(connection, f"sudo -n sh -c {shlex.quote(script)}", timeout)
    if not answer.ok:
        raise HostUnreachable(f"the profile was not stored in {path}: {answer.stderr.strip()}")
    return path
