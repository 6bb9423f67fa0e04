"""What a host claims to run: ``current/deployment.json``, as the deploy wrote it; the inventory may differ."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fabric

from diagnostics.connect import HostUnreachable, execute
from diagnostics.inventory import Host

SCHEMA = "specgate.deployment/1"


@dataclass(frozen=True)
class Deployment:
    """The active deployment of one host; ``address`` and ``port`` are where its server listens.

    ``keys`` are SGLang's names of the keys that the server asks for: ``api-key``, ``admin-api-key``. ``simulation``
    holds the environment variables that make its figures another machine's than the host's; mostly none.
    """

    id: str
    release: str
    sglang_version: str
    series: str | None
    threshold: int
    address: str
    port: int
    runtime_directory: str
    keys: tuple[str, ...]
    simulation: dict[str, str]


def read_document(connection: fabric.Connection, host: Host, timeout: float = 10.0) -> Mapping[str, Any]:
    """Read the active ``deployment.json``; raises HostUnreachable when there is none or it is not understood."""
    path = host.deployment_path
    answer = execute(connection, f"cat {shlex.quote(path)}", timeout)
    if not answer.ok:
        raise HostUnreachable(f"nothing is deployed: {answer.stderr.strip()}; run deploy.yml")
    try:
        document: Mapping[str, Any] = json.loads(answer.stdout)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise HostUnreachable(f"{path} is not a deployment ({type(error).__name__}: {error})") from error
    if schema != SCHEMA:
        raise HostUnreachable(f"{path} has schema {schema!r}; this version reads {SCHEMA}")
    return document


def read_deployment(connection: fabric.Connection, host: Host, timeout: float = 10.0) -> Deployment:
    """Read what the diagnostics need of the active deployment; raises HostUnreachable like ``read_document``."""
    document = read_document(connection, host, timeout)
    try:
        # Written without keys when there was no way to give a server any, without simulation by older deploys.
        document = {"simulation": {}, **document, "keys": tuple(document.get("keys", ()))}
        return Deployment(**{name: document[name] for name in Deployment.__dataclass_fields__})
    except (KeyError, TypeError) as error:
        raise HostUnreachable(
            f"{host.deployment_path} is not a deployment ({type(error).__name__}: {error})"
        ) from error


def read_keys(
    connection: fabric.Connection, host: Host, deployment: Deployment, timeout: float = 10.0
) -> dict[str, str]:
    """Read the keys that the server asks for from the host, where root alone may; SGLang's name to key.

    Raises HostUnreachable, without what was read, when that is not allowed or not understood.
    """
    if not deployment.keys:
        return {}
    answer = execute(connection, f"sudo -n cat {shlex.quote(host.keys_path)}", timeout)
    if not answer.ok:
        raise HostUnreachable(f"the server's keys cannot be read: {answer.stderr.strip()}")
    try:
        document = json.loads(answer.stdout)
        return {name: str(document[name]) for name in deployment.keys}
    except (ValueError, KeyError, TypeError):
        raise HostUnreachable(f"{host.keys_path} does not have the server's keys; deploy again") from None
