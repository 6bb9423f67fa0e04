"""`fab verify-worker`: gathers or loads the evidence, has it judged, and shows the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from diagnostics.connect import HostUnreachable, connect
from diagnostics.fanout import Entry, on_each
from diagnostics.inventory import Host, UsageError
from diagnostics.proof import evidence, logs, verdict
from diagnostics.proof.verdict import Verdict
from diagnostics.render import make_console

EXIT_STATUS = {"proved": 0, "refuted": 1, "unknown": 3}


def from_hosts(hosts: Sequence[Host], timeout: float, save: Path | None = None) -> list[Verdict]:
    """Judge each host by fresh evidence; a host that cannot be reached within `timeout` seconds is unknown.

    With `save`, the evidence is written there too, for judging later. Raises UsageError when that folder cannot be
    written.
    """
    if save is not None:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--save {save} cannot be written ({error.strerror}); give a folder") from error

    def work(host: Host) -> Entry:
        try:
            with connect(host, timeout) as connection:
                return {"evidence": evidence.gather(connection, host, timeout)}
        except HostUnreachable as error:
            return {"evidence": evidence.unreachable(host.name, str(error))}

    documents = [entry["evidence"] for entry in on_each(hosts, work)]
    if save is not None:
        evidence.save(documents, save)
    return [verdict.judge(document) for document in documents]


def from_folder(folder: Path) -> list[Verdict]:
    """Judge evidence that was saved before. Raises UsageError when there is none."""
    try:
        return [verdict.judge(document) for document in evidence.load(folder)]
    except evidence.EvidenceError as error:
        raise UsageError(str(error)) from error


def from_log(path: Path) -> list[Verdict]:
    """Judge a log file alone, plain, gzip or zstd: refuted or unknown, never proved."""
    try:
        with logs.open_log(str(path)) as stream:
            facts = logs.parse(stream)
    except OSError as error:
        raise UsageError(f"--log {path} cannot be read: {error.strerror or error}; give a file") from error
    return [verdict.judge_log(facts, str(path), evidence.reference())]


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """0 proved, 1 refuted, 3 unknown, over all hosts."""
    return EXIT_STATUS[verdict.overall(verdicts)]


STYLES = {"proved": "green", "refuted": "bold red", "unknown": "yellow", "consistent": "cyan", "not applicable": "dim"}


def show(verdicts: Sequence[Verdict]) -> None:
    """Print for people: the outcome and its reason first, then, per host, each link of the chain."""
    out = make_console()
    for found in verdicts:
        headline = f"{found.verdict.upper()}  {found.host}: {found.reason}"
        out.print(Text(headline, f"bold {STYLES[found.verdict]}"), soft_wrap=True)
    for found in verdicts:
        if found.links:
            out.print()
            out.print(_chain(found))
        for note in found.notes:
            out.print(Text(f"note  {found.host}: {note}", "dim"), soft_wrap=True)


def _chain(found: Verdict) -> Table:
    table = Table(title=found.host, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "link", "claimed", "seen", "where"):
        table.add_column(column, overflow="fold")
    for link in found.links:
        state = Text("-" if link.state == "not applicable" else link.state, STYLES[link.state])
        table.add_row(state, *(Text(text) for text in (link.name, link.claimed, link.seen, link.where)))
    return table
