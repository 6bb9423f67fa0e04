"""Which files an interpreter imports modules from, and the hash of the code that it would load.

Runs inside the interpreter of the serving processes, started as they were (same flags, environment, working folder and
user) by the collector, which sends this file's text. Nothing is imported from the modules that are looked for: each
finder is asked where it would find them. Reads only. Needs the standard library of Python 3.9.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import marshal
import os
import sys
import types
from collections.abc import Callable
from types import CodeType
from typing import Any

CodeHash = Callable[[CodeType], str]


def report(modules: list[str], first_path: str | None, code_sha256: CodeHash) -> dict[str, Any]:
    """Where this interpreter finds each of `modules`, and every further copy on its path.

    `first_path` replaces the entry that `python -c` puts first on sys.path by the one that the server's command line
    gives (None when it gives none). Returns `{"executable", "version", "path", "sglang_version", "modules": {name:
    {...}}}`.
    """
    if first_path is not None and sys.path and sys.path[0] == "":
        sys.path[0] = first_path
    return {
        "executable": sys.executable,
        "version": sys.version.split()[0],
        "path": list(sys.path),
        "user_site": not sys.flags.no_user_site,
        "sglang_version": _version("sglang"),
        "modules": {name: describe(name, code_sha256) for name in modules},
    }


def describe(name: str, code_sha256: CodeHash) -> dict[str, Any]:
    """The file that `import name` would load, what it contains, and the other files that it could have been."""
    spec = find_spec(name)
    origin = spec.origin if spec is not None else None
    if origin is None:
        return {"file": None, "copies": copies(name)}
    result: dict[str, Any] = {"file": origin, **file_facts(origin), "compiled": None}
    try:
        with open(origin, "rb") as file:
            source = file.read()
        result["source_code_sha256"] = code_sha256(compile(source, origin, "exec", dont_inherit=True))
        result["compiled"] = compiled(origin, source, code_sha256)
    except (OSError, SyntaxError, ValueError, TypeError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["copies"] = [copy for copy in copies(name) if not _same_file(copy["file"], origin)]
    return result


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module, found as import does but without importing its parent packages."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        spec = _find(package, path)
        if spec is None or end == len(parts):
            break
        if spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
        # A package without __init__.py looks its parent's path up in sys.modules.
        stand_in = types.ModuleType(package)
        stand_in.__path__ = path
        sys.modules.setdefault(package, stand_in)
    return spec


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    # Editable installs put finders of their own on sys.meta_path.
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def copies(name: str) -> list[dict[str, Any]]:
    """Every file with this module's name below an entry of sys.path, in the path's order."""
    relative = os.path.join(*name.split(".")) + ".py"
    found = [os.path.join(entry, relative) for entry in sys.path if entry]
    return [{"file": file, **file_facts(file)} for file in found if os.path.isfile(file)]


def file_facts(path: str) -> dict[str, Any]:
    """SHA-256, size in bytes, and the times of the last change of content and of the directory entry (Unix seconds)."""
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        return {"sha256": None, "error": f"{type(error).__name__}: {error.strerror}"}
    return {"sha256": digest, "size": status.st_size, "mtime": status.st_mtime, "ctime": status.st_ctime}


def compiled(origin: str, source: bytes, code_sha256: CodeHash) -> dict[str, Any] | None:
    """The compiled file that belongs to `origin`: its kind, whether import would use it, and the hash of its code.

    Follows the rules of importlib: a compiled file with a timestamp must carry the source's time and size; one with a
    checked hash must carry the source's hash; one with an unchecked hash is used whatever the source says.
    """
    try:
        path = importlib.util.cache_from_source(origin)
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, NotImplementedError):
        return None
    result: dict[str, Any] = {"file": path, "size": len(data), "kind": "damaged", "used": False}
    if len(data) < 16 or data[:4] != importlib.util.MAGIC_NUMBER:
        return {**result, "kind": "other interpreter" if len(data) >= 16 else "damaged"}
    flags = int.from_bytes(data[4:8], "little")
    if flags & 0b01:
        checked = bool(flags & 0b10)
        result["kind"] = "checked hash" if checked else "unchecked hash"
        import _imp

        mode = _imp.check_hash_based_pycs
        verify = mode == "always" or (checked and mode != "never")
        result["used"] = not verify or data[8:16] == importlib.util.source_hash(source)
    else:
        result["kind"] = "timestamp"
        status = os.stat(origin)
        stamp = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
        result["used"] = (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")) == stamp
    try:
        result["code_sha256"] = code_sha256(marshal.loads(data[16:]))
    except (ValueError, TypeError, EOFError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one == other
