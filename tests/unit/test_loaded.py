"""The hash of loaded code: of what was loaded, wherever it lay, whatever the files say by now."""

import importlib.util
import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest
from spec_gate import loaded

SOURCE = '''\
"""A module with constants of every kind."""
from spec_gate.loaded import register
register(__name__, "1.0-abc")

LIMIT = (1, -2.5, 0.0, -0.0, 3j, b"bytes", "text", None, True, ...)


def member(value, /, other=1, *, third=2):
    try:
        return value in {"red", "green", "blue", "white", "black"}
    except TypeError:
        return lambda: (value, other, third)


class Thing:
    size = 10
'''


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch):
    monkeypatch.setattr(loaded, "_modules", {})


def import_file(path, name="sample"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, text=SOURCE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_registered_module_is_described_with_its_file_series_and_hash(tmp_path):
    path = write(tmp_path / "sample.py")
    import_file(path)
    (module,) = loaded.registered()
    assert module.describe() == {
        "module": "sample",
        "file": str(path),
        "series": "1.0-abc",
        "code_sha256": loaded.source_code_sha256(str(path)),
    }


def test_the_same_source_at_another_path_has_the_same_hash(tmp_path):
    here, there = write(tmp_path / "here" / "sample.py"), write(tmp_path / "there" / "other.py")
    assert loaded.source_code_sha256(str(here)) == loaded.source_code_sha256(str(there))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size = 10", "size = 11"),
        ('"green"', '"greem"'),
        ("-0.0,", "+0.0,"),
        ("True,", "None,"),
        ("return value in", "return value is"),
        ("other=1,", "other=2,"),
        ("class Thing", "class Think"),
        ("TypeError", "KeyErrors"),
        ("kind.", "kinds."),
    ],
)
def test_one_changed_byte_gives_another_hash(tmp_path, old, new):
    assert old in SOURCE
    before, after = write(tmp_path / "before.py"), write(tmp_path / "after.py", SOURCE.replace(old, new))
    assert loaded.source_code_sha256(str(before)) != loaded.source_code_sha256(str(after))


@pytest.mark.parametrize("pair", [(1, True), (0, 0.0), (0.0, -0.0), ("a", b"a"), ((1,), (1, ())), ((12, 3), (1, 23))])
def test_equal_or_similar_constants_are_told_apart(pair):
    code = (lambda: None).__code__
    first, second = (loaded.code_sha256(code.replace(co_consts=(None, value))) for value in pair)
    assert first != second


def test_a_constant_that_no_compiler_makes_is_refused():
    code = (lambda: None).__code__.replace(co_consts=(None, ["list"]))
    with pytest.raises(TypeError, match="list"):
        loaded.code_sha256(code)


def test_a_stale_unchecked_compiled_file_is_hashed_as_what_was_loaded_not_as_its_source(tmp_path):
    path = write(tmp_path / "sample.py")
    old_hash = loaded.source_code_sha256(str(path))
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    write(path, SOURCE.replace("size = 10", "size = 11"))

    assert import_file(path).Thing.size == 10, "the interpreter must have taken the stale file, or this shows nothing"
    (module,) = loaded.registered()
    assert loaded.code_sha256(module.code) == old_hash
    assert loaded.code_sha256(module.code) != loaded.source_code_sha256(str(path))


def test_a_file_replaced_after_loading_does_not_change_the_hash(tmp_path):
    path = write(tmp_path / "sample.py")
    import_file(path)
    (module,) = loaded.registered()
    before = module.describe()
    write(path, "raise SystemExit\n")
    assert module.describe() == before


def test_code_that_the_interpreter_has_specialised_hashes_as_before(tmp_path):
    path = write(tmp_path / "sample.py")
    module = import_file(path)
    before = loaded.code_sha256(module.member.__code__)
    for value in range(5000):
        module.member(str(value))
    assert loaded.code_sha256(module.member.__code__) == before


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_text_of_the_module_alone_serves_another_process(tmp_path, seed):
    path = write(tmp_path / "sample.py")
    text = Path(loaded.__file__).read_text() + f"\nimport json\nprint(json.dumps(source_code_sha256({str(path)!r})))\n"
    output = subprocess.run(
        [sys.executable, "-I", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": seed},
    ).stdout
    assert json.loads(output) == loaded.source_code_sha256(str(path))
