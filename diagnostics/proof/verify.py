"""`fab verify-worker`: gathers or loads the evidence, has it judged, and shows the verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from diagnostics.connect import connect
from diagnostics.fanout import Entry, on_each
from diagnostics.inventory import Host, UsageError
from diagnostics.proof import evidence, logs, verdict
from diagnostics.proof.link import Link, listed
from diagnostics.proof.verdict import Verdict
from diagnostics.render import make_console

EXIT_STATUS = {"proved": 0, "refuted": 1, "unknown": 3}


def from_hosts(
    hosts: Sequence[Host], timeout: float, save: Path | None = None, speculation: bool = True
) -> list[Verdict]:
    """Judge each host by fresh evidence; one that is not examined after `timeout` seconds is unknown.

    Without `speculation` the hosts are meant to run the release without it. With `save`, the evidence is written there
    too, for judging later. Raises UsageError when that folder cannot be written.
    """
    if save is not None:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--save {save} cannot be written ({error.strerror}); give a folder") from error

    def work(host: Host) -> Entry:
        with connect(host, timeout) as connection:
            return {"evidence": evidence.gather(connection, host, timeout)}

    documents = [
        entry.get("evidence") or evidence.unreachable(entry["host"], "; ".join(entry["reasons"]))
        for entry in on_each(hosts, work, timeout)
    ]
    if save is not None:
        evidence.save(documents, save)
    return [verdict.judge(document, speculation) for document in documents]


def from_folder(folder: Path, speculation: bool = True) -> list[Verdict]:
    """Judge evidence that was saved before. Raises UsageError when there is none."""
    try:
        return [verdict.judge(document, speculation) for document in evidence.load(folder)]
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


RANK = re.compile(r"\brank (\d+)\b")


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
    for link in _folded(found.links):
        state = Text("-" if link.state == "not applicable" else link.state, STYLES[link.state])
        table.add_row(state, *(Text(text) for text in (link.name, link.claimed, link.seen, link.where)))
    return table


def _folded(links: Iterable[Link]) -> Iterator[Link]:
    """The links to show: proved ones that differ only in the rank become one, or eight ranks would fill the screen."""
    alike: dict[object, list[Link]] = {}
    for position, link in enumerate(links):
        key = (RANK.sub("", link.name), link.claimed, RANK.sub("", link.seen))
        alike.setdefault(key if link.state == "proved" else position, []).append(link)
    for first, *others in alike.values():
        if not others:
            yield first
            continue
        numbers = listed(found[1] for link in (first, *others) if (found := RANK.search(f"{link.name} {link.seen}")))
        yield replace(
            first,
            name=RANK.sub(f"ranks {numbers}", first.name),
            seen=RANK.sub(f"ranks {numbers}", first.seen),
            where=f"{first.where}, and {len(others)} more",
        )
