"""Writes a trained pair as SGLang and Hugging Face libraries load it, whole or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEMA = "specgate.rehearsal_model/1"
MANIFEST = "manifest.json"


class OutputError(Exception):
    """The output directory cannot be used; the message says what to do."""


def read_manifest(directory: Path) -> dict | None:
    """The manifest of a finished pair; None where there is none, OutputError where the directory is somebody else's."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["schema"] == SCHEMA:
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise OutputError(
        f"{directory} is not empty and holds no rehearsal model ({MANIFEST} with schema {SCHEMA}): "
        "name another --output, or remove it"
    )


def is_complete(directory: Path, manifest: dict) -> bool:
    """Whether each file that the manifest names has the bytes that it names."""
    try:
        return all(_sha256(directory / name) == digest for name, digest in manifest["files"].items())
    except OSError:
        return False


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory` that takes its place when the block ends without an exception.

    Holds a lock meanwhile, so that of two processes only one trains: read the manifest (again) within the block's lock.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed: nobody else writes here under the lock
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


@contextmanager
def locked(directory: Path, waiting: str, show) -> Iterator[None]:
    """Holds the lock file beside `directory`, which stays; shows `waiting` if another process has it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(directory.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_manifest(directory: Path, facts: dict) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    hashes = {str(path.relative_to(directory)): _sha256(path) for path in files}
    text = json.dumps({"schema": SCHEMA, **facts, "files": hashes}, indent=2) + "\n"
    (directory / MANIFEST).write_text(text)
    os.sync()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
