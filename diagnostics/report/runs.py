"""The folders of documents: ``<folder>/<host>/<UTC time>/<task>.json``, one for each run of a deploy or a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diagnostics.inventory import UsageError

TIME_FORMAT = "%Y%m%dT%H%M%SZ"

SCHEMAS: Mapping[str, str] = {
    "run": "specgate.run/1",
    "outcome": "specgate.outcome/1",
    "deployment": "specgate.deployment/1",
    "verify-worker": "specgate.verdict/1",
    "smoke": "specgate.smoke/1",
    "load": "specgate.load/1",
    "calibrate": "specgate.calibration/1",
    "compare": "specgate.comparison/1",
    "profile": "specgate.profile/1",
}
"""Name of a document in a run's folder to the schema that this version reads."""


@dataclass(frozen=True)
class Document:
    """One document as it was read; ``problem`` says why it cannot be used, and then ``content`` is empty."""

    name: str
    path: Path
    sha256: str
    content: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def entry(self) -> Mapping[str, Any]:
        """The first host's entry of a document of a ``fab`` task."""
        hosts = self.content.get("hosts")
        return hosts[0] if isinstance(hosts, list) and hosts and isinstance(hosts[0], dict) else {}


@dataclass(frozen=True)
class Run:
    """The documents of one run on one host."""

    host: str
    time: datetime
    folder: Path
    documents: Mapping[str, Document]

    def content(self, name: str) -> Mapping[str, Any]:
        """The document *name*, empty where it is not there or cannot be used."""
        return self.documents[name].content if name in self.documents else {}

    def entry(self, name: str) -> Mapping[str, Any]:
        """The host's entry in the document *name* of a ``fab`` task, empty where there is none."""
        return self.documents[name].entry if name in self.documents else {}

    @property
    def is_deploy(self) -> bool:
        """Whether ``deploy.yml`` made it."""
        return "run" in self.documents


def save(document: Mapping[str, Any], name: str, host: str, root: Path) -> Path:
    """Write the document *name* into the folder of a run of *host* that ends now; returns its path."""
    folder = root / host / datetime.now(UTC).strftime(TIME_FORMAT)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_runs(root: Path, hosts: Sequence[str] | None = None) -> dict[str, list[Run]]:
    """Host to its runs, oldest first; of those of *hosts* that have any, or of all.

    Raises UsageError when there is none.
    """
    if not root.is_dir():
        raise UsageError(
            f"{str(root)!r} is not a folder; deploy first, or give a folder of a deploy's documents: --from"
        )
    names = sorted(path.name for path in root.iterdir() if path.is_dir()) if hosts is None else hosts
    runs = {name: found for name in names if (found := _runs_of(root / name))}
    if not runs:
        raise UsageError(
            f"{root} has no documents (<host>/<time>/<task>.json){'' if hosts is None else ' of ' + ', '.join(hosts)}; "
            "deploy first, or give --from"
        )
    return runs


def _runs_of(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.glob("*/")):
        try:
            time = datetime.strptime(path.name, TIME_FORMAT).replace(tzinfo=UTC)
        except ValueError:
            continue
        documents = {file.stem: _read(file) for file in sorted(path.glob("*.json")) if file.stem in SCHEMAS}
        if documents:
            runs.append(Run(folder.name, time, path, documents))
    return runs


def _read(path: Path) -> Document:
    name = path.stem
    try:
        data = path.read_bytes()
    except OSError as error:
        return Document(name, path, "", problem=f"cannot be read: {error.strerror}")
    digest = hashlib.sha256(data).hexdigest()
    try:
        content = json.loads(data)
        schema = content["schema"]
    except (ValueError, KeyError, TypeError) as error:
        return Document(name, path, digest, problem=f"is not a document ({type(error).__name__}: {error})")
    if schema != SCHEMAS[name]:
        return Document(name, path, digest, problem=f"has schema {schema!r}; this version reads {SCHEMAS[name]}")
    return Document(name, path, digest, content)
