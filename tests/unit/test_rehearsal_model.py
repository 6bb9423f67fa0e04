"""The parts of the rehearsal model that need no torch: text, chat template, identity, and how a pair is written."""

import ast
import json
import multiprocessing
import random
import re
from itertools import islice
from pathlib import Path

import jinja2
import pytest
from rehearsal_model import identity, output
from rehearsal_model.chat import END, TEMPLATE, Message, render
from rehearsal_model.text import NUMBERS, ORDINALS, REQUESTS, answer, conversations, request
from rehearsal_model.words import TOPICS


def test_the_same_seed_gives_the_same_text() -> None:
    assert list(islice(conversations(5), 200)) == list(islice(conversations(5), 200))


def test_another_seed_gives_another_text() -> None:
    assert list(islice(conversations(5), 20)) != list(islice(conversations(6), 20))


def test_conversations_alternate_and_end_with_an_answer() -> None:
    for messages in islice(conversations(1), 500):
        roles = [message["role"] for message in messages]
        assert roles[roles[0] == "system" :] in (["user", "assistant"], ["user", "assistant"] * 2)


@pytest.mark.parametrize("topic_index", range(len(TOPICS)))
def test_answers_are_well_formed(topic_index: int) -> None:
    rng = random.Random(topic_index)
    for kind in REQUESTS:
        for _ in range(40):
            text = answer(rng, kind, topic_index)
            assert not re.search(r"\b[Aa] [aeiou]", text), text
            assert END not in text
            if kind == "json":
                assert isinstance(json.loads(text), dict)
            elif kind == "code":
                ast.parse(text.split("```python\n")[1].split("```")[0])
            else:
                assert not set("{}") & set(text), text


@pytest.mark.parametrize("kind", ["explain", "steps"])
def test_as_many_points_follow_as_were_announced(kind: str) -> None:
    rng = random.Random(0)
    for topic_index in range(len(TOPICS)):
        text = answer(rng, kind, topic_index)
        announced = next(NUMBERS.index(word) + 2 for word in text.split() if word in NUMBERS)
        marks = ORDINALS if kind == "explain" else [f"{number}." for number in range(1, 8)]
        present = [re.search(rf"(^|\s){re.escape(mark)}", text) is not None for mark in marks]
        assert present == [number < announced for number in range(7)], text


@pytest.mark.parametrize("kind", REQUESTS)
def test_requests_leave_no_slot_open(kind: str) -> None:
    rng = random.Random(0)
    for topic in TOPICS:
        text = request(rng, kind, topic)
        assert text
        assert not re.search(r"\{[a-z]+\}", text), text


def template() -> jinja2.Template:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment()
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATE)


def test_the_chat_template_writes_what_was_trained() -> None:
    for messages in islice(conversations(2), 100):
        assert template().render(messages=messages) == render(messages)


def test_the_generation_prompt_opens_an_answer() -> None:
    messages: list[Message] = [{"role": "user", "content": " Two\n lines "}]
    rendered = template().render(messages=messages, add_generation_prompt=True)
    assert rendered == "<|user|> Two\n lines <|end|><|assistant|>"


def test_the_chat_template_refuses_other_roles() -> None:
    with pytest.raises(ValueError, match="role is tool; allowed: system, user, assistant"):
        template().render(messages=[{"role": "tool", "content": "x"}])


def test_the_source_hash_sees_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("")
    before = identity.source_sha256(tmp_path)
    assert identity.source_sha256(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    changed = identity.source_sha256(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert len({before, changed, identity.source_sha256(tmp_path)}) == 3


def test_the_cache_directory_depends_on_the_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directories = []
    for version in ("2.11.0", "2.12.0"):
        monkeypatch.setattr(identity, "library_versions", lambda version=version: {"torch": version})
        directories.append(identity.cache_directory())
    assert directories[0] != directories[1]
    assert {directory.parent for directory in directories} == {tmp_path / "specgate" / "rehearsal_model"}


def write_pair(directory: Path, weights: bytes) -> None:
    with output.replacing(directory) as partial:
        (partial / "target").mkdir()
        (partial / "target" / "model.safetensors").write_bytes(weights)
        output.write_manifest(partial, {"seed": 0})


def test_a_written_pair_is_complete_until_a_byte_changes(tmp_path: Path) -> None:
    directory = tmp_path / "pair"
    assert output.read_manifest(directory) is None
    write_pair(directory, b"weights")
    manifest = output.read_manifest(directory)
    assert manifest is not None
    assert output.is_complete(directory, manifest)
    (directory / "target" / "model.safetensors").write_bytes(b"Weights")
    assert not output.is_complete(directory, manifest)
    (directory / "target" / "model.safetensors").unlink()
    assert not output.is_complete(directory, manifest)


def test_a_failure_leaves_the_former_pair_and_nothing_else(tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", b"old")

    def fail() -> None:
        with output.replacing(tmp_path / "pair") as partial:
            (partial / "half").write_text("")
            raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
    assert (tmp_path / "pair" / "target" / "model.safetensors").read_bytes() == b"old"


def test_what_a_killed_run_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "pair.partial").mkdir()
    (tmp_path / "pair.partial" / "half").write_text("")
    write_pair(tmp_path / "pair", b"new")
    assert sorted(path.name for path in (tmp_path / "pair").iterdir()) == ["manifest.json", "target"]
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


@pytest.mark.parametrize("content", [{}, {"manifest.json": "{}"}, {"manifest.json": '{"schema": "other/1"}'}])
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in ({"thesis.txt": "x"} | content).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(output.OutputError, match="is not empty and holds no rehearsal model"):
        output.read_manifest(tmp_path)


def hold_lock(directory: Path, shown: "multiprocessing.Queue[str]") -> None:
    with output.locked(directory, shown.put):
        shown.put("entered")


def test_only_one_process_at_a_time_writes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a forked process would inherit the lock and never get it
    shown = context.Queue()
    process = context.Process(target=hold_lock, args=(tmp_path / "pair", shown), daemon=True)
    with output.locked(tmp_path / "pair", pytest.fail):
        process.start()
        assert "waiting for another process" in shown.get(timeout=60)
        assert shown.empty()
    assert shown.get(timeout=60) == "entered"
    process.join()
