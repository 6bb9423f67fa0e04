"""Lays the sources of an SGLang fork over the released package of the same version: `lay_over.py ARCHIVE`.

Run by the release's own interpreter. ARCHIVE is the folder of the repository that has `pyproject.toml` and `sglang/`.
A build of it would need SGLang's own tools, a Rust compiler among them, and the network; what it would compile, and
what it would write by itself, is taken from the release instead. Refuses a fork that asks for other packages than those
that are installed. New folders take the place of old ones, so nothing is written through a link into the cache.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import tomllib
from packaging.requirements import Requirement

BUILT = ("_version.py", "*.so")
"""What is in the installed package and in no repository: written or compiled by SGLang's build."""


def unmet(dependencies: list[str], released: set[str]) -> list[str]:
    """What the fork asks for and the release does not have, each as "name version, asked for is ...".

    What the release asks for as well and has not (the lock files for hosts without a GPU leave it out) is no lack.
    """
    found = []
    for requirement in map(Requirement, dependencies):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if normalised(requirement.name) not in released:
                found.append(f"{requirement.name} is not locked, asked for is {requirement}")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} is {version}, asked for is {requirement}")
    return found


def normalised(name: str) -> str:
    """The name of a distribution as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lay_over(archive: Path, packages: Path) -> None:
    """Replace the package `sglang` in *packages*; exits with a reason when the archive does not fit."""
    old, new = packages / "sglang", packages / ".fork"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    unpack = ["tar", "--extract", "--gzip", "--no-same-owner", "--no-same-permissions", f"--file={archive}"]
    subprocess.run([*unpack, f"--directory={new}"], check=True)
    try:
        project = tomllib.loads((new / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if not (new / "sglang/__init__.py").is_file():
            raise FileNotFoundError("sglang/__init__.py")
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"the folder of the fork is no SGLang: {error!r}")
    released = {normalised(Requirement(line).name) for line in metadata.requires("sglang") or []}
    if problems := unmet(project.get("dependencies", []), released):
        sys.exit(f"the fork asks for other packages than the lock file pins: {'; '.join(problems)}")
    for pattern in BUILT:
        for path in old.rglob(pattern):
            target = new / "sglang" / path.relative_to(old)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
    shutil.rmtree(old)
    (new / "sglang").rename(old)
    shutil.rmtree(new)


if __name__ == "__main__":
    lay_over(Path(sys.argv[1]), Path(sysconfig.get_paths()["purelib"]))
