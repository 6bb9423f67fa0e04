"""`fab doctor`: gathers the facts about a host over SSH, has them judged, and shows the checks."""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from diagnostics.connect import HostUnreachable, connect, execute
from diagnostics.doctor import check, checks, collector, expected
from diagnostics.fanout import Entry
from diagnostics.inventory import REPOSITORY, Host, UsageError
from diagnostics.render import make_console

SCHEMA = "specgate.doctor/1"
COLLECTOR = Path(collector.__file__)

_READ_PROGRAM = "import base64, sys, zlib; exec(zlib.decompress(base64.b64decode(sys.stdin.buffer.read())))"
_COMMAND = f"""\
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then sudo="sudo -n"; else sudo=; fi
printf %s "$0" | $sudo python3 -I -c {shlex.quote(_READ_PROGRAM)} "$1"
"""


def expected_of(host: Host) -> expected.Expected:
    """What the inventory expects of a host. Raises UsageError when its variables make no sense."""
    try:
        return expected.from_variables(host.given(expected.VARIABLES))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{host.name}: the variables of the checks cannot be used: {error}") from error


def examine(host: Host, wanted: expected.Expected, timeout: float) -> Entry:
    """Return one host's entry of the document. Raises HostUnreachable when the facts cannot be had."""
    request = json.dumps(expected.request(wanted, host.deployment_path))
    program = base64.b64encode(zlib.compress(COLLECTOR.read_bytes(), 9)).decode()
    with connect(host, timeout) as connection:
        answer = execute(connection, shlex.join(["sh", "-c", _COMMAND, program, request]), timeout)
    return entry(facts_of(answer.stdout, answer.stderr), wanted)


def facts_of(output: str, errors: str = "") -> checks.Facts:
    """Read what the collector printed. Raises HostUnreachable when that is not its document."""
    # A login script may print something of its own before.
    try:
        facts = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("schema") != collector.SCHEMA:
        said = (errors.strip() or output.strip() or "nothing").splitlines()[-1]
        raise HostUnreachable(f"the host's facts could not be read; it said: {said[:500]}")
    return facts


def entry(facts: checks.Facts, wanted: expected.Expected) -> dict[str, Any]:
    """The facts, the checks, and their outcome: `state` is the worst of them, `ok` that none failed or is unknown."""
    found = checks.judge(facts, wanted, source_reader(wanted.model_sources))
    state = check.overall(found)
    return {
        "ok": state in (check.PASS, check.WARN),
        "state": state,
        "reasons": check.lines(each for state in (check.FAIL, check.UNKNOWN) for each in found if each.state == state),
        "checks": [each.document() for each in found],
        "facts": facts,
    }


def source_reader(sources: Mapping[str, str]) -> Callable[[str], Mapping[str, Any] | None]:
    """A function that reads the model of this machine that a deploy would copy to a path of the host."""

    def read(path: str) -> Mapping[str, Any] | None:
        source = sources.get(path)
        return collector.read_model(str(REPOSITORY / source)) if source else None

    return read


STYLES = {
    check.PASS: "green",
    check.WARN: "yellow",
    check.FAIL: "bold red",
    check.UNKNOWN: "yellow",
    check.NOT_APPLICABLE: "dim",
}


def show(entries: Sequence[Entry]) -> None:
    """Print for people: one line a host, then each host's checks."""
    out = make_console()
    for each in entries:
        counts = {state: sum(one["state"] == state for one in each.get("checks", [])) for state in check.STATES}
        told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "; ".join(each["reasons"])
        state = each.get("state", check.UNKNOWN)
        out.print(Text(f"{state.upper()}  {each['host']}: {told}", STYLES[state]), soft_wrap=True)
    for each in entries:
        if not each.get("checks"):
            continue
        table = Table(title=each["host"], title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("", "check", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for one in check.merged(check.Check(**document) for document in each["checks"]):
            shown = "-" if one.state == check.NOT_APPLICABLE else one.state
            table.add_row(Text(shown, STYLES[one.state]), Text(one.name), Text(one.found), Text(one.todo))
        out.print()
        out.print(table)
        for problem in each["facts"]["problems"]:
            out.print(Text(f"note  {each['host']}: {problem['what']}: {problem['why']}", "dim"), soft_wrap=True)


def exit_status(entries: Sequence[Entry]) -> int:
    """0 all pass (warnings too), 1 a check failed or a host did not answer, 3 something is unknown."""
    states = {each.get("state", check.FAIL) for each in entries}
    return 1 if check.FAIL in states else 3 if check.UNKNOWN in states else 0
