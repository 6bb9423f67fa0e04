"""Facts from an SGLang log of any length, in constant memory.

A log says what a server printed, never what it is: whoever can write to it can imitate any line. The verdict
therefore lets a log refute and explain, but never prove by it.

How it stays fast: the log is read in large chunks that are searched for a handful of long byte strings (`bytes.find`),
and only the lines that contain one are looked at. What no longer matters is not searched for: the identity lines and
the line that says "ready" are printed while a server starts, so from "ready" to the next start they are skipped.

Needs the standard library only, and Python 3.9: the evidence collector sends this file's text to the host.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

ARGUMENTS_MARKER = b"server_args="
IDENTITY_MARKER = b"spec_gate identity {"
TRANSITION_MARKER = b"spec_gate transition {"
READY_MARKER = b"The server is fired up and ready to roll!"
SIGNAL_MARKER = b" received. signum="
EXCEPTION_MARKER = b"Scheduler hit an exception: "

MARKERS = (
    ARGUMENTS_MARKER,
    IDENTITY_MARKER,
    TRANSITION_MARKER,
    READY_MARKER,
    SIGNAL_MARKER,
    EXCEPTION_MARKER,
)
"""Every byte string that the parser searches a log for."""

_AFTER_READY = (ARGUMENTS_MARKER, TRANSITION_MARKER, SIGNAL_MARKER, EXCEPTION_MARKER)

ARGUMENTS = frozenset(
    {
        "attention_backend",
        "context_length",
        "device",
        "disable_overlap_schedule",
        "dp_size",
        "enable_dp_attention",
        "enable_multi_layer_eagle",
        "host",
        "max_running_requests",
        "model_path",
        "nnodes",
        "node_rank",
        "page_size",
        "port",
        "pp_size",
        "served_model_name",
        "speculative_adaptive",
        "speculative_algorithm",
        "speculative_disable_batch_threshold",
        "speculative_draft_model_path",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "tp_size",
    }
)
"""The server's arguments that the evidence keeps; others, API keys among them, are never copied."""

IDENTITY_FIELDS: dict[str, tuple[type, ...]] = {
    "schema": (str,),
    "pid": (int,),
    "start_ticks": (int,),
    "tp_rank": (int,),
    "tp_size": (int,),
    "worker": (str,),
    "worker_module": (str,),
    "series": (str,),
    "threshold": (int, type(None)),
}
"""What is kept of an identity line besides `modules`, by type: the rest may be as deep as its writer likes."""

CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 20  # what is kept of a line without end; the arguments' line has about 12,000 bytes
PREFIX_BYTES = 1 << 10  # the most that can stand before a message on its line
LOOK_BACK_BYTES = 1 << 18  # how far before the arguments' line its "Spec v1 is used ..." line is looked for
KEPT = 8  # transitions and crash lines kept of each start; all are counted

_LINE_END = re.compile(rb"[\r\n]")
_ANSI = re.compile(rb"\x1b\[[0-9;?]{0,24}[A-Za-z]")
_SGLANG_PREFIX = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)((?: [A-Z][A-Z_]{1,9}\d{1,5}){0,6})\] "
)
# What stands before SGLang's own prefix when a log passed through something else. Each is anchored and bounded.
_TRANSPORT_PREFIX = re.compile(
    rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? [!-~]{1,255} [!-Z^-~]{1,128}(?:\[\d{1,10}\])?: "  # journald
    rb"|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,26} (?:std(?:out|err) [FP] )?"  # docker logs -t, Kubernetes (CRI)
    rb"(?:[!-~]{1,255} [!-Z^-~]{1,128}(?:\[\d{1,10}\])?: )?"  # journald's short-iso
    rb"|[!-{}~]{1,128} {0,32}\| "  # docker compose
)
_WRAPPED = b'{"log":"'  # how a line of docker's json-file log begins
_SPECULATION = (
    (b"Spec v1 is used for ", "v1"),
    (b"Spec v2 is enabled ", "v2"),
    (b"Non-overlap (synchronous) spec v2 is used ", "v2"),
    (b"Overlap scheduler is disabled when spec v2 is off", "v1"),
)


@dataclass(frozen=True)
class Start:
    """What one start of a server printed.

    `arguments` holds those of ARGUMENTS that could be read; `arguments_complete` is False when the line was cut or
    torn. `speculation` is "v1" or "v2" as the server itself announced it, `speculation_line` that message.
    `identities` are the ranks' identity objects, of the right types (IDENTITY_FIELDS) and otherwise unverified;
    `torn_identities` counts the lines without such an object. `stop_signals` are signals that the server logged.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    arguments_form: str | None = None
    arguments_complete: bool = False
    speculation: str | None = None
    speculation_line: str | None = None
    identities: tuple[dict[str, Any], ...] = ()
    torn_identities: int = 0
    transitions: int = 0
    last_transitions: tuple[dict[str, Any], ...] = ()
    ready: bool = False
    stop_signals: tuple[str, ...] = ()
    crashes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFacts:
    """A whole log. `current` is its last start; None when the log has neither arguments nor an identity line.

    `imitations` counts markers that were not at the start of a message, as in an echoed prompt: they count for
    nothing. `recognised` is False when nothing in the text looks like SGLang's log. `truncated` is True when reading
    stopped at the deadline.
    """

    bytes: int = 0
    recognised: bool = False
    starts: int = 0
    current: Start | None = None
    imitations: int = 0
    truncated: bool = False


def open_log(path: str) -> IO[bytes]:
    """Open a plain, gzip or zstd log, told apart by its first bytes and not by its name.

    Raises OSError when it cannot be opened; reading damaged compressed data raises OSError or EOFError.
    """
    raw = open(path, "rb")  # noqa: SIM115 - the caller closes it
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if magic == b"\x28\xb5\x2f\xfd":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return raw


def parse(stream: IO[bytes], deadline: float | None = None) -> LogFacts:
    """Read `stream` to its end, or until `deadline` (of time.monotonic), and return its facts.

    Compressed data that is damaged, or a gzip file that ends early, counts up to there, and as truncated.
    """
    parser = _Parser()
    truncated = False
    chunks = _chunks(stream)
    while True:
        if deadline is not None and time.monotonic() > deadline:
            truncated = True
            break
        try:
            chunk = next(chunks, None)
        except (OSError, EOFError, zlib.error, _zstd_error()):
            truncated = True
            break
        if chunk is None:
            break
        parser.feed(chunk)
    return parser.finish(truncated)


def parse_bytes(data: bytes) -> LogFacts:
    """Facts of a log that is in memory."""
    return parse(io.BytesIO(data))


def parse_arguments(text: str) -> tuple[dict[str, Any], str, bool]:
    """Read what follows `server_args=`: `ServerArgs(a=1, ...)` or `{'a': 1, ...}`.

    Returns the values of ARGUMENTS, the form ("call" or "dict"), and whether the closing bracket was found. Values
    that are no string, number, truth value or None are returned as text. A cut text gives the arguments up to the cut.
    """
    if text.startswith("ServerArgs("):
        form, separator, body = "call", "=", text[len("ServerArgs(") :]
    elif text.startswith("{"):
        form, separator, body = "dict", ":", text[1:]
    else:
        return {}, "call", False
    arguments: dict[str, Any] = {}
    complete = False
    for item, last in _items(body):
        name, found, value = item.partition(separator)
        name = name.strip().strip("'\"")
        if found and name in ARGUMENTS:
            arguments[name] = _literal(value.strip())
        complete = complete or last
    return arguments, form, complete


_QUOTE_OR_BRACKET = re.compile(r"['\"(\[{)\]},]")


def _items(body: str) -> Iterator[tuple[str, bool]]:
    """Split at the commas outside quotes and brackets; the second value is True for the item before the end."""
    depth, start, position = 0, 0, 0
    while (match := _QUOTE_OR_BRACKET.search(body, position)) is not None:
        char, position = match.group(), match.end()
        if char in "'\"":
            position = _end_of_string(body, position, char)
            if position < 0:
                return
        elif char in "([{":
            depth += 1
        elif char == ",":
            if depth == 0:
                yield body[start : position - 1], False
                start = position
        elif depth == 0:
            yield body[start : position - 1], True
            return
        else:
            depth -= 1


def _end_of_string(body: str, position: int, quote: str) -> int:
    while position < len(body):
        if body[position] == "\\":
            position += 2
        elif body[position] == quote:
            return position + 1
        else:
            position += 1
    return -1


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text[:200]
    # None of the arguments is a container, and Python refuses to print an integer of thousands of digits.
    plain = value is None or isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() < 64)
    return value if plain else text[:200]


def _zstd_error() -> type[Exception]:
    try:
        import zstandard
    except ImportError:
        return EOFError
    return zstandard.ZstdError


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    # One read at a time: the next line of a live stream is not waited for while this one could be handled.
    read = getattr(stream, "read1", stream.read)
    while chunk := read(CHUNK_BYTES):
        yield chunk


class _Parser:
    def __init__(self) -> None:
        self._window = b""  # text that was searched already, for looking back, then the beginning of a line
        self._pending = 0  # where in the window that beginning starts
        self._bytes = 0
        self._recognised = False
        self._imitations = 0
        self._starts = 0
        self._seen_any = False
        self._reset(b"", b"")
        self._last_start_end = 0  # where in the window the last arguments' line ended

    def _reset(self, arguments: bytes, speculation: bytes) -> None:
        self._arguments = arguments
        self._speculation = speculation
        self._identities: dict[tuple[int, int], dict[str, Any]] = {}
        self._torn_identities = 0
        self._transitions = 0
        self._last_transitions: list[bytes] = []
        self._ready = False
        self._signals: list[str] = []
        self._crashes: list[str] = []

    def feed(self, chunk: bytes) -> None:
        if not self._recognised and self._bytes < (1 << 22):
            self._recognised = _SGLANG_PREFIX.search(chunk) is not None
        self._bytes += len(chunk)
        window = self._window + chunk
        end = window.rfind(b"\n", self._pending) + 1
        if end <= self._pending:
            if len(window) - self._pending < LINE_BYTES:
                self._window = window
                return
            end = len(window)  # a line without end: take what there is as a line
        self._search(window, self._pending, end)
        keep = max(0, end - LOOK_BACK_BYTES)
        self._window = window[keep:]
        self._pending = end - keep
        self._last_start_end = max(0, self._last_start_end - keep)

    def finish(self, truncated: bool) -> LogFacts:
        if self._pending < len(self._window):
            self._search(self._window, self._pending, len(self._window))
        return LogFacts(
            bytes=self._bytes,
            recognised=self._recognised or self._seen_any,
            starts=self._starts,
            current=self._start() if self._seen_any else None,
            imitations=self._imitations,
            truncated=truncated,
        )

    def _start(self) -> Start:
        arguments: dict[str, Any] = {}
        form, complete = None, False
        if self._arguments:
            text = self._arguments.decode("utf-8", "replace")
            arguments, form, complete = parse_arguments(text)
        speculation = None
        line = self._speculation.decode("utf-8", "replace") or None
        for announcement, version in _SPECULATION:
            if self._speculation.startswith(announcement):
                speculation = version
        transitions = (_transition(body) for body in self._last_transitions)
        return Start(
            arguments=arguments,
            arguments_form=form,
            arguments_complete=complete,
            speculation=speculation,
            speculation_line=line,
            identities=tuple(self._identities.values()),
            torn_identities=self._torn_identities,
            transitions=self._transitions,
            last_transitions=tuple(item for item in transitions if item is not None),
            ready=self._ready,
            stop_signals=tuple(self._signals),
            crashes=tuple(self._crashes),
        )

    def _search(self, window: bytes, start: int, end: int) -> None:
        """Handle every marker in window[start:end], in order."""
        found: dict[bytes, int] = {}  # where each marker is next; a negative one is not in the rest of the window
        behind = start
        while True:
            position, marker = end, b""
            for candidate in _AFTER_READY if self._ready else MARKERS:
                at = found.get(candidate, 0)
                if 0 <= at < behind or candidate not in found:
                    at = found[candidate] = window.find(candidate, behind, end)
                if 0 <= at < position:
                    position, marker = at, candidate
            if not marker:
                return
            behind = self._marker(window, start, position, end, marker)

    def _marker(self, window: bytes, start: int, position: int, end: int, marker: bytes) -> int:
        """Handle the marker at `position`; returns where to go on.

        Cheap unless the marker is at the start of a message: a line may consist of markers.
        """
        low = max(start, position - PREFIX_BYTES)
        line_start = window.rfind(b"\n", low, position) + 1 or low
        whole = line_start == start or window[line_start - 1 : line_start] == b"\n"
        if whole and window.startswith(_WRAPPED, line_start):
            line_end = _find(window, b"\n", position, end)
            message = _wrapped(window[line_start:line_end], marker)
        else:
            if not _at_message_start(window[line_start:position], whole, marker):
                self._imitations += 1
                return position + len(marker)
            line_end = _message_end(window, position, end)
            if marker is SIGNAL_MARKER:
                position = window.rfind(b"SIG", low, position)
            message = _plain(window[position : min(line_end, position + LINE_BYTES)])
        if message is None:
            self._imitations += 1
        else:
            self._message(window, message, marker, line_start, line_end)
        return max(line_end, position + len(marker))

    def _message(self, window: bytes, message: bytes, marker: bytes, line_start: int, line_end: int) -> None:
        if marker is ARGUMENTS_MARKER:
            body = message[len(marker) :]
            if not body.startswith((b"ServerArgs(", b"{")):
                self._imitations += 1
                return
            before = window[max(self._last_start_end, line_start - LOOK_BACK_BYTES) : line_start]
            self._reset(body, _speculation(before))
            self._starts += 1
            self._seen_any = True
            self._last_start_end = line_end
        elif marker is IDENTITY_MARKER:
            identity = _identity(message[len(marker) - 1 :])
            if identity is None:
                self._torn_identities += 1
            else:
                self._identities[identity["tp_rank"], identity["pid"]] = identity
                while len(self._identities) > 256:  # no server has as many ranks: stay bounded
                    del self._identities[next(iter(self._identities))]
            self._seen_any = True
        elif marker is TRANSITION_MARKER:
            self._transitions += 1
            self._last_transitions = [*self._last_transitions[1 - KEPT :], message[len(marker) - 1 :][:4096]]
            self._seen_any = True
        elif marker is READY_MARKER:
            self._ready = True
            self._seen_any = True
        elif marker is SIGNAL_MARKER:
            self._signals = [*self._signals[1 - KEPT :], message[: message.find(b" ")].decode("ascii", "replace")]
        else:
            last_line = _exception(window[line_start : line_start + (1 << 14)])
            self._crashes = [*self._crashes[1 - KEPT :], (last_line or message)[:200].decode("utf-8", "replace")]


def _plain(text: bytes) -> bytes:
    """The text without ANSI colours."""
    return _ANSI.sub(b"", text) if b"\x1b" in text else text


def _find(window: bytes, what: bytes, start: int, end: int) -> int:
    position = window.find(what, start, end)
    return end if position < 0 else position


def _message_end(window: bytes, start: int, end: int) -> int:
    # One search for both: a line may hold many messages, and looking for its end from each would cost their square.
    found = _LINE_END.search(window, start, end)
    return found.start() if found else end


def _at_message_start(before: bytes, whole: bool, marker: bytes) -> bool:
    """Whether only prefixes of SGLang's and of a log's transport stand between the start of the line and a marker.

    `whole` says that `before` reaches back to the start of the line.
    """
    if marker is SIGNAL_MARKER:  # "SIGTERM received. signum=..."
        name = before.rfind(b"SIG")
        if name < 0 or not before[name:].isalnum():
            return False
        before = before[:name]
    # A progress bar leaves its line unfinished; what follows a carriage return starts at the margin.
    carriage_return = before.rfind(b"\r")
    if carriage_return < 0 and not whole:
        return False
    before = _plain(before[carriage_return + 1 :])
    opening = before.rfind(b"[")
    transport = before
    if opening >= 0 and _SGLANG_PREFIX.fullmatch(before, opening):
        transport = before[:opening]
    return not transport or _TRANSPORT_PREFIX.fullmatch(transport) is not None


def _wrapped(line: bytes, marker: bytes) -> bytes | None:
    """The message that starts with `marker` in a line of docker's json-file log, or None."""
    try:
        text = json.loads(line)["log"].rstrip("\r\n").encode("utf-8", "replace")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    position: int = text.find(marker)
    if position < 0 or not _at_message_start(text[:position], True, marker):
        return None
    return _plain(text[text.rfind(b"SIG", 0, position) if marker is SIGNAL_MARKER else position :])


def _json_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object at the start of `body`, whatever follows it; None when it is cut or no object."""
    try:
        document, _ = json.JSONDecoder().raw_decode(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _identity(body: bytes) -> dict[str, Any] | None:
    """The identity object at the start of `body`; None when it is cut or a field is missing or of another type."""
    document = _json_object(body)
    if document is None or not all(
        name in document and type(document[name]) in types for name, types in IDENTITY_FIELDS.items()
    ):
        return None
    modules = document.get("modules")
    if not isinstance(modules, list) or not all(
        isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()) for entry in modules
    ):
        return None
    return {name: document[name] for name in (*IDENTITY_FIELDS, "modules")}


def _transition(body: bytes) -> dict[str, Any] | None:
    """The plain fields of the transition at the start of `body`; None when it is cut."""
    document = _json_object(body)
    if document is None:
        return None
    return {name: value for name, value in document.items() if not isinstance(value, (dict, list))}


def _speculation(before: bytes) -> bytes:
    """The last line in `before` by which the server says which speculative worker it takes, without its prefix."""
    best, at = b"", -1
    for text, _ in _SPECULATION:
        position = before.rfind(text)
        if position > at:
            line_start = before.rfind(b"\n", 0, position) + 1
            line = before[line_start : _find(before, b"\n", position, len(before))].rstrip(b"\r")
            message: bytes | None = None
            if line.startswith(_WRAPPED):
                message = _wrapped(line, text)
            elif _at_message_start(line[: position - line_start], True, text):
                message = _plain(line[position - line_start :])
            if message is not None:
                at, best = position, message[:400]
    return best


def _exception(text: bytes) -> bytes:
    """The line that names the exception in "Scheduler hit an exception: Traceback ...": the first one not indented."""
    lines = text.split(b"\n")
    for line in lines[1:]:
        plain = _plain(line).strip(b"\r")
        prefix = _TRANSPORT_PREFIX.match(plain)
        plain = plain[prefix.end() :] if prefix and b"|" not in plain[: prefix.end() - 2] else plain
        if plain and not plain.startswith((b" ", b"\t", b"Traceback", b"[")):
            return plain
    return b""
