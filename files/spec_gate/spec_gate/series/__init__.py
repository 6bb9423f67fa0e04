"""Patch series, one folder per SGLang version: one thin `<module>.patch` per patched module, and manifest.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from importlib import metadata
from pathlib import Path

MANIFEST_SCHEMA = "spec_gate.manifest/1"
DIRECTORY = Path(__file__).parent

# The series id as a literal in the patched module. It cannot contain itself: it is taken out before the id is computed.
_LITERAL = re.compile(rb'(?<=register\(__name__, ")[^"\n]*(?="\))')


class SeriesError(Exception):
    """The series cannot be used here. The message says what was found, what is known and what to do."""


@dataclasses.dataclass(frozen=True)
class File:
    """A patched file: its path below site-packages, its module, and its SHA-256 without and with the patch."""

    path: str
    module: str
    upstream_sha256: str
    patched_sha256: str


@dataclasses.dataclass(frozen=True)
class Series:
    """A patch series as its manifest describes it, and the folder that holds it."""

    directory: Path
    sglang_version: str
    id: str
    files: tuple[File, ...]

    def patch(self, file: File) -> Path:
        """The patch of one of the files."""
        return self.directory / f"{file.module}.patch"


def known_versions(directory: Path = DIRECTORY) -> list[str]:
    """The SGLang versions that `directory` has a series for."""
    return sorted(manifest.parent.name for manifest in directory.glob("*/manifest.json"))


def sglang_version(site_packages: Path) -> str:
    """The version of SGLang in `site_packages`, by its metadata. Raises SeriesError when there is none."""
    found = next(iter(metadata.distributions(name="sglang", path=[str(site_packages)])), None)
    if found is None:
        raise SeriesError(f"no SGLang is installed in {site_packages}: give the site-packages folder of the release")
    return found.version


def load(site_packages: Path, directory: Path = DIRECTORY) -> Series:
    """The series for the SGLang installed in `site_packages`. Raises SeriesError when `directory` has none for it."""
    version = sglang_version(site_packages)
    manifest = directory / version / "manifest.json"
    if not manifest.is_file():
        known = ", ".join(known_versions(directory)) or "none"
        raise SeriesError(f"SGLang {version} is installed in {site_packages}, known are {known}: install one of these")
    document = json.loads(manifest.read_text(encoding="utf-8"))
    if document.get("schema") != MANIFEST_SCHEMA:
        raise SeriesError(f"{manifest} has the schema {document.get('schema')!r}, known is {MANIFEST_SCHEMA!r}")
    series = Series(manifest.parent, version, document["series"], tuple(File(**file) for file in document["files"]))
    if series.id != series_id(version, series.directory):
        raise SeriesError(f"the patches in {series.directory} are not those of manifest {series.id}: build it again")
    return series


def patches(directory: Path) -> list[Path]:
    """The patch files in the folder of one version, in the order of their names."""
    return sorted(directory.glob("*.patch"))


def series_id(version: str, directory: Path) -> str:
    """The id of the patches in `directory`: `<version>-<first 12 hex digits of their SHA-256 without the id>`."""
    digest = hashlib.sha256()
    for patch in patches(directory):
        text = _LITERAL.sub(b"", patch.read_bytes())
        digest.update(f"{patch.name}:{len(text)}:".encode() + text)
    return f"{version}-{digest.hexdigest()[:12]}"


def with_series_id(text: bytes, series: str) -> bytes:
    """A patch with the literal series id in it replaced by `series`."""
    return _LITERAL.sub(series.encode(), text)
