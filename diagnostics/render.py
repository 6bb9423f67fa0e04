"""What people see: the outcome on the first line, then tables. Programs read the documents (``--json``) instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diagnostics.compare import Comparison
from diagnostics.fanout import Entry
from diagnostics.inventory import Host
from diagnostics.load import Plan
from diagnostics.traffic import HARMLESS_LAG_S, OUTCOMES, PERCENTILES, Result

PIPED_WIDTH = 120


def make_console() -> Console:
    """A console on standard output."""
    # In a file or a pipe rich would take 80 columns and cut the tables.
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, markup=False, highlight=False)


def _outcome(console: Console, what: str, entries: Sequence[Entry], detail: str = "") -> None:
    """Print the first line, then each reason of each host that is not ok."""
    bad = [entry["host"] for entry in entries if not entry["ok"]]
    if bad:
        console.print(Text(f"{what} FAILED on {len(bad)} of {len(entries)} hosts: {', '.join(bad)}", "bold red"))
    else:
        console.print(Text(f"{what} passed on {', '.join(e['host'] for e in entries)}{detail}", "bold green"))
    for entry in entries:
        for reason in entry["reasons"]:
            console.print(Text(f"  {entry['host']}: {reason}", "red"), soft_wrap=True)


def _facts(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of name and value; rows without a value are left out."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        if value is not None and value != "":
            table.add_row(Text(name, "dim"), Text(str(value)))
    return table


def smoke(entries: Sequence[Entry]) -> None:
    """Show what was sent and what came back."""
    console = make_console()
    _outcome(console, "Smoke test", entries)
    for entry in entries:
        if not entry.get("sent"):
            continue
        got = entry["got"] or {}
        length = entry["accept_length"]
        unmeasured = "not measured" if entry["speculative"] else "the server does not speculate"
        console.print()
        console.print(
            _facts(
                f"{entry['host']}  {entry['model']}  SGLang {entry['sglang_version']}",
                [
                    ("sent", entry["sent"]["messages"][-1]["content"]),
                    ("answer", got.get("text")),
                    ("finish reason", got.get("finish_reason")),
                    ("tokens", f"{got['prompt_tokens']} in, {got['output_tokens']} out" if got else None),
                    ("time", f"{got['seconds']:.2f} s" if got else None),
                    ("accept length", f"{length:.2f}" if length is not None else unmeasured),
                ],
            )
        )


class _Bars:
    """Bars on standard error while something is on its way; nothing where that is no terminal."""

    def __init__(self, *columns: rich_progress.ProgressColumn, **options: Any) -> None:
        self._console = Console(stderr=True)
        self._bars = rich_progress.Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, **options
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


class Progress(_Bars):
    """A bar for each host over the requests of a load."""

    def __init__(self, hosts: Sequence[Host], plan: Plan) -> None:
        super().__init__(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TextColumn(
                "{task.completed} of {task.total} requests" if plan.requests else "{task.completed} requests"
            ),
            rich_progress.TimeElapsedColumn(),
            transient=True,
        )
        self._tasks = {host.name: self._bars.add_task(host.name, total=plan.requests) for host in hosts}

    def counter(self, host: Host) -> Callable[[Result], None]:
        """Return a function that counts one result of *host*."""
        return lambda result: self._bars.advance(self._tasks[host.name])


def load(entries: Sequence[Entry]) -> None:
    """Show counts, throughput, latencies by kind of prompt, and the gate."""
    console = make_console()
    measured = [entry for entry in entries if entry.get("requests")]
    answered = sum(entry["requests"]["answered"] for entry in measured)
    sent = sum(entry["requests"]["sent"] for entry in measured)
    rate = sum(entry["output_tokens_per_s"] or 0 for entry in measured)
    _outcome(console, "Load test", entries, f": {answered} of {sent} requests answered, {rate:.1f} tok/s")
    for entry in measured:
        console.print()
        console.print(_load_table(entry))
        console.print(
            _facts(
                "",
                [
                    ("errors", "; ".join(f"{e['count']} {e['outcome']}: {e['reason']}" for e in entry["errors"])),
                    ("skipped", ", ".join(f"{p['name']} ({p['tokens']} tokens)" for p in entry["skipped_prompts"])),
                    ("client", _lag_line(entry.get("client"))),
                    ("gate", _gate_line(entry.get("gate")) if "gate" in entry else None),
                    ("arms", _arms_line(entry.get("arms"))),
                    ("limits", "; ".join(_limit(each) for each in entry["limits"])),
                ],
            )
        )


def _load_table(entry: Entry) -> Table:
    plan, counts = entry["plan"], entry["requests"]
    pace = f"C={plan['concurrency']}" if plan["rate"] is None else f"{plan['rate']:g} requests/s"
    title = (
        f"{entry['host']}  {pace}  {counts['sent']} requests in {entry['elapsed_s']:.1f} s: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        + f"  {entry['output_tokens_per_s'] or 0:.1f} tok/s"
    )
    table = Table(title=title, title_justify="left")
    quantiles = "/".join(f"p{q}" for q in PERCENTILES)
    table.add_column("kind")
    table.add_column("answered", justify="right")
    for name, unit in (("first token", "ms"), ("inter-token", "ms"), ("end to end", "s")):
        table.add_column(f"{name} {quantiles} [{unit}]", justify="right")
    table.add_column("accept length", justify="right")
    for name, figures in [*entry.get("kinds", {}).items(), ("all", entry)]:
        table.add_row(
            Text(name),
            f"{figures['requests']['answered']} of {figures['requests']['sent']}",
            _quantiles(figures["time_to_first_token_s"], 1000, 0),
            _quantiles(figures["inter_token_s"], 1000, 1),
            _quantiles(figures["end_to_end_s"], 1, 2),
            "-" if figures["accept_length"] is None else f"{figures['accept_length']:.2f}",
        )
    return table


def _quantiles(values: Mapping[str, float] | None, factor: float, digits: int) -> str:
    return " / ".join(f"{value * factor:.{digits}f}" for value in values.values()) if values else "-"


def _gate_line(gate: Mapping[str, Any] | None) -> str:
    if gate is None:
        return "none: the server runs without the patch"
    by = f"profile {gate['profile']}" if gate["profile"] else f"threshold {gate['threshold']}"
    if "closed_steps" not in gate:
        return f"{by}; not known across the restart"
    end = (
        f"open again after {gate['open_again_after_s']:.1f} s"
        if gate["open_again_after_s"] is not None
        else "still closed"
    )
    steps = gate["open_steps"] + gate["closed_steps"]
    held = f", HELD {gate['forced']} whatever the load" if gate["forced"] else ""
    return (
        f"{by}{held}: {gate['transitions']} transitions, "
        f"closed for {gate['closed_steps']} of {steps} steps, {end if gate['closed_steps'] else 'never closed'}"
    )


def _lag_line(client: Mapping[str, Any] | None) -> str | None:
    """A client that was late is no fault of the server, but all latencies hold it."""
    if client is None or client["lag_s"] is None or client["lag_s"]["p95"] < HARMLESS_LAG_S:
        return None
    quantiles = "/".join(f"p{q}" for q in PERCENTILES)
    return f"was itself late by {_quantiles(client['lag_s'], 1000, 0)} ms ({quantiles}): the latencies include that"


def _arms_line(arms: Mapping[str, Any] | None) -> str | None:
    if arms is None:
        return None
    medians = ", ".join(f"{arm} {value:.1f}" for arm, value in arms["medians"].items())
    return f"{medians} tok/s (medians of {len(arms['output_tokens_per_s']['gate'])} rounds)"


def _limit(limit: Mapping[str, Any]) -> str:
    found = "not measured" if limit["found"] is None else f"{limit['found']:.4g}"
    return f"{limit['name']} {found} ({limit['rule']} {limit['allowed']:g})"


def status(entries: Sequence[Entry]) -> None:
    """Show one row a host, and one a GPU."""
    console = make_console()
    _outcome(console, "Status check", entries)
    table = Table()
    for name in ("host", "unit", "uptime", "restarts", "deployment and release", "closes by", "gate", "requests"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        unit, deployment, requests = entry.get("unit"), entry.get("deployment"), entry.get("requests")
        cells = (
            entry["host"],
            f"{unit['ActiveState']} ({unit['SubState']})" if unit else "not reached",
            _duration(unit["uptime_s"]) if unit else None,
            unit["NRestarts"] if unit else None,
            f"{deployment['id']}\n{deployment['release']}" if deployment else None,
            _closes_by(entry) if deployment else None,
            ", ".join(dict.fromkeys(gate["mode"] for gate in entry.get("gates", []))) or None,
            f"{requests['running']} running, {requests['waiting']} waiting" if requests else None,
        )
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    console.print(table)
    for entry in entries:
        for gpu in entry.get("gpus", []):
            console.print(Text(f"{entry['host']}: " + ", ".join(f"{name} {value}" for name, value in gpu.items())))


def _closes_by(entry: Entry) -> str:
    """What the gates go by, as the ranks say; where none says so, the deployment's threshold."""
    profiles = dict.fromkeys(gate["profile"] for gate in entry.get("gates", []) if gate.get("profile"))
    return f"profile {', '.join(profiles)}" if profiles else f"threshold {entry['deployment']['threshold']}"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def logs(entries: Sequence[Entry]) -> None:
    """Print each host's lines as they are; what could not be read goes to standard error."""
    for entry in entries:
        if len(entries) > 1 and entry.get("lines"):
            print(f"==> {entry['host']} <==")
        for line in entry.get("lines", []):
            print(line)
        for reason in entry["reasons"]:
            print(f"{entry['host']}: {reason}", file=sys.stderr)


def line_printer(host: Host, hosts: int) -> Callable[[str], None]:
    """Return a function that prints one followed line, with the host's name where there are several."""
    prefix = f"{host.name} | " if hosts > 1 else ""
    return lambda line: print(f"{prefix}{line}", flush=True)


def report(facts: Mapping[str, Any], path: Path) -> None:
    """Print the verdict, and where the page is."""
    console = make_console()
    style = {"good": "bold green", "failed": "bold red"}.get(facts["state"], "yellow")
    console.print(Text(facts["headline"], style), soft_wrap=True)
    for host in facts["hosts"]:
        for reason in host["reasons"]:
            console.print(Text(f"  {host['host']}: {reason}"), soft_wrap=True)
    console.print(Text(f"The page: {path}"), soft_wrap=True)


class Steps(_Bars):
    """One bar over the starts and levels of a comparison, with an estimate of what is left."""

    def __init__(self, comparison: Comparison, deployment: Mapping[str, Any]) -> None:
        starts = comparison.rounds * len(comparison.arms)
        super().__init__(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("about"),
            # Starts and levels take turns, so that the mean of all steps tells what is left.
            rich_progress.TimeRemainingColumn(elapsed_when_finished=False),
            rich_progress.TextColumn("left"),
            speed_estimate_period=86400.0,
        )
        # Each start, its levels, and the start of the former deployment at the end.
        self._task = self._bars.add_task("", total=starts * (1 + len(comparison.levels)) + 1)
        self._begun = False
        if self._console.is_terminal:
            self._console.print(
                f"{starts} starts of the server in {comparison.rounds} rounds; deployment {deployment['id']} serves "
                "again at the end. Should this program be killed: ansible-playbook playbooks/rollback.yml "
                f"-e rollback_to={deployment['id']}"
            )

    def next(self, text: str) -> None:
        """Say what is done next; what was done before is over."""
        self._bars.update(self._task, description=text, advance=1 if self._begun else 0)
        self._begun = True


def compare(entries: Sequence[Entry]) -> None:
    """Show each arm's figures at each concurrency, and which differences are more than noise."""
    console = make_console()
    _outcome(console, "Comparison", entries)
    for entry in entries:
        if entry.get("summary"):
            _comparison(console, entry)


def _comparison(console: Console, entry: Entry) -> None:
    levels = sorted({row["concurrency"] for row in entry["summary"]})
    rows = {(row["arm"], row["concurrency"]): row for row in entry["summary"]}
    told = {(row["against"], row["concurrency"]): row for row in entry["differences"]}
    first = entry["plan"]["arms"][0]
    table = Table(
        title=f"{entry['host']}  tok/s, median (least to greatest) of {entry['plan']['rounds']} rounds; "
        f"below it {first} over the arm",
        title_justify="left",
    )
    table.add_column("arm")
    for level in levels:
        table.add_column(f"C={level}", justify="right")
    for arm in entry["plan"]["arms"]:
        cells = []
        for level in levels:
            rate = (rows.get((arm, level)) or {}).get("output_tokens_per_s")
            cell = f"{rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f})" if rate else "-"
            if (row := told.get((arm, level))) is not None:
                interval = f" [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]" if row["interval"] else ""
                cell += f"\n{row['ratio']:.2f}x{interval} {row['says']}"
            cells.append(Text(cell))
        table.add_row(Text(arm), *cells)
    console.print(table)
    for arm in entry["arms"]:
        console.print(Text(f"{arm['name']}: {arm['what']}; {arm['proof']}", "dim"), soft_wrap=True)
    console.print(
        Text(f"active again: {entry['restored']['deployment']}, {entry['restored']['proof']}"), soft_wrap=True
    )


class CalibrationProgress(_Bars):
    """A bar and the last measured cell of each host."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.completed} of {task.total} cells"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("{task.fields[last]}", markup=False),
            transient=True,
        )
        self._tasks = {host.name: self._bars.add_task(host.name, total=None, last="acceptance") for host in hosts}

    def of(self, host: Host) -> Callable[[int, int, str], None]:
        """Return a function that takes the number of cells measured, that of all, and a line about the last one."""
        return lambda done, of, last: self._bars.update(self._tasks[host.name], completed=done, total=of, last=last)


def calibration(entries: Sequence[Entry]) -> None:
    """Show what is recommended and why, and the cells that it comes from."""
    console = make_console()
    _outcome(console, "Calibration", entries)
    for entry in entries:
        if not entry.get("acceptance"):
            continue
        found, cells = entry["recommended"], entry["cells"]
        by_kind = ", ".join(f"{kind} {length:.2f}" for kind, length in entry["acceptance"].items())
        console.print()
        console.print(
            _facts(
                f"{entry['host']}  {entry['model']}  SGLang {entry['sglang_version']}",
                [
                    ("simulated", ", ".join(f"{name}={value}" for name, value in entry["simulation"].items())),
                    ("threshold", f"{found['threshold']}: {entry['why']}" if found else None),
                    ("low mark", found and found["low_mark"]),
                    ("KV tokens", (found and found["kv_token_threshold"]) or None),
                    ("accept length", by_kind),
                    ("profile", f"{entry['profile']['id']} in {entry['stored']}" if entry.get("stored") else None),
                    ("time", f"{entry['elapsed_s']:.0f} s of {entry['budget_s']:.0f} s"),
                ],
            )
        )
        table = Table()
        for name in ("batch", "context", "open step [ms]", "closed step [ms]", "tokens a step to pay", "uncertainty"):
            table.add_column(name, justify="right")
        for cell in cells:
            steps = [f"{cell[name] * 1000:.2f}" for name in ("open_step_s", "closed_step_s")]
            rest = (f"{cell['break_even']:.2f}", f"{cell['uncertainty']:.1%}")
            table.add_row(str(cell["batch"]), str(cell["context"]), *steps, *rest)
        console.print(table)
        for cell in entry["left_out"]:
            console.print(Text(f"left out: batch {cell['batch']}, context {cell['context']}: {cell['reason']}", "dim"))
