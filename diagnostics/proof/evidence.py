"""Evidence about one host: gathered over SSH, saved, and loaded again.

One command is run on the host (one round trip of SSH beside the login): the host's Python reads the collector from
standard input and prints one document, `specgate.evidence/1` (docs/verify-worker.md). It runs as root where the login
user may use sudo without a password, and otherwise as that user, who sees less; the document says what is missing.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fabric
from invoke.exceptions import CommandTimedOut

from diagnostics.inventory import REPOSITORY, Host
from diagnostics.proof.collector import SCHEMA

Evidence = Mapping[str, Any]
"""A document `specgate.evidence/1`. Of a host that could not be reached it has only `schema`, `host` and `error`."""

GATE = REPOSITORY / "files" / "spec_gate" / "spec_gate"

_SHIPPED = ("logs", "collector")
_PROGRAM = """\
import sys, types
package = types.ModuleType("diagnostics.proof")
sys.modules.update({"diagnostics": types.ModuleType("diagnostics"), "diagnostics.proof": package})
for name, text in SHIPPED.items():
    module = types.ModuleType("diagnostics.proof." + name)
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
module.print_evidence(REQUEST, SOURCES)
"""
_READ_PROGRAM = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.stdin.buffer.read())))"
# The program arrives on standard input: sudo writes the command line that it runs into the system's log.
_COMMAND = f"""\
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then sudo="sudo -n"; else sudo=; fi
command -v python3 >/dev/null || {{ echo "python3 is not installed" >&2; exit 127; }}
printf %s "$0" | $sudo python3 -I -c {shlex.quote(_READ_PROGRAM)}
"""


class EvidenceError(Exception):
    """Saved evidence cannot be read; the message says which file and why."""


def reference() -> list[dict[str, Any]]:
    """The manifests of the patch series that this checkout ships."""
    files = sorted((GATE / "series").glob("*/manifest.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def command(request: Mapping[str, Any]) -> str:
    """The shell command that prints the evidence for the collector's `request`."""
    folder = Path(__file__).parent
    texts = {
        "SHIPPED": {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in _SHIPPED},
        "SOURCES": {
            "resolve": (folder / "resolve.py").read_text(encoding="utf-8"),
            "loaded": (GATE / "loaded.py").read_text(encoding="utf-8"),
        },
        "REQUEST": dict(request),
    }
    program = "".join(f"{name} = {value!r}\n" for name, value in texts.items()) + _PROGRAM
    return shlex.join(["sh", "-c", _COMMAND, base64.b64encode(zlib.compress(program.encode(), 9)).decode()])


def gather(connection: fabric.Connection, host: Host, timeout: float) -> Evidence:
    """Gather the evidence of *host* over an open connection. `timeout` (seconds) bounds each slow step and the whole.

    Never raises for what the host does: evidence that could not be gathered is evidence of that.
    """
    manifests = reference()
    modules = sorted({file["module"] for manifest in manifests for file in manifest["files"]})
    request = {
        "unit": host.unit,
        "deployment_path": host.deployment_path,
        "modules": modules,
        "port": host.service_port,
        "timeout": timeout / 4,
    }
    try:
        result = connection.run(command(request), hide=True, warn=True, in_stream=False, timeout=timeout)
    except CommandTimedOut:
        return unreachable(host.name, f"the evidence was not gathered within {timeout:g} s")
    except Exception as error:  # the connection's libraries raise many kinds; none may hide another host
        return unreachable(host.name, f"the connection broke: {type(error).__name__}: {error}")
    if result.exited != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.exited}"]
        return unreachable(host.name, f"the collector failed on the host: {reason[0]}")
    # A login script may print something of its own before.
    last_line = result.stdout.strip().rpartition("\n")[2]
    try:
        document = json.loads(last_line)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return unreachable(host.name, "the host printed something other than the evidence; check its login scripts")
    return {**document, "host": host.name, "error": None, "reference": manifests}


def unreachable(host: str, error: str) -> Evidence:
    """The evidence about a host of which nothing could be read."""
    return {"schema": SCHEMA, "host": host, "error": error}


def save(evidence: Sequence[Evidence], folder: Path) -> None:
    """Write one file per host. The evidence shows command lines and paths, but no secrets."""
    folder.mkdir(parents=True, exist_ok=True)
    for document in evidence:
        text = json.dumps(document, indent=1, sort_keys=True)
        (folder / f"{document['host'].replace('/', '_')}.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path) -> list[Evidence]:
    """Read what `save` wrote. Raises EvidenceError when the folder has no evidence, or a file is none."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise EvidenceError(f"{folder} holds no evidence; give a folder that --save has written")
    documents = []
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise EvidenceError(f"{file} cannot be read: {error}") from error
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA or not isinstance(document.get("host"), str):
            raise EvidenceError(f"{file} is {schema or 'no evidence'}; this version reads {SCHEMA}")
        documents.append(document)
    return documents
