"""A host's profile: what is refused, whose it is, and the break-even between its cells."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_gate import profile as profiles
from spec_gate.profile import Cell, ProfileError

KEY = {
    "host": "gpu-1",
    "devices": ["NVIDIA H200"],
    "driver": "570.86.10",
    "sglang_version": "0.5.12.post1",
    "series": "0.5.12.post1-000000000000",
    "model": "/models/target",
    "draft": "/models/draft",
    "tp_size": 1,
    "speculative": {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
}
# The cost of a closed step: 10 ms and 0.1 ms a request; of an open one 12 ms and 1 ms a request; both 1 us a token.
CELLS = [
    Cell(batch, context, 0.012 + 0.001 * batch + 1e-6 * batch * context, 0.010 + 1e-4 * batch + 1e-6 * batch * context)
    for batch in (1, 8, 32)
    for context in (128, 4096)
    if (batch, context) != (32, 4096)  # did not fit
]


def document(**changes):
    made = profiles.make(
        made="2026-01-02T03:04:05Z",
        key=KEY,
        cells=CELLS,
        acceptance_seen=2.5,
        recommended={"threshold": 9, "low_mark": 7, "kv_token_threshold": None},
        why="speculation pays below 9 requests",
    )
    changed = made | changes
    return changed | {"id": changes.get("id", profiles.content_id(changed))}


def test_what_is_made_is_loaded_again(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document()))
    loaded = profiles.load(path)
    assert loaded.id == document()["id"] == profiles.content_id(document())
    assert (loaded.key, set(loaded.cells)) == (KEY, set(CELLS))


@pytest.mark.parametrize(("batch", "context"), [(cell.batch, cell.context) for cell in CELLS])
def test_a_cell_has_its_own_break_even(batch, context):
    cell = next(cell for cell in CELLS if (cell.batch, cell.context) == (batch, context))
    assert profiles.parse(document()).break_even(batch, context) == pytest.approx(cell.break_even)


def test_between_cells_the_costs_are_interpolated_and_not_their_ratio():
    # All costs grow in proportion to batch and context, so what is interpolated is exact.
    batch, context = 4, 1000
    exact = (0.012 + 0.001 * batch + 1e-6 * batch * context) / (0.010 + 1e-4 * batch + 1e-6 * batch * context)
    assert profiles.parse(document()).break_even(batch, context) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("outside", "inside"),
    [((100, 128), (32, 128)), ((1, 0), (1, 128)), ((8, 1e9), (8, 4096)), ((32, 4096), (32, 128))],
)
def test_beyond_the_outermost_cell_the_outermost_holds(outside, inside):
    profile = profiles.parse(document())
    assert profile.break_even(*outside) == profile.break_even(*inside)


@given(st.integers(1, 10_000), st.floats(0, 1e7))
def test_the_break_even_is_never_beyond_that_of_all_cells(batch, context):
    found = profiles.parse(document()).break_even(batch, context)
    slack = 1e-9
    assert min(cell.break_even for cell in CELLS) - slack <= found <= max(cell.break_even for cell in CELLS) + slack


def test_the_most_that_a_verify_step_accepts():
    assert profiles.parse(document()).most_accepted == 4


CELL = document()["cells"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "specgate.profile/2"}, ["'specgate.profile/2'", "'specgate.profile/1'", "calibrate again"]),
        ({"id": "0" * 12}, ["000000000000", "was changed after it was made"]),
        ({"made": None}, ["has no made"]),
        ({"why": None}, ["has no why"]),
        ({"key": {"host": "gpu-1"}}, ["no key", "devices"]),
        ({"key": KEY | {"speculative": {"num_steps": 3}}}, ["shape", "eagle_topk"]),
        ({"recommended": {"threshold": 3}}, ["recommends no", "low_mark"]),
        ({"recommended": {"threshold": 3, "low_mark": -1, "kv_token_threshold": None}}, ["0 or more"]),
        ({"acceptance_seen": 0.5}, ["0.5", "1 or more"]),
        ({"cells": []}, ["no cells"]),
        ({"cells": [CELL, CELL]}, ["two cells"]),
        ({"cells": [CELL | {"batch": 0}]}, ["batch is not 1 or more"]),
        ({"cells": [CELL | {"batch": True}]}, ["batch is not 1 or more"]),
        ({"cells": [CELL | {"context": -1}]}, ["context is not 0 or more"]),
        ({"cells": [CELL | {"open_step_s": 0}]}, ["not all above 0"]),
        ({"cells": [CELL | {"closed_step_s": float("nan")}]}, ["not all above 0"]),
        ({"cells": [CELL | {"closed_step_s": "fast"}]}, ["not all above 0"]),
        ({"cells": [CELL | {"break_even": 9.0}]}, ["is not open_step_s / closed_step_s"]),
    ],
)
def test_what_is_not_sound_is_refused_in_one_sentence_by_the_name_of_the_file(changes, words, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(ProfileError) as refusal:
        profiles.load(path)
    for word in [str(path), *words]:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "word"), [(None, "cannot be read"), (b"{", "no JSON"), (b"\xff", "cannot be read")]
)
def test_a_file_that_is_no_document_is_refused(content, word, tmp_path):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=word):
        profiles.load(path)


def test_an_unsound_profile_is_not_made():
    recommended = dict.fromkeys(profiles.RECOMMENDED_FIELDS)
    with pytest.raises(ProfileError, match="no cells"):
        profiles.make(made="now", key=KEY, cells=[], acceptance_seen=None, recommended=recommended, why="")


def test_a_profile_of_this_server_matches():
    assert profiles.mismatch(KEY, json.loads(json.dumps(KEY))) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", "gpu-2"),
        ("devices", ["NVIDIA H100"]),
        ("driver", None),
        ("sglang_version", "0.5.13"),
        ("series", ""),
        ("model", "/models/other"),
        ("draft", None),
        ("tp_size", 2),
        ("speculative", KEY["speculative"] | {"num_steps": 5}),
    ],
)
def test_a_difference_is_named_with_what_was_and_what_is(name, value):
    text = profiles.mismatch(KEY, KEY | {name: value})
    as_text = value if isinstance(value, str) else json.dumps(value)
    assert text.startswith(f"{name} was ")
    assert text.endswith(f" and is {as_text}")
    assert ";" not in text
