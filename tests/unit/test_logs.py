"""The log parser: real logs, and every way in which a log arrives damaged, wrapped or forged."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diagnostics.proof import logs, verdict
from diagnostics.proof.logs import LogFacts, Start, parse_bytes

DATA = Path(__file__).parent.parent / "data" / "logs"
IDENTITY = {
    "schema": "spec_gate.identity/1",
    "pid": 7,
    "start_ticks": 70,
    "tp_rank": 0,
    "tp_size": 1,
    "worker": "EAGLEWorker",
    "worker_module": "sglang.srt.speculative.eagle_worker",
    "series": "s",
    "threshold": 5,
    "modules": [{"module": "sglang.srt.speculative.eagle_worker", "file": "f", "series": "s", "code_sha256": "c"}],
}
PREFIX = "[2026-11-29 14:21:14] "
ARGUMENTS = (
    "server_args=ServerArgs(model_path='m', tp_size=1, speculative_algorithm='EAGLE3', speculative_eagle_topk=4, "
)
ARGUMENTS += "disable_overlap_schedule=True, api_key='secret')"
READY = "The server is fired up and ready to roll!"


def identity_line(**changes: Any) -> str:
    return "spec_gate identity " + json.dumps(IDENTITY | changes)


START_UP = [
    "Spec v1 is used for eagle/eagle3/standalone speculative decoding because overlap schedule is disabled.",
    ARGUMENTS,
    identity_line(),
    READY,
]


def text(*messages: str, prefix: str = PREFIX, end: str = "\n") -> bytes:
    return "".join(prefix + message + end for message in messages).encode()


def start_of(data: bytes) -> Start:
    found = parse_bytes(data).current
    assert found is not None
    return found


def is_whole(start: Start) -> bool:
    return (
        start.speculation == "v1"
        and start.arguments_complete
        and start.arguments["speculative_eagle_topk"] == 4
        and start.identities == (IDENTITY,)
        and start.ready
    )


REAL = [
    ("0.5.12.post1-cpu-no-speculation.log", None, None, True, 1),
    ("0.5.12.post1-cpu-v1.log", "EAGLE3", "v1", True, 1),
    ("0.5.12.post1-h200-v1.log", "EAGLE3", "v1", True, 1),
    ("0.5.12.post1-h200-v2.log", "EAGLE3", "v2", False, 1),
    ("0.5.12.post1-cpu-v2.log", "EAGLE3", "v2", False, 1),
    ("synthetic-0.5.9.log", "EAGLE3", "v1", True, 2),
    ("synthetic-0.5.10.log", "EAGLE3", "v1", True, 2),
    ("synthetic-0.5.23.log", "EAGLE3", "v2", True, 2),
]


@pytest.mark.parametrize(
    ("name", "algorithm", "speculation", "no_overlap", "tp_size"), REAL, ids=[row[0] for row in REAL]
)
def test_logs_of_releases(
    name: str, algorithm: str | None, speculation: str | None, no_overlap: bool, tp_size: int
) -> None:
    facts = parse_bytes((DATA / name).read_bytes())
    start = facts.current
    assert start is not None
    assert facts.recognised
    assert (facts.starts, facts.imitations) == (1, 0)
    assert (start.arguments_complete, start.ready, start.identities) == (True, True, ())
    assert start.arguments["speculative_algorithm"] == algorithm
    assert start.arguments["disable_overlap_schedule"] is no_overlap
    assert start.arguments["tp_size"] == tp_size
    assert start.speculation == speculation
    assert start.crashes == ()


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("0.5.12.post1-cpu-no-speculation.log", None),
        ("0.5.12.post1-h200-v1.log", "EAGLEWorker"),
        ("0.5.12.post1-h200-v2.log", "EAGLEWorkerV2"),
        ("synthetic-0.5.9.log", "EAGLEWorker"),
        ("synthetic-0.5.10.log", "EAGLEWorker"),
        ("synthetic-0.5.23.log", "EAGLEWorkerV2"),
    ],
)
def test_verdict_on_logs_without_the_gate(name: str, worker: str | None) -> None:
    found = verdict.judge_log(parse_bytes((DATA / name).read_bytes()), name)
    assert (found.verdict, found.worker) == ("refuted", worker)


def test_log_of_a_gate() -> None:
    facts = parse_bytes((DATA / "0.5.12.post1-cpu-gate.log").read_bytes())
    assert facts.current is not None
    assert [identity["worker"] for identity in facts.current.identities] == ["EAGLEWorker"]
    assert [transition["to"] for transition in facts.current.last_transitions] == ["closed", "open"]
    assert facts.current.arguments["speculative_disable_batch_threshold"] == 5
    found = verdict.judge_log(facts, "log")
    assert (found.verdict, found.worker) == ("unknown", "EAGLEWorker")
    assert {link.state for link in found.links} == {"consistent"}


ANSI = "\x1b[32m[2026-11-29 14:21:14 TP0]\x1b[0m "
ARRIVALS: dict[str, Callable[[list[str]], bytes]] = {
    "plain": lambda lines: text(*lines),
    "milliseconds and ranks": lambda lines: text(*lines, prefix="[2026-11-29 14:21:14.123 DP0 TP3 EP12] "),
    "CRLF": lambda lines: text(*lines, end="\r\n"),
    "colours": lambda lines: text(*lines, prefix=ANSI),
    "colours around it": lambda lines: text(*lines, prefix="\x1b[1;33m" + PREFIX, end="\x1b[0m\n"),
    "journald, short": lambda lines: text(*lines, prefix="Nov 29 14:21:14 gpu-1 python[4711]: " + PREFIX),
    "journald, short-precise": lambda lines: text(*lines, prefix="Nov  9 14:21:14.123456 gpu-1 sglang[1]: " + PREFIX),
    "journald, short-iso": lambda lines: text(*lines, prefix="2026-11-29T14:21:14+0000 gpu-1 python[47]: " + PREFIX),
    "docker compose": lambda lines: text(*lines, prefix="sglang-1  | " + PREFIX),
    "docker logs -t": lambda lines: text(*lines, prefix="2026-11-29T14:21:14.123456789Z " + PREFIX),
    "Kubernetes": lambda lines: text(*lines, prefix="2026-11-29T14:21:14.123456789Z stderr F " + PREFIX),
    "docker json-file": lambda lines: b"".join(
        json.dumps({"log": PREFIX + line + "\n", "stream": "stderr"}, separators=(",", ":")).encode() + b"\n"
        for line in lines
    ),
    "behind a progress bar": lambda lines: text(
        *lines, prefix="\r 50%|█████     | 1/2\r100%|██████████| 2/2\r" + PREFIX
    ),
    "no end of the last line": lambda lines: text(*lines).rstrip(b"\n"),
    "invalid UTF-8 around": lambda lines: b"\xff\xfe\x80\n" + b"\n\xc3(\n".join(text(line) for line in lines),
    "long lines around": lambda lines: b"".join(b"x" * 100_000 + b"\n" + text(line) for line in lines),
    "a line beyond all bounds": lambda lines: b"x" * 3_000_000 + b"\n" + text(*lines),
    "other ranks between": lambda lines: b"".join(
        text(line) + text("Init torch distributed begin.", prefix=f"[2026-11-29 14:21:14 TP{rank}] ")
        for rank, line in enumerate(lines)
    ),
}


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_arrives_as(arrival: str) -> None:
    assert is_whole(start_of(ARRIVALS[arrival](START_UP)))


@settings(max_examples=60)
@given(arrival=st.sampled_from(sorted(ARRIVALS)), sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_facts_do_not_depend_on_how_the_stream_is_cut(arrival: str, sizes: list[int]) -> None:
    data = ARRIVALS[arrival](START_UP)

    class Cut(io.RawIOBase):
        position, turn = 0, 0

        def read(self, size: int = -1) -> bytes:
            if len(data) < 100_000:
                size = sizes[self.turn % len(sizes)]
            self.turn += 1
            piece = data[self.position : self.position + size]
            self.position += len(piece)
            return piece

    assert logs.parse(Cut()) == parse_bytes(data)


@settings(max_examples=200)
@given(st.data())
def test_never_raises_and_never_invents(data: st.DataObject) -> None:
    pieces = st.one_of(
        st.binary(max_size=60),
        st.sampled_from([*logs.MARKERS, PREFIX.encode(), b"\n", b"\r", b"{", b'{"log":"', b"\x1b["]),
    )
    junk = b"".join(data.draw(st.lists(pieces, max_size=40)))
    facts = parse_bytes(junk)
    assert facts.bytes == len(junk)
    if facts.current is not None:
        assert facts.current.identities == ()
        assert verdict.judge_log(facts, "log").verdict != "proved"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(field=st.sampled_from(sorted(IDENTITY)), value=JSON)
@example(field="tp_rank", value=[1])
@example(field="pid", value={})
@example(field="threshold", value=[1])
@example(field="modules", value=[{"module": []}])
@example(field="modules", value=[{}])
def test_an_identity_may_hold_anything(field: str, value: Any) -> None:
    facts = parse_bytes(text(ARGUMENTS, identity_line(**{field: value}), READY))
    found = verdict.judge_log(facts, "log")
    assert facts.current is not None
    assert len(facts.current.identities) + facts.current.torn_identities == 1
    assert found.verdict in ("refuted", "unknown")
    json.dumps([verdict.document([found]), dataclasses.asdict(facts)])


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_an_identity_without_a_field_is_torn(field: str) -> None:
    line = "spec_gate identity " + json.dumps({name: IDENTITY[name] for name in IDENTITY if name != field})
    assert start_of(text(ARGUMENTS, line)).torn_identities == 1


DEEP = '{"a": ' * 450 + "1" + "}" * 450


@pytest.mark.parametrize(
    "value", ["{[]: 1}", "{1, 2}", "b'x'", "...", "1j", "0x" + "f" * 9000, "[" * 5000, "9" * 9000, "'\\ud800'"]
)
def test_an_argument_may_hold_anything(value: str) -> None:
    for name in ("tp_size", "speculative_algorithm", "speculative_eagle_topk", "disable_overlap_schedule"):
        facts = parse_bytes(text(f"server_args=ServerArgs({name}={value}, speculative_algorithm='EAGLE')", READY))
        json.dumps([verdict.document([verdict.judge_log(facts, "log")]), dataclasses.asdict(facts)])


def test_what_is_kept_of_a_line_is_not_deep() -> None:
    more = identity_line()[:-1] + f', "policy": {DEEP}}}'
    start = start_of(text(ARGUMENTS, more, READY, f'spec_gate transition {{"to": "closed", "more": {DEEP}}}'))
    assert start.identities == (IDENTITY,)
    assert start.last_transitions == ({"to": "closed"},)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "log"
    path.write_bytes(compress(text(*START_UP)) + compress(text("Decode batch") * 1000))
    with logs.open_log(str(path)) as stream:
        facts = logs.parse(stream)
    assert facts.current is not None
    assert is_whole(facts.current)
    assert not facts.truncated


def test_damaged_compression_counts_as_truncated(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(3_000_000)  # so that the damage is far behind the first chunk
    whole = bytearray(gzip.compress(text(*START_UP) + noise))
    whole[2_900_000:] = b"damaged" * 10_000
    path = tmp_path / "log"
    path.write_bytes(whole)
    with logs.open_log(str(path)) as stream:
        facts = logs.parse(stream)
    assert facts.truncated
    assert facts.current is not None
    assert is_whole(facts.current)


def test_only_the_last_start_counts() -> None:
    former = [line.replace("topk=4", "topk=1").replace("schedule=True", "schedule=False") for line in START_UP]
    facts = parse_bytes(text(*former, "Decode batch", "SIGTERM received. signum=15 frame=None.", ARGUMENTS, READY))
    assert facts.current is not None
    assert facts.starts == 2
    assert facts.current.identities == ()
    assert facts.current.speculation is None
    assert facts.current.arguments["speculative_eagle_topk"] == 4
    assert facts.current.stop_signals == ()
    assert verdict.judge_log(facts, "log").verdict == "refuted"


@pytest.mark.parametrize(
    "line",
    [
        f'Receive: obj=GenerateReqInput(text="{identity_line()}")',
        f"Receive: text='{PREFIX}{identity_line()}'",
        f"Receive: text='\\n{PREFIX}{identity_line()}'",
        f'INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK {identity_line()}',
        "> " + identity_line(),
        f"[2026-11-29 14:21:14] {PREFIX}{identity_line()}",
        json.dumps({"prompt": identity_line()}),
    ],
)
def test_an_echoed_prompt_is_not_an_identity(line: str) -> None:
    for prefix in (PREFIX, "", "Nov 29 14:21:14 gpu-1 python[4711]: "):
        facts = parse_bytes(text(ARGUMENTS) + text(line, prefix=prefix) + text(READY))
        assert facts.current is not None
        assert facts.current.identities == ()
        assert facts.imitations == 1
        assert verdict.judge_log(facts, "log").verdict == "refuted"


def test_the_second_marker_of_a_line_does_not_start_one() -> None:
    start = start_of(text(ARGUMENTS) + text("spec_gate identity {" + identity_line(), prefix="> ") + text(READY))
    assert start.identities == ()


def test_identity_after_ready_is_ignored() -> None:
    """A request can be echoed only by a server that takes requests."""
    assert start_of(text(ARGUMENTS, READY, identity_line())).identities == ()


def test_forged_log_does_not_prove() -> None:
    found = verdict.judge_log(parse_bytes(text(*START_UP)), "log")
    assert found.verdict == "unknown"
    assert "can be forged" in found.reason


def bytes_looked_at(data: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much of `data` the parser's steps go through, one after the other, while it reads it."""
    looked_at = 0

    def counted(name: str, amount: Callable[..., int]) -> None:
        step = getattr(logs, name)

        def count(*arguments: Any) -> Any:
            nonlocal looked_at
            result = step(*arguments)
            looked_at += amount(result, *arguments)
            return result

        patch.setattr(logs, name, count)

    with monkeypatch.context() as patch:
        counted("_find", lambda found, window, what, start, end: found - start)
        counted("_message_end", lambda found, window, start, end: found - start)
        counted("_at_message_start", lambda result, before, *rest: len(before))
        counted("_end_of_string", lambda found, body, position, quote: (found if found >= 0 else len(body)) - position)
        for name in ("_plain", "_wrapped", "_literal", "_json_object", "_speculation", "_exception"):
            counted(name, lambda result, text, *rest: len(text))
        parse_bytes(data)
    return looked_at


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "identity markers": lambda size: b"spec_gate identity {" * (size // 20),
    "begun identities": lambda size: (b"\r" + PREFIX.encode() + b"spec_gate identity {") * (size // 43),
    "begun arguments": lambda size: (b"\r" + PREFIX.encode() + b"server_args=ServerArgs(") * (size // 46),
    "markers in a wrapped line": lambda size: b'{"log":"' + b"server_args=" * (size // 12),
    "brackets before a marker": lambda size: b"[" * size + b"server_args=",
    "begun colours": lambda size: b"\x1b[3" * (size // 3) + b"server_args=",
    "signals": lambda size: b" SIG received. signum=" * (size // 22),
    "brackets in the arguments": lambda size: PREFIX.encode() + b"server_args=ServerArgs(" + b"(" * size,
    "names in the arguments": lambda size: PREFIX.encode() + b"server_args=ServerArgs(" + b"a=" * (size // 2),
    "quotes in the arguments": lambda size: PREFIX.encode() + b"server_args=ServerArgs(" + b"'a'" * (size // 3),
    "a deep identity": lambda size: PREFIX.encode() + b"spec_gate identity {" + b'"a":{' * (size // 5),
}


@pytest.mark.parametrize("line", HOSTILE)
def test_the_work_on_a_hostile_line_does_not_grow_with_its_square(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = bytes_looked_at(HOSTILE[line](1 << 16), monkeypatch)
    assert 0 < bytes_looked_at(HOSTILE[line](1 << 18), monkeypatch) < 5 * once


@pytest.mark.parametrize("at", [40, 60, 100])
def test_cut_arguments_are_incomplete(at: int) -> None:
    start = start_of(text(ARGUMENTS[:at]))
    assert not start.arguments_complete
    assert "disable_overlap_schedule" not in start.arguments


def test_torn_identity_is_counted() -> None:
    start = start_of(text(ARGUMENTS, identity_line()[:90]))
    assert (start.identities, start.torn_identities) == ((), 1)
    assert verdict.judge_log(parse_bytes(text(ARGUMENTS, identity_line()[:90], READY)), "log").verdict == "unknown"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("'a, disable_overlap_schedule=False'", True),
        ("'it\\'s), disable_overlap_schedule=False'", True),
        ("[1, (2, {'disable_overlap_schedule=False': ')'})]", True),
        ('"])}"', True),
        ("<object at 0x1>", True),
    ],
)
def test_values_cannot_pass_for_arguments(value: str, read: bool) -> None:
    arguments, form, complete = logs.parse_arguments(f"ServerArgs(model_path={value}, disable_overlap_schedule={read})")
    assert (arguments["disable_overlap_schedule"], form, complete) == (read, "call", True)
    arguments, form, complete = logs.parse_arguments(f"{{'model_path': {value}, 'disable_overlap_schedule': {read}}}")
    assert (arguments["disable_overlap_schedule"], form, complete) == (read, "dict", True)


def test_keys_are_not_kept() -> None:
    assert "secret" not in repr(parse_bytes(text(*START_UP)))


def test_transitions_are_counted_and_the_last_are_kept() -> None:
    lines = [f'spec_gate transition {{"to": "closed", "step": {step}}}' for step in range(1000)]
    start = start_of(text(*START_UP, *lines))
    assert start.transitions == 1000
    assert [transition["step"] for transition in start.last_transitions] == list(range(1000 - logs.KEPT, 1000))


def test_crash_is_named_by_its_exception() -> None:
    trace = 'Scheduler hit an exception: Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    trace += "RuntimeError: The size of tensor a (160) must match the size of tensor b (2)\n"
    start = start_of(
        text(*START_UP, trace, "SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
    )
    assert start.crashes == ("RuntimeError: The size of tensor a (160) must match the size of tensor b (2)",)
    assert start.stop_signals == ("SIGQUIT",)
    assert verdict.judge_log(parse_bytes(text(*START_UP, trace)), "log").verdict == "refuted"


def test_log_of_a_gate_on_two_ranks() -> None:
    facts = parse_bytes((DATA / "0.5.12.post1-cpu-two-ranks.log").read_bytes())
    assert facts.current is not None
    assert (facts.starts, facts.imitations, facts.current.torn_identities) == (1, 0, 0)
    assert (facts.current.ready, facts.current.crashes) == (True, ())
    assert facts.current.arguments["tp_size"] == 2
    first, second = facts.current.identities
    assert [(identity["tp_rank"], identity["tp_size"]) for identity in (first, second)] == [(0, 2), (1, 2)]
    assert (first["worker"], first["pid"] != second["pid"]) == ("EAGLEWorker", True)
    process = {"tp_rank", "pid", "start_ticks"}
    assert {name for name in first if first[name] != second[name]} == process
    found = verdict.judge_log(facts, "log")
    assert (found.verdict, found.worker) == ("unknown", "EAGLEWorker")
    assert {link.state for link in found.links} == {"consistent"}


def test_log_of_two_ranks_with_the_line_of_one_lost() -> None:
    lines = (DATA / "0.5.12.post1-cpu-two-ranks.log").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b"TP1] spec_gate identity" not in line]
    assert len(kept) == len(lines) - 1
    found = verdict.judge_log(parse_bytes(b"".join(kept)), "log")
    assert found.verdict == "refuted"
    assert "rank 1 of 2 did not say that it loaded the patched files" in found.reason


def test_log_of_a_server_that_crashed_while_starting() -> None:
    facts = parse_bytes((DATA / "0.5.12.post1-cpu-two-ranks-crash.log").read_bytes())
    assert facts.current is not None
    assert (facts.current.ready, facts.current.arguments["tp_size"]) == (False, 2)
    assert facts.current.crashes
    assert all("SGLANG_CPU_OMP_THREADS_BIND is not set" in crash for crash in facts.current.crashes)
    found = verdict.judge_log(facts, "log")
    assert found.verdict == "refuted"
    assert "SGLANG_CPU_OMP_THREADS_BIND" in found.reason


def test_tracebacks_that_the_server_survives_are_no_crash() -> None:
    assert start_of((DATA / "0.5.12.post1-h200-v1.log").read_bytes()).crashes == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x7fELF\x02\x01\x01" + bytes(4000), "not a log of SGLang"),
        (b"Nov 29 14:21:14 gpu-1 sshd[1]: Accepted publickey for root\n" * 100, "not a log of SGLang"),
        (text("Decode batch, #running-req: 1") * 100, "does not reach back"),
        (text(ARGUMENTS[:80], READY), "cut"),
        (text(ARGUMENTS), "had not finished"),
    ],
)
def test_what_a_log_cannot_tell_is_unknown(data: bytes, words: str) -> None:
    found = verdict.judge_log(parse_bytes(data), "log")
    assert found.verdict == "unknown"
    assert words in found.reason


def two_ranks(*identities: str) -> LogFacts:
    return parse_bytes(text(ARGUMENTS.replace("tp_size=1", "tp_size=2"), *identities, READY))


def test_one_rank_of_two_is_silent() -> None:
    found = verdict.judge_log(two_ranks(identity_line(tp_size=2)), "log")
    assert (found.verdict, "rank 1 of 2" in found.reason) == ("refuted", True)


def test_ranks_that_disagree() -> None:
    found = verdict.judge_log(two_ranks(identity_line(), identity_line(tp_rank=1, pid=8, threshold=6)), "log")
    assert (found.verdict, "disagree about the threshold" in found.reason) == ("refuted", True)


def test_wrong_file_in_a_log() -> None:
    module = {**IDENTITY["modules"][0], "module": "sglang.srt.speculative.eagle_worker_v2"}  # type: ignore[index]
    found = verdict.judge_log(parse_bytes(text(ARGUMENTS, identity_line(modules=[module]), READY)), "log")
    assert found.verdict == "refuted"
    assert "the patch is in eagle_worker_v2.py, but these processes run EAGLEWorker" in found.reason


def test_deadline_ends_the_reading() -> None:
    facts = logs.parse(io.BytesIO(text(*START_UP) * 100_000), deadline=time.monotonic() - 1)
    assert facts.truncated
    assert facts.bytes == 0
