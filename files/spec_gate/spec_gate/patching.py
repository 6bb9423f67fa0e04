"""Applies a patch series to an installed SGLang, and takes it off again to the exact bytes.

    python -m spec_gate.patching apply|remove|check --site-packages DIR [--series-directory DIR]

Only files whose SHA-256 the manifest knows are touched, and each is replaced by rename, never written in place: the
installer hard-links files from its cache, so writing in place would change every other release as well. Everything is
prepared and checked before the first file is replaced. A run that was killed half-way leaves a mixture of pristine and
patched files, which the next run completes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from spec_gate import series as series_module
from spec_gate.series import File, Series, SeriesError

FileState = Literal["applied", "pristine", "unknown"]
State = Literal["applied", "pristine", "mixed", "unknown"]

_TEMPORARY = ".spec_gate-"


class PatchError(Exception):
    """Nothing was changed, or what was begun can be completed by running again. The message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A file of the series as it lies in site-packages; `sha256` is None when it is missing."""

    file: File
    sha256: str | None

    @property
    def state(self) -> FileState:
        """Whether the file is as released, as patched, or neither."""
        if self.sha256 == self.file.upstream_sha256:
            return "pristine"
        return "applied" if self.sha256 == self.file.patched_sha256 else "unknown"


def sha256(data: bytes) -> str:
    """SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def examine(site_packages: Path, series: Series) -> list[Found]:
    """Hash the files of the series; reads only."""
    found = []
    for file in series.files:
        path = site_packages / file.path
        found.append(Found(file, sha256(path.read_bytes()) if path.is_file() else None))
    return found


def state_of(found: list[Found]) -> State:
    """The state of the files taken together; "mixed" is what a killed run leaves, and the next one completes it."""
    states = {one.state for one in found}
    if "unknown" in states:
        return "unknown"
    return states.pop() if len(states) == 1 else "mixed"


def patched(content: bytes, patch: bytes, name: str, *, reverse: bool = False) -> bytes:
    """`content` with `patch` applied, or taken off, by GNU patch without fuzz. `name` is for the error message.

    Raises PatchError when the patch does not fit or GNU patch is missing.
    """
    with tempfile.TemporaryDirectory(prefix="spec_gate-") as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        before.write_bytes(content)
        command = ["patch", "--batch", "--silent", "--fuzz=0", "--reject-file=-", f"--output={after}"]
        command += ["--reverse" if reverse else "--forward", str(before)]
        try:
            result = subprocess.run(command, input=patch, capture_output=True, check=False)
        except FileNotFoundError:
            raise PatchError("GNU patch is not installed: install the package `patch`") from None
        if result.returncode != 0:
            said = (result.stdout + result.stderr).decode(errors="replace").strip()
            raise PatchError(f"the patch does not fit {name}: {said}")
        return after.read_bytes()


def convert(site_packages: Path, series: Series, to: Literal["applied", "pristine"]) -> bool:
    """Bring every file of the series into the state `to`; return whether anything had to be changed.

    Raises PatchError, with nothing changed, when a file is in neither state or a patch does not give the known hash.
    """
    with _exclusive(site_packages):
        found = examine(site_packages, series)
        unknown = [one for one in found if one.state == "unknown"]
        if unknown:
            raise PatchError(_refusal(site_packages, series, unknown))
        todo = [one.file for one in found if one.state != to]
        if not todo:
            return False
        # Inside site-packages: a rename must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=site_packages) as folder:
            prepared = [_prepare(site_packages, series, file, to, Path(folder)) for file in todo]
            for new, file in zip(prepared, todo, strict=True):
                path = site_packages / file.path
                # First: a compiled file that is never checked against its source would outlive it.
                _remove_compiled(path)
                new.replace(path)
                _sync(path.parent)
    return True


def _prepare(site_packages: Path, series: Series, file: File, to: str, folder: Path) -> Path:
    """A copy of the file in the state `to`, its hash checked and its bytes on the disk, ready to be renamed."""
    path = site_packages / file.path
    patch = series.patch(file).read_bytes()
    content = patched(path.read_bytes(), patch, file.path, reverse=to == "pristine")
    known = file.patched_sha256 if to == "applied" else file.upstream_sha256
    if sha256(content) != known:
        raise PatchError(
            f"{file.path} would become {sha256(content)}, the manifest of {series.id} says {known}: "
            "build the series again"
        )
    new = folder / file.module
    with new.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.copymode(path, new)
    owner = path.stat()
    if (owner.st_uid, owner.st_gid) != (new.stat().st_uid, new.stat().st_gid):
        os.chown(new, owner.st_uid, owner.st_gid)
    return new


def _remove_compiled(path: Path) -> None:
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(site_packages: Path) -> Iterator[None]:
    """One run at a time; what a killed run left of its copies is removed."""
    descriptor = os.open(site_packages, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another run is patching {site_packages}: wait for it, then run again") from None
        for left in site_packages.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(site_packages: Path, series: Series, unknown: list[Found]) -> str:
    files = "; ".join(
        f"{one.file.path} is {one.sha256 or 'missing'}, known are {one.file.upstream_sha256} (as released) and "
        f"{one.file.patched_sha256} (patched)"
        for one in unknown
    )
    return (
        f"refused, nothing was changed: {site_packages} says SGLang {series.sglang_version}, but {files}: "
        "install that release afresh"
    )


def main() -> int:
    """Run the command line; prints one JSON line. The exit status is 0, or 1 with one sentence on standard error."""
    parser = argparse.ArgumentParser(prog="python -m spec_gate.patching", description=__doc__)
    parser.add_argument("action", choices=["apply", "remove", "check"])
    parser.add_argument("--site-packages", required=True, type=Path, help="where SGLang is installed")
    parser.add_argument(
        "--series-directory", type=Path, default=series_module.DIRECTORY, help="holds one folder per SGLang version"
    )
    arguments = parser.parse_args()
    site_packages = arguments.site_packages
    try:
        series = series_module.load(site_packages, arguments.series_directory)
        changed = False
        if arguments.action != "check":
            changed = convert(site_packages, series, "applied" if arguments.action == "apply" else "pristine")
        found = examine(site_packages, series)
        state = state_of(found)
        files = [{"path": one.file.path, "sha256": one.sha256, "state": one.state} for one in found]
        print(json.dumps({"changed": changed, "series": series.id, "state": state, "files": files}))
        if state == "unknown":
            raise PatchError(_refusal(site_packages, series, [one for one in found if one.state == "unknown"]))
    except (SeriesError, PatchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
