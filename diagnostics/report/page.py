"""The page: the report's facts through one template, with everything escaped that a host, a server or a prompt said."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from diagnostics.inventory import UsageError
from diagnostics.report import charts
from diagnostics.report.facts import Facts, report
from diagnostics.report.runs import TIME_FORMAT, Run

NUMBER_DIGITS = 4


def write(runs: Mapping[str, Sequence[Run]], root: Path, output: Path | None = None) -> tuple[Path, Facts]:
    """Write the page and, beside it, the JSON behind it; returns the page's path and the facts.

    Without *output* the page is named after the newest run, in *root*. Raises UsageError where it cannot be written.
    """
    facts = report(runs, datetime.now(UTC).isoformat(timespec="seconds"))
    newest = max(run.time for found in runs.values() for run in found)
    path = output or root / f"{newest.strftime(TIME_FORMAT)}.html"
    if path.suffix == ".json":
        raise UsageError(f"--output {str(path)!r} is where the JSON behind the page would be; name the page *.html")
    texts = {path.with_suffix(".json"): json.dumps(facts, indent=2, ensure_ascii=False) + "\n", path: render(facts)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            # What a server said may hold halves of characters, which no encoding can write.
            file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--output {str(path)!r} cannot be written: {error.strerror}; give a file's path") from error
    return path, facts


def render(facts: Facts) -> str:
    """The page's HTML: no script, and a policy that lets the browser load nothing at all."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        # Of a host that was not reached, or a load that was interrupted, a document holds only a part.
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "when": when, "series": series, "levels": levels, "by": by}
    environment.globals |= {
        "gate_chart": lambda *arguments: Markup(charts.gate_over_time(*arguments)),
        "level_chart": lambda *arguments: Markup(charts.over_concurrency(*arguments)),
        "break_even_chart": lambda *arguments: Markup(charts.break_even(*arguments)),
    }
    style = Markup((folder / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html.j2").render(report=facts, style=style)


def number(value: Any) -> str:
    """A figure as people read it: four significant digits, but all digits of an integer."""
    if value is None or isinstance(value, Undefined):
        return "not measured"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or value.is_integer():
        return f"{value:.0f}"
    return f"{value:.{NUMBER_DIGITS}g}" if abs(value) < 1000 else f"{value:.0f}"


def when(time: str) -> str:
    """An ISO 8601 time for people."""
    return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def levels(summary: Iterable[Mapping[str, Any]]) -> list[int]:
    """The concurrencies of a comparison's summary."""
    return sorted({row["concurrency"] for row in summary})


def by(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, list[Mapping[str, Any] | None]]]:
    """Values of *name* in their order, each with its row at each level, None where there is none."""
    columns = levels(rows)
    found = {(row[name], row["concurrency"]): row for row in rows}
    return [(value, [found.get((value, level)) for level in columns]) for value in dict.fromkeys(r[name] for r in rows)]


def series(summary: Sequence[Mapping[str, Any]], figure: str, factor: float = 1.0) -> dict[str, list[charts.Point]]:
    """Arm to its points over the concurrency, of one *figure* of a comparison's summary; none without values."""
    arms = {
        arm: [
            (row["concurrency"], *(row[figure][key] * factor for key in ("median", "min", "max")))
            for row in rows
            if row is not None and row.get(figure) is not None
        ]
        for arm, rows in by(summary, "arm")
    }
    return {arm: points for arm, points in arms.items() if points}
