"""The report: its verdict from the documents of runs, and the page, on which nothing that was said becomes markup."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import EARLIER, TIME, comparison, deploy, document, figures, history, profile, write
from test_plugins import load as load_file

from diagnostics.inventory import UsageError
from diagnostics.report import charts, page
from diagnostics.report.facts import report
from diagnostics.report.runs import read_runs, save

ALL = {"compare": comparison(), "profile": profile()}


def facts_of(root: Path, **documents: Any) -> dict[str, Any]:
    """The report on gpu-1 with the documents of a good deploy, changed by *documents*; None leaves one out."""
    write(root, "gpu-1", TIME, {name: found for name, found in (deploy() | documents).items() if found is not None})
    return report(read_runs(root), "2026-11-29T20:00:00+00:00")


def failed(reason: str) -> dict[str, Any]:
    return {"schema": "specgate.outcome/1", "host": "gpu-1", "ok": False, "reason": reason}


def test_a_deploy_that_was_proved_and_tested_is_good(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert (facts["ok"], facts["state"]) == (True, "good")
    assert facts["headline"] == "gpu-1: deployed, proved and tested"


LOST = document("specgate.load/1", ok=False, reasons=["3 of 50 requests lost"])
UNKNOWN = document("specgate.verdict/1", verdict="unknown", reason="still loading", worker=None, links=[])
REFUTED = document("specgate.verdict/1", verdict="refuted", reason="another file", worker=None, links=[])


@pytest.mark.parametrize(
    ("documents", "state", "says", "reasons"),
    [
        ({"outcome": failed("no space left\nd1 serves again")}, "failed", "the deploy FAILED",
         ["no space left", "d1 serves again"]),
        ({"outcome": None}, "unknown", "did not end", ["it left no outcome.json"]),
        ({"verify-worker": None}, "unknown", "NOT PROVED: verify-worker was not run", []),
        ({"verify-worker": UNKNOWN}, "unknown", "NOT PROVED", ["still loading"]),
        ({"verify-worker": REFUTED}, "failed", "REFUTED", ["another file"]),
        ({"load": LOST}, "failed", "the load test FAILED", ["load test: 3 of 50 requests lost"]),
        ({"load": None}, "partial", "deployed and proved; not run: load test", []),
        ({"smoke": None, "load": None}, "partial", "not run: smoke test, load test", []),
        ({"load": "{"}, "partial", "not run: load test", ["load.json is not a document"]),
        ({"load": {"schema": "specgate.load/9"}}, "partial", "not run", ["load.json has schema 'specgate.load/9'"]),
        ({"verify-worker": "[]"}, "unknown", "NOT PROVED", ["verify-worker.json is not a document"]),
        ({"outcome": "no JSON"}, "unknown", "did not end", ["outcome.json is not a document"]),
    ],
)  # fmt: skip
def test_what_is_missing_wrong_or_unreadable_is_never_a_success(
    tmp_path: Path, documents: dict[str, Any], state: str, says: str, reasons: list[str]
) -> None:
    facts = facts_of(tmp_path, **documents)
    (host,) = facts["hosts"]
    assert (host["state"], facts["ok"]) == (state, False)
    assert says in facts["headline"]
    for reason in reasons:
        assert any(reason in found for found in host["reasons"]), host["reasons"]
    html = page.render(facts)
    assert "proved and tested" not in html
    first_screen = html[html.index("<header>") : html.index("<main>")]
    assert says in first_screen
    assert all(reason.split("'")[0] in first_screen for reason in reasons)


def test_stages_that_were_not_run_are_said_to_be_so(tmp_path: Path) -> None:
    html = page.render(facts_of(tmp_path, **{"smoke": None, "load": None, "verify-worker": None, "deployment": None}))
    assert html.count("<strong>Not run.</strong>") == 2
    assert "Proof: not run." in html
    assert html.count('<b class="none">not run</b>') == 6
    assert "passed" not in html


def test_a_load_that_was_interrupted_is_shown_as_far_as_it_went(tmp_path: Path) -> None:
    part = document("specgate.load/1", ok=False, reasons=["interrupted"], plan={"concurrency": 10}, **figures())
    html = page.render(facts_of(tmp_path, load=part))
    assert "50 answered" in html
    assert "the load test FAILED" in html


def test_a_figure_has_its_unit_and_its_document(tmp_path: Path) -> None:
    (host,) = facts_of(tmp_path)["hosts"]
    found = {figure["label"]: figure for figure in host["figures"]}
    assert found["throughput at C=10"] == {
        "label": "throughput at C=10",
        "value": 800.0,
        "unit": "tok/s",
        "source": f"gpu-1/{TIME}/load.json",
    }
    assert found["first token at C=10, p95"]["value"] == pytest.approx(60)
    assert found["gate closed"]["value"] == pytest.approx(100 * 240 / 380)
    assert {source["document"] for source in host["sources"]} >= {f"gpu-1/{TIME}/{name}.json" for name in deploy()}


def test_that_figures_are_not_a_gpus_is_said_first(tmp_path: Path) -> None:
    def first_screen(folder: str, **how: Any) -> str:
        html = page.render(facts_of(tmp_path / folder, **deploy(**how)))
        return html[: html.index("<main>")]

    shaped = first_screen("a", cpu_engine=True, simulation={"SGLANG_CPU_ENGINE_FORWARD_MS": "20,1"})
    assert "The server simulates another machine: SGLANG_CPU_ENGINE_FORWARD_MS=20,1." in shaped
    rehearsal = first_screen("b", cpu_engine=True)
    assert "CPU engine, no GPU." in rehearsal
    assert "simulates" not in rehearsal
    on_a_gpu = first_screen("c", simulation={"SGLANG_SIMULATE_ACC_LEN": "2.5"})
    assert "SGLANG_SIMULATE_ACC_LEN=2.5" in on_a_gpu
    assert "CPU engine" not in on_a_gpu
    assert "No figure" not in first_screen("d")


def test_changes_are_those_since_the_last_deploy_that_succeeded(tmp_path: Path) -> None:
    write(tmp_path, "gpu-1", EARLIER, deploy(threshold=8))
    write(tmp_path, "gpu-1", "20261128T201112Z", deploy(threshold=9) | {"outcome": failed("no")})
    (host,) = facts_of(tmp_path)["hosts"]
    assert host["changes"]["since"].startswith("2026-11-28T10:11:12")
    assert host["changes"]["settings"] == [
        {"name": "deployment", "before": "d8", "now": "d5"},
        {"name": "--speculative-disable-batch-threshold", "before": 8, "now": 5},
    ]
    assert host["changes"]["figures"][1] == {
        "label": "throughput at C=10",
        "unit": "tok/s",
        "before": 800.0,
        "now": 800.0,
    }


def test_a_second_deploy_of_the_same_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "gpu-1", EARLIER, deploy())
    facts = facts_of(tmp_path)
    assert facts["hosts"][0]["changes"]["settings"] == []
    assert "Nothing: the same deployment as on 2026-11-28 10:11:12 UTC" in page.render(facts)


def test_the_latest_comparison_and_profile_are_shown_beside_the_deploy(tmp_path: Path) -> None:
    write(tmp_path, "gpu-1", "20261129T201112Z", {"compare": comparison()})
    facts = facts_of(tmp_path, profile=profile())
    (host,) = facts["hosts"]
    assert host["state"] == "good"
    assert host["comparison"]["source"] == "gpu-1/20261129T201112Z/compare.json"
    html = page.render(facts)
    assert html.count("<svg") == 5  # the gate, three figures over the concurrency, the break-even
    assert "<th>gated / plain</th>" in html
    assert "speculation pays below 9 requests." in html


def test_a_figure_that_does_not_count_leaves_its_place_empty(tmp_path: Path) -> None:
    late = ["round 1 of 3, arm plain, C=4: the client was too slow"]
    compared = comparison(("gated", "plain"))
    entry = compared["hosts"][0]
    entry |= {"ok": False, "invalid": late, "reasons": late}
    for rows, name in ((entry["summary"], "arm"), (entry["differences"], "against")):
        rows[:] = [row for row in rows if (row[name], row["concurrency"]) != ("plain", 4)]
    html = page.render(facts_of(tmp_path, compare=compared))
    assert "not all figures count" in html
    row = html[html.index("<th>plain</th>") :].partition("</tr>")[0]
    assert re.findall(r">([^<>]+)(?:<br>|</td>)", row) == ["100", "-", "100"]


def test_a_point_that_was_not_measured_leaves_its_place_empty(tmp_path: Path) -> None:
    measured = profile()
    del measured["cells"][0]  # batch 1, context 512
    html = page.render(facts_of(tmp_path, profile=measured))
    row = html[html.index("<th>batch 1</th>") :].partition("</tr>")[0]
    assert re.findall(r">([^<>]+)</td>", row) == ["-", "1.125"]


def test_of_several_hosts_the_worst_comes_first(tmp_path: Path) -> None:
    for name, changed in {"a": {}, "b": {"outcome": failed("no space left")}, "c": {"load": None}}.items():
        write(tmp_path, name, TIME, {k: v for k, v in (deploy() | changed).items() if v is not None})
    facts = report(read_runs(tmp_path), "2026-11-29T20:00:00+00:00")
    assert [host["host"] for host in facts["hosts"]] == ["b", "c", "a"]
    assert facts["state"] == "failed"
    assert facts["headline"] == "1 of 3 hosts are deployed, proved and tested; look at b, c"
    assert facts["reasons"] == [
        "b: the deploy FAILED: no space left",
        "c: deployed and proved; not run: load test",
    ]
    html = page.render(facts)
    assert html.count('<section id="host-') == 3
    assert html[: html.index("<main>")].count('href="#host-') == 3


HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7 * 7 }} ]]> $x$"


def test_nothing_that_was_said_becomes_markup(tmp_path: Path) -> None:
    documents = deploy(simulation={"SGLANG_CPU_ENGINE_FORWARD_MS": HOSTILE})
    entry = documents["load"]["hosts"][0]
    entry |= {"reasons": [HOSTILE], "kinds": {HOSTILE: entry["kinds"]["chat"]}}
    entry["errors"] = [{"count": 1, "outcome": "failed", "reason": HOSTILE}]
    documents["smoke"]["hosts"][0]["got"]["text"] = HOSTILE
    documents["smoke"]["hosts"][0]["sent"]["messages"][0]["content"] = HOSTILE
    documents["verify-worker"]["hosts"][0]["links"][0]["seen"] = HOSTILE
    documents["deployment"]["server_arguments"]["model-path"] = HOSTILE
    documents["outcome"] = failed(HOSTILE)
    html = page.render(facts_of(tmp_path, **documents, compare=comparison(("gated", HOSTILE)), profile=profile()))
    assert "<script" not in html
    assert "{{ 7 * 7 }}" in html

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()
            self.ids: Counter[str] = Counter()

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.seen[tag] += 1
            self.ids.update(value or "" for name, value in attributes if name == "id")
            assert not any(name.startswith("on") for name, _ in attributes)

    tags = Tags()
    tags.feed(html)
    assert not {"script", "iframe", "img", "link", "object"} & set(tags.seen)
    assert [name for name, count in tags.ids.items() if count > 1] == []


def test_half_a_character_stops_no_page(tmp_path: Path) -> None:
    write(tmp_path, "gpu-1", TIME, deploy() | {"outcome": failed("half a character: \ud800")})
    path, _ = page.write(read_runs(tmp_path), tmp_path)
    assert "half a character: ?" in path.read_text(encoding="utf-8")


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    html = page.render(facts_of(tmp_path, **ALL))
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=\"(?!#)", html)
    assert "@import" not in html
    assert "url(" not in re.sub(r"url\(#[a-z0-9]+\)", "", html)


def test_time_with_more_closed_steps_than_open_ones_is_shaded() -> None:
    assert charts.closed_spans(history()["samples"]) == [(1.5, 4.5)]
    between = [
        {"t_s": 0.0, "mode": "open", "running": 2, "open_steps": 0, "closed_steps": 0},
        {"t_s": 0.5, "mode": "open", "running": 2, "open_steps": 1, "closed_steps": 30},
    ]
    assert charts.closed_spans(between) == [(0.0, 0.5)]


def test_a_chart_has_the_pages_colours_and_no_others(tmp_path: Path) -> None:
    svg = charts.over_concurrency({"a $ b": [(1, 2, 1, 3), (16, 4, 4, 4)]}, "tok/s")
    assert "var(--series-1)" in svg
    assert "a $ b" in svg
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#ffffff"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "not measured"), (0.123456, "0.1235"), (12345.6, "12346"), (5, "5"), (3.0, "3"), ("text", "text")],
)
def test_numbers_for_people(value: Any, shown: str) -> None:
    assert page.number(value) == shown


def test_the_page_and_the_json_behind_it_are_written(tmp_path: Path) -> None:
    write(tmp_path, "gpu-1", TIME, deploy())
    path, facts = page.write(read_runs(tmp_path), tmp_path)
    assert path == tmp_path / f"{TIME}.html"
    assert json.loads(path.with_suffix(".json").read_text()) == facts
    assert "specgate" in path.read_text(encoding="utf-8")
    other, _ = page.write(read_runs(tmp_path), tmp_path, tmp_path / "pages/mine.html")
    assert other.is_file()
    with pytest.raises(UsageError, match="cannot be written"):
        page.write(read_runs(tmp_path), tmp_path, tmp_path / "gpu-1")
    with pytest.raises(UsageError, match="is where the JSON"):
        page.write(read_runs(tmp_path), tmp_path, tmp_path / "page.json")


def test_folders_without_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        read_runs(tmp_path / "none")
    (tmp_path / "gpu-1/notes").mkdir(parents=True)
    with pytest.raises(UsageError, match="has no documents"):
        read_runs(tmp_path)
    save(comparison(), "compare", "gpu-1", tmp_path)
    with pytest.raises(UsageError, match="of gpu-2"):
        read_runs(tmp_path, ["gpu-2"])
    (run,) = read_runs(tmp_path, ["gpu-1", "gpu-2"])["gpu-1"]
    assert run.content("compare") == comparison()


def test_the_outcome_of_a_run_tells_the_reason() -> None:
    outcome = load_file("plugins/callback/deploy_report.py").outcome
    failures = {"a": "no space left"}
    assert outcome("a", True, {})["ok"] is True
    assert outcome("a", False, failures)["reason"] == "no space left"
    assert outcome("b", False, failures)["reason"] == "the run failed on another host: a: no space left"
    assert outcome("b", False, {})["reason"] == "the run did not end"
