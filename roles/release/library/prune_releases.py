"""Removes releases that nothing needs any more, with the deployments of them and their compiled kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
    module: prune_releases
    short_description: Removes releases that nothing needs, with their deployments and caches
    description:
      - Keeps the O(keep) releases that were built or deployed last, and besides them each one that a link of O(root)
        (C(current), C(previous)) leads to, or that a process runs from, of whatever service.
      - A deployment is kept as long as its release is. A half-built release is removed like any other.
    options:
      root: {type: path, required: true, description: Folder with C(releases) and C(deployments).}
      caches: {type: path, required: true, description: Folder with a cache for each release, named after its id.}
      keep: {type: int, required: true, description: "Number of releases to keep, at least 1."}
"""
RETURN = """
    releases: {type: list, returned: always, description: Ids of the releases that were removed.}
    deployments: {type: list, returned: always, description: Ids of the deployments that were removed.}
"""

LINKS = ("current", "previous")


@dataclass
class Release:
    """A folder in ``releases``; ``used`` is the Unix time of its end of building, or of its last new deployment."""

    id: str
    used: float
    deployments: set[str] = field(default_factory=set)


def read_releases(root: Path) -> dict[str, Release]:
    """Every release with its deployments.

    Raises ValueError for a deployment that cannot be read: what it needs is not known.
    """
    releases = {path.name: Release(path.name, _time(path / "release.json")) for path in _folders(root / "releases")}
    for folder in _folders(root / "deployments"):
        document = folder / "deployment.json"
        if not document.exists():  # cut off before its last file; nothing can have been started from it
            continue
        try:
            release = json.loads(document.read_text(encoding="utf-8"))["release"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{document} cannot be read ({error!r}), so what it needs is not known") from error
        if release in releases:
            releases[release].deployments.add(folder.name)
            releases[release].used = max(releases[release].used, _time(document))
    return releases


def linked(root: Path) -> set[str]:
    """The deployments that the links lead to."""
    return {os.path.basename(os.readlink(root / name)) for name in LINKS if (root / name).is_symlink()}


def running(releases: Path, processes: Path = Path("/proc")) -> set[str]:
    """Ids of the releases that processes of this host have files of: mapped, or as their program.

    Both are looked at because a virtual environment's interpreter is a link out of it, and SGLang's schedulers replace
    their command line. The kernel's own threads and what ends meanwhile have neither.
    """
    path = re.compile(re.escape(os.fsencode(f"{releases.resolve()}/")) + rb"([^/\0\n ]+)")
    found: set[str] = set()
    for process in processes.glob("[0-9]*"):
        for file in ("cmdline", "maps"):
            try:
                text = (process / file).read_bytes()
            except OSError:
                continue
            found |= {os.fsdecode(name) for name in path.findall(text)}
    return found


def to_remove(releases: Iterable[Release], protected: set[str], keep: int) -> list[Release]:
    """All but the ``keep`` releases that were used last and the ``protected`` ones."""
    by_use = sorted(releases, key=lambda release: release.used, reverse=True)
    return [release for release in by_use[keep:] if release.id not in protected]


def remove(root: Path, caches: Path, release: Release) -> None:
    """Remove one release: what leads to it first, so that a run that is cut off leaves no deployment without it."""
    deployments = [root / "deployments" / deployment for deployment in sorted(release.deployments)]
    built = root / "releases" / release.id
    for folder in (*deployments, built, caches / release.id):
        # Its last file first: without it a folder counts as half-made, and is made anew where it is wanted again.
        for document in ("deployment.json", "release.json"):
            (folder / document).unlink(missing_ok=True)
        if folder.is_dir():
            shutil.rmtree(folder)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "caches": {"type": "path", "required": True},
            "keep": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    root, caches, keep = Path(module.params["root"]), Path(module.params["caches"]), module.params["keep"]
    try:
        releases = read_releases(root)
        active = linked(root)
        protected = running(root / "releases") | {
            release.id for release in releases.values() if release.deployments & active
        }
        gone = to_remove(releases.values(), protected, keep)
        if not module.check_mode:
            for release in gone:
                remove(root, caches, release)
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"Nothing more was removed: {error}.")
    module.exit_json(
        changed=bool(gone),
        releases=sorted(release.id for release in gone),
        deployments=sorted(deployment for release in gone for deployment in release.deployments),
    )


if __name__ == "__main__":
    main()
