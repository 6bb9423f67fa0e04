"""Which code a process has loaded, whatever its files say now.

A hash of a source file proves nothing about a process that was started before the file changed, or that loaded a stale
compiled file. So each patched module registers the code object that is being executed, and the hash is taken over that.

Self-contained on purpose: the evidence collector sends the text of this file to the release's own interpreter, which
then hashes the files of the release in the same way. Hashes of different interpreter versions do not compare.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from types import CodeType
from typing import NamedTuple


class Module(NamedTuple):
    """A registered module: its name, the path it says it was loaded from, its series id, and its executed code."""

    name: str
    file: str
    series: str
    code: CodeType

    def describe(self) -> dict[str, str]:
        """The module as the identity evidence names it."""
        return {"module": self.name, "file": self.file, "series": self.series, "code_sha256": code_sha256(self.code)}


_modules: dict[str, Module] = {}


def register(name: str, series: str) -> None:
    """Record the code object that is being executed in the caller. To be called at the top of a module."""
    frame = sys._getframe(1)
    _modules[name] = Module(name, str(frame.f_globals.get("__file__", "")), series, frame.f_code)


def registered() -> list[Module]:
    """The registered modules, in the order of their names."""
    return [_modules[name] for name in sorted(_modules)]


def code_sha256(code: CodeType) -> str:
    """SHA-256, in hexadecimal, of a code object and of those nested in its constants.

    File names and line tables are left out: the same source compiled at another path hashes the same. `co_code` gives
    the instructions as compiled, even after the interpreter has specialised them. Raises TypeError for a constant of a
    type that compiled code does not contain.
    """
    return hashlib.sha256(_encode(code)).hexdigest()


def source_code_sha256(path: str) -> str:
    """The hash that a module compiled from the source file at `path` has when this interpreter loads it.

    Raises OSError when the file cannot be read and SyntaxError when it cannot be compiled.
    """
    with open(path, "rb") as file:
        return code_sha256(compile(file.read(), path, "exec", dont_inherit=True))


def _encode(value: object) -> bytes:
    """An encoding in which each value is preceded by its type and its length, so that no two values encode alike."""
    if isinstance(value, CodeType):
        fields = (
            value.co_code,
            value.co_consts,
            value.co_names,
            value.co_varnames,
            value.co_freevars,
            value.co_cellvars,
            value.co_name,
            getattr(value, "co_qualname", None),  # from Python 3.11 on, as is the exception table
            value.co_flags,
            value.co_argcount,
            value.co_posonlyargcount,
            value.co_kwonlyargcount,
            value.co_firstlineno,
            getattr(value, "co_exceptiontable", None),
        )
        kind, body = "code", b"".join(_encode(field) for field in fields)
    elif isinstance(value, tuple):
        kind, body = "tuple", b"".join(_encode(item) for item in value)
    elif isinstance(value, frozenset):  # iterates in an order that differs between processes
        kind, body = "frozenset", b"".join(sorted(_encode(item) for item in value))
    elif isinstance(value, slice):  # a constant from Python 3.14 on
        kind, body = "slice", b"".join(_encode(item) for item in (value.start, value.stop, value.step))
    elif isinstance(value, str):
        kind, body = "str", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, body = "bytes", value
    elif isinstance(value, float):  # 0.0 and -0.0 are equal and yet two constants
        kind, body = "float", struct.pack(">d", value)
    elif isinstance(value, complex):
        kind, body = "complex", struct.pack(">dd", value.real, value.imag)
    elif value is None or value is Ellipsis or isinstance(value, int):  # int covers bool, whose repr tells it apart
        kind, body = "atom", repr(value).encode()
    else:
        raise TypeError(f"compiled code contains no constant of type {type(value).__name__}")
    return f"{kind}:{len(body)}:".encode() + body
