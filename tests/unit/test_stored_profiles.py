"""Which stored profile a server gets: the newest that was measured on this host, with these versions and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_gate import profile
from spec_gate.stored_profiles import choose

KEY: dict[str, Any] = {
    "host": "gpu-1",
    "devices": ["NVIDIA H200"],
    "driver": "580.95.05",
    "sglang_version": "0.5.12.post1",
    "series": "0.5.12.post1-0",
    "model": "/srv/models/target",
    "draft": "/srv/models/draft",
    "tp_size": 1,
    "speculative": {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
}


def store(folder: Path, made: str = "2026-01-01T00:00:00+00:00", **differing: Any) -> Path:
    document = profile.make(
        made=made,
        key=KEY | differing,
        cells=[profile.Cell(1, 512, 0.02, 0.01)],
        acceptance_seen=2.5,
        recommended={"threshold": 4, "low_mark": 3, "kv_token_threshold": 0},
        why="speculation pays below 4 requests",
    )
    path = folder / f"{document['id']}.json"
    path.write_text(json.dumps(document))
    return path


def test_the_newest_that_fits_is_taken_with_its_path(tmp_path: Path) -> None:
    store(tmp_path, "2026-01-01T00:00:00+00:00")
    newest = store(tmp_path, "2026-02-01T00:00:00+00:00")
    store(tmp_path, "2026-03-01T00:00:00+00:00", host="gpu-2")
    found, refused = choose(tmp_path, KEY)
    assert found is not None
    assert (found["path"], found["id"]) == (str(newest), newest.stem)
    assert [entry["reason"] for entry in refused] == ["host was gpu-2 and is gpu-1"]


def test_each_part_of_the_key_is_told_with_what_was_found_and_what_is(tmp_path: Path) -> None:
    store(tmp_path, driver="570.1", model="/srv/models/other")
    found, refused = choose(tmp_path, KEY)
    assert found is None
    assert refused[0]["reason"] == (
        "driver was 570.1 and is 580.95.05; model was /srv/models/other and is /srv/models/target"
    )


def test_a_changed_or_broken_file_is_refused_and_hides_no_other(tmp_path: Path) -> None:
    good = store(tmp_path)
    changed = json.loads(good.read_text()) | {"acceptance_seen": 9.0}
    (tmp_path / "a.json").write_text(json.dumps(changed))
    (tmp_path / "b.json").write_text("{")
    found, refused = choose(tmp_path, KEY)
    assert found is not None
    assert found["path"] == str(good)
    assert "it was changed after it was made" in refused[0]["reason"]
    assert "is no JSON" in refused[1]["reason"]


def test_without_profiles_there_is_none(tmp_path: Path) -> None:
    assert choose(tmp_path / "missing", KEY) == (None, [])
