"""SHA-256 over the files of folders on the controller, whatever their order, times and owners."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = """
    name: source_sha256
    short_description: SHA-256 over the names and bytes of a folder's source files
    description:
      - One digest for each folder (or file) named. What a build or an interpreter leaves behind is not counted.
    options:
      _terms:
        description: Folders or files on the controller.
        required: true
"""

BUILD_LEFTOVERS = {"__pycache__", "build", "dist"}


def source_files(root: Path) -> list[Path]:
    """The files below ``root`` that are source, sorted by their relative path; ``root`` itself when it is a file."""
    if root.is_file():
        return [root]
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(
            part in BUILD_LEFTOVERS or part.startswith(".") or part.endswith(".egg-info")
            for part in path.relative_to(root).parts
        )
    )


def source_sha256(root: Path) -> str:
    """Hexadecimal SHA-256 over relative names and contents of the source files below ``root``.

    Raises FileNotFoundError when there is none: the digest of nothing would look like a good one.
    """
    files = source_files(root)
    if not files:
        raise FileNotFoundError(f"{root}: no source file there")
    digest = hashlib.sha256()
    for path in files:
        name = path.relative_to(root).as_posix() if path != root else path.name
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class LookupModule(LookupBase):  # type: ignore[misc]
    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
        try:
            return [source_sha256(Path(str(term))) for term in terms]
        except OSError as error:
            raise AnsibleLookupError(str(error)) from error
