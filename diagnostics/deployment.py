"""What a host claims to run: ``current/deployment.json``, as the deploy wrote it; the inventory may differ."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

import fabric

from diagnostics.connect import HostUnreachable, execute
from diagnostics.inventory import Host

SCHEMA = "specgate.deployment/1"


@dataclass(frozen=True)
class Deployment:
    """The active deployment of one host; ``address`` and ``port`` are where its server listens."""

    id: str
    release: str
    sglang_version: str
    series: str | None
    threshold: int
    address: str
    port: int
    runtime_directory: str


def read_deployment(connection: fabric.Connection, host: Host, timeout: float = 10.0) -> Deployment:
    """Read the active deployment; raises HostUnreachable when there is none or it is not understood."""
    path = host.deployment_path
    answer = execute(connection, f"cat {shlex.quote(path)}", timeout)
    if not answer.ok:
        raise HostUnreachable(f"nothing is deployed: {answer.stderr.strip()}; run deploy.yml")
    try:
        document = json.loads(answer.stdout)
        if document["schema"] != SCHEMA:
            raise HostUnreachable(f"{path} has schema {document['schema']!r}; this version reads {SCHEMA}")
        return Deployment(**{name: document[name] for name in Deployment.__dataclass_fields__})
    except (ValueError, KeyError, TypeError) as error:
        raise HostUnreachable(f"{path} is not a deployment ({type(error).__name__}: {error})") from error
