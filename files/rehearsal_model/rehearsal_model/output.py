"""Writes a trained pair as SGLang and Hugging Face libraries load it, whole or not at all."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
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
    """Whether each file has the hash that the manifest gives it."""
    try:
        return all(_sha256(directory / name) == digest for name, digest in manifest["files"].items())
    except OSError:
        return False


@contextmanager
def locked(directory: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file beside `directory`, so that of two processes one trains and the other finds the result.

    The lock file stays: to remove it would let a third process lock another file of the same name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(directory.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"waiting for another process that writes {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory` that takes its place when the block ends without an exception.

    To be used under `locked`.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def write_manifest(directory: Path, facts: dict) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    hashes = {str(path.relative_to(directory)): _sha256(path) for path in files}
    text = json.dumps({"schema": SCHEMA, **facts, "files": hashes}, indent=2) + "\n"
    (directory / MANIFEST).write_text(text)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
