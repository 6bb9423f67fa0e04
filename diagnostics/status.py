"""The state of one host's service, gathered over one SSH connection and one request to its server."""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import Any

import fabric

from diagnostics.connect import HostUnreachable, connect, execute, tunnel
from diagnostics.deployment import Deployment, read_deployment, read_keys
from diagnostics.inventory import Host
from diagnostics.server import Endpoint, ServerError, api_client, running_requests

UNIT_PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "MemoryCurrent")
GPU_FIELDS = ("index", "name", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu")


def status(host: Host, timeout: float) -> dict[str, Any]:
    """Return the unit's state, the deployment, the gate of each rank, requests and GPUs.

    ``ok`` means that the unit is active and its server answers. *timeout* (seconds) bounds each step. Raises
    HostUnreachable when the host itself does not answer.
    """
    with connect(host, timeout) as connection:
        unit = _unit(connection, host, timeout)
        facts: dict[str, Any] = {"unit": unit, "deployment": None, "gates": [], "requests": None}
        facts["gpus"] = _gpus(connection, timeout)
        reasons = (
            [] if unit["ActiveState"] == "active" else [f"{host.unit} is {unit['ActiveState']} ({unit['SubState']})"]
        )
        try:
            deployment = read_deployment(connection, host, timeout)
        except HostUnreachable as error:
            return facts | {"ok": False, "reasons": [*reasons, str(error)]}
        facts["deployment"] = {
            "id": deployment.id,
            "release": deployment.release,
            "sglang_version": deployment.sglang_version,
            "series": deployment.series,
            "threshold": deployment.threshold,
        }
        if unit["ActiveState"] == "active":
            facts["gates"], unreadable = _gates(connection, deployment, timeout)
            reasons += unreadable
            keys = read_keys(connection, host, deployment, timeout)
            with tunnel(host, deployment.address, deployment.port, timeout) as opened:
                try:
                    running, waiting = asyncio.run(
                        _requests(Endpoint(opened.socket, keys.get("api-key"), keys.get("admin-api-key")), timeout)
                    )
                    facts["requests"] = {"running": running, "waiting": waiting}
                except ServerError as error:
                    reasons.append(f"the server does not answer: {opened.failure() or error}")
    return facts | {"ok": not reasons, "reasons": reasons}


def _unit(connection: fabric.Connection, host: Host, timeout: float) -> dict[str, Any]:
    """The unit's properties as systemd names them, plus ``uptime_s`` of its main process by the host's own clock."""
    names = ",".join((*UNIT_PROPERTIES, "ExecMainStartTimestampMonotonic"))
    answer = execute(
        connection, f"systemctl show {shlex.quote(host.unit)} --property={names} && cat /proc/uptime", timeout
    )
    if not answer.ok:
        raise HostUnreachable(f"systemctl show failed: {answer.stderr.strip()}")
    *lines, uptime = answer.stdout.strip().splitlines()
    unit: dict[str, Any] = dict(line.split("=", 1) for line in lines)
    started = int(unit.pop("ExecMainStartTimestampMonotonic", "0") or 0) / 1e6
    running = unit.get("MainPID") not in (None, "0")
    return unit | {"uptime_s": round(float(uptime.split()[0]) - started, 1) if running and started else None}


def _gates(
    connection: fabric.Connection, deployment: Deployment, timeout: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """The gate's state as each tensor-parallel rank last wrote it (none without the patch), and what was unreadable."""
    # Only the service's user and root may read them.
    folder = deployment.runtime_directory
    command = f"sudo -n find {shlex.quote(folder)} -name 'rank-*.json' -exec cat {{}} +"
    answer = execute(connection, command, timeout)
    if not answer.ok:
        return [], [f"the gate's status files cannot be read: {answer.stderr.strip()}"]
    gates, decoder, text = [], json.JSONDecoder(), answer.stdout.strip()
    while text:
        try:
            document, end = decoder.raw_decode(text)
            gates.append(
                {"tp_rank": document["identity"]["tp_rank"], **document["gate"], "updated": document["updated"]}
            )
        except (ValueError, KeyError, TypeError) as error:
            return gates, [f"a status file in {folder} is unreadable: {error!r}"]
        text = text[end:].lstrip()
    return sorted(gates, key=lambda gate: gate["tp_rank"]), []


def _gpus(connection: fabric.Connection, timeout: float) -> list[dict[str, str]]:
    """One entry a GPU, in nvidia-smi's units (MiB, %, degrees Celsius); empty on a host without its driver."""
    query = f"nvidia-smi --query-gpu={','.join(GPU_FIELDS)} --format=csv,noheader,nounits"
    answer = execute(connection, query, timeout)
    lines = answer.stdout.splitlines() if answer.ok else []
    return [dict(zip(GPU_FIELDS, (part.strip() for part in line.split(",")), strict=True)) for line in lines]


async def _requests(endpoint: Endpoint, timeout: float) -> tuple[int, int]:
    async with api_client(endpoint, timeout) as client:
        return await running_requests(client)
