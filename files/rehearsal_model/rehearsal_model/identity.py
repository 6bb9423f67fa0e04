"""What a trained pair depends on, as one hash, and where it is cached by that hash. Standard library only."""

import hashlib
import os
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parent


def source_sha256(directory: Path = PACKAGE) -> str:
    """Over names and contents of the package's Python files: code, words and training plan, the seed among them."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of the libraries that train; importlib.metadata.PackageNotFoundError when one is not installed."""
    return {name: metadata.version(name) for name in ("torch", "tokenizers")}


def content_hash() -> str:
    """16 hexadecimal digits over the sources and the libraries' versions."""
    made_by = [source_sha256(), *(f"{name}=={version}" for name, version in library_versions().items())]
    return hashlib.sha256("\n".join(made_by).encode()).hexdigest()[:16]


def cache_directory() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "specgate" / "rehearsal_model" / content_hash()
