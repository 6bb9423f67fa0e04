"""The command line: options in, one document out, an exit status that a program can trust.

Exit status: 0 success, 1 failure, 2 wrong use, 3 unknown (verify-worker, doctor, load, compare). With ``--json``
standard output is one JSON document and nothing else; progress and Ansible's warnings go to standard error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json as json_format
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import fabric
from invoke.exceptions import Exit

from diagnostics import calibrate as calibration
from diagnostics import prompts as prompt_files
from diagnostics import render
from diagnostics.arms import NAMES, parse_names
from diagnostics.arms import arms as make_arms
from diagnostics.compare import Bench, Comparison
from diagnostics.compare import compare as run_compare
from diagnostics.connect import HostUnreachable, connect, tunnel
from diagnostics.deployment import read_deployment, read_document, read_keys
from diagnostics.doctor import doctor as host_doctor
from diagnostics.fanout import Entry, Interruptible, on_each
from diagnostics.inventory import Host, UsageError, load_hosts
from diagnostics.journal import journal
from diagnostics.limits import LoadLimits
from diagnostics.load import Plan
from diagnostics.load import load as run_load
from diagnostics.noise import LEAST_ROUNDS
from diagnostics.options import integer, integers, load_plan, number, positive, time_span
from diagnostics.profile_store import store
from diagnostics.proof import verdict, verify
from diagnostics.report import runs
from diagnostics.server import Endpoint
from diagnostics.smoke import DEFAULT_ACCEPT_LENGTH_FLOOR
from diagnostics.smoke import smoke as run_smoke
from diagnostics.status import status as read_status

SUCCESS, FAILURE, USAGE, UNKNOWN = 0, 1, 2, 3

PROOF_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 15.0  # for each step of reaching a host: login, one command, the tunnel

# What an option means wherever a task has it and says nothing else of it.
OPTIONS = {
    "limit": "only these hosts (a pattern of Ansible's: names, groups, wildcards, '!' to leave out)",
    "inventory": "inventory file or folder, may be repeated (default: what ansible.cfg names)",
    "json": "print one JSON document and nothing else",
    "prompts": "prompts of your own, one JSON object a line (docs/diagnostics.md)",
    "seed": "order of the prompts",
    "timeout": "seconds that each request may take",
}

Task = TypeVar("Task", bound=Callable[..., None])


def diagnostic_task(schema: str, **help_texts: str) -> Callable[[Task], Task]:
    """Make a Fabric task whose wrong use is told in one sentence (with ``--json``: in a document) and exits with 2.

    Its help names the default of each option that has one.
    """

    def decorate(function: Task) -> Task:
        told = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if (text := help_texts.get(name, OPTIONS.get(name))) is not None:
                told[name] = f"{text} (default {parameter.default})" if isinstance(parameter.default, str) else text

        @functools.wraps(function)
        def guarded(context: fabric.Connection, **options: Any) -> None:
            if isinstance(sys.stdout, io.TextIOWrapper):  # a log or an answer may hold what no encoding can print
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                function(context, **options)
            except UsageError as error:
                if options.get("json"):
                    print_json({"schema": schema, "ok": False, "error": str(error), "hosts": []})
                raise Exit(f"usage: {error}", USAGE) from error

        made: Task = fabric.task(help=told, iterable=["inventory"], auto_shortflags=False)(guarded)
        return made

    return decorate


def print_json(document: dict[str, Any]) -> None:
    """Print *document* as the only thing on standard output."""
    json_format.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    print()


def finish(schema: str, entries: Sequence[Entry], as_json: bool, show: Callable[[Sequence[Entry]], None]) -> NoReturn:
    """Print the outcome and end the task: 0 when every host is ok, 3 when nothing but invalid figures is wrong."""
    ok = all(entry["ok"] for entry in entries)
    failed = any(not entry["ok"] and entry["reasons"] != entry.get("invalid") for entry in entries)
    if as_json:
        print_json({"schema": schema, "ok": ok, "hosts": list(entries)})
    else:
        show(entries)
    raise Exit(code=SUCCESS if ok else FAILURE if failed else UNKNOWN)


def with_server(host: Host, work: Callable[[Endpoint], Entry]) -> Entry:
    """Run *work* with the endpoint of the server of *host*'s active deployment, reached through a tunnel.

    What the tunnel could not do is named, because it explains what the server is blamed for.
    """
    with connect(host, REACH_TIMEOUT_S) as connection:
        deployment = read_deployment(connection, host, REACH_TIMEOUT_S)
        keys = read_keys(connection, host, deployment, REACH_TIMEOUT_S)
    with tunnel(host, deployment.address, deployment.port, REACH_TIMEOUT_S) as opened:
        entry = {
            "deployment": deployment.id,
            "simulation": deployment.simulation,
            **work(Endpoint(opened.socket, keys.get("api-key"), keys.get("admin-api-key"))),
        }
        if (reason := opened.failure()) is not None:
            entry |= {"ok": False, "reasons": [*entry["reasons"], reason]}
        return entry


@diagnostic_task(
    "specgate.smoke/1",
    accept_length_floor="accept length that must be exceeded where the server speculates",
)
def smoke(
    context: fabric.Connection,
    *,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
    accept_length_floor: str = f"{DEFAULT_ACCEPT_LENGTH_FLOOR:g}",
    timeout: str = "60",
) -> None:
    """Send one real chat request to each host and check the answer and the accept length."""
    floor = number("accept-length-floor", accept_length_floor, minimum=0, unit="tokens")
    seconds = number("timeout", timeout, minimum=1, unit="seconds")
    hosts = load_hosts(inventory, limit)

    def work(host: Host) -> Entry:
        return with_server(host, lambda endpoint: asyncio.run(run_smoke(endpoint, floor=floor, timeout=seconds)))

    finish("specgate.smoke/1", on_each(hosts, work), json, render.smoke)


@diagnostic_task(
    "specgate.load/1",
    concurrency="requests in flight at any time, on each host (default 10)",
    rate="requests a second instead, on average (Poisson arrivals), however many are in flight",
    requests="how many requests to send (default: five times the concurrency, or thirty seconds of the rate)",
    duration="send for so many seconds instead",
    warm_up="requests sent before, not measured (default: the concurrency; with --rate 4)",
    seed="order of the prompts, and the arrivals of --rate",
    expect_transitions="fail unless the gate closed during the load and opened again",
    max_errors="fail when more requests than this get no answer",
    ttft_p95_limit="fail when the 95th percentile of the time to the first token exceeds so many seconds",
    throughput_loss_limit="also measure the gate held open and held closed; fail when the gate's own throughput is "
    "below the better one by more than so many per cent",
)
def load(
    context: fabric.Connection,
    *,
    concurrency: str | None = None,
    rate: str | None = None,
    requests: str | None = None,
    duration: str | None = None,
    warm_up: str | None = None,
    seed: str = "0",
    prompts: str | None = None,
    timeout: str = "120",
    expect_transitions: bool = False,
    max_errors: str = "0",
    ttft_p95_limit: str | None = None,
    throughput_loss_limit: str | None = None,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Send real prompts at a concurrency or a rate; count every request, measure latencies, watch the gate.

    Exit status: 0 the limits were kept, 1 they were not, 2 wrong use, 3 the client was too slow to tell.
    """
    plan = load_plan(
        concurrency=concurrency,
        rate=rate,
        requests=requests,
        duration=duration,
        warm_up=warm_up,
        seed=integer("seed", seed, minimum=0),
        timeout=number("timeout", timeout, minimum=1, unit="seconds"),
        expect_transitions=expect_transitions,
        limits=LoadLimits(
            errors=integer("max-errors", max_errors, minimum=0),
            ttft_p95=positive("ttft-p95-limit", ttft_p95_limit, unit="seconds"),
            throughput_loss=positive("throughput-loss-limit", throughput_loss_limit, unit="per cent", maximum=100),
        ),
    )
    chosen = prompt_files.order(prompt_files.load_prompts(Path(prompts or prompt_files.SHIPPED)), plan.seed)
    hosts = load_hosts(inventory, limit)
    interruptible = Interruptible()

    with render.Progress(hosts, plan) as progress:

        def work(host: Host) -> Entry:
            def measure(endpoint: Endpoint) -> Entry:
                return interruptible.run(run_load(endpoint, plan, chosen, progress.counter(host)))

            return with_server(host, measure)

        entries = on_each(hosts, work, interruptible=interruptible)
    finish("specgate.load/1", entries, json, render.load)


@diagnostic_task(
    calibration.SCHEMA,
    budget="how long it may measure, such as 90s or 1h",
    batches="numbers of requests to measure, comma-separated (default: powers of two up to what the server runs)",
    contexts="tokens of each request to measure, comma-separated (default: 512 and its multiples by four)",
    prompts="the prompts whose acceptance counts, one JSON object a line (docs/diagnostics.md)",
)
def calibrate(
    context: fabric.Connection,
    *,
    budget: str = "5m",
    batches: str | None = None,
    contexts: str | None = None,
    prompts: str | None = None,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Measure when speculation pays on each host, recommend a threshold, and store the host's profile there.

    The server must be idle; its gate is held open and closed in turns, and is afterwards as it was.
    """
    seconds = time_span("budget", budget)
    at_batches = integers("batches", batches, minimum=1) if batches is not None else None
    at_contexts = integers("contexts", contexts, minimum=1) if contexts is not None else None
    chosen = prompt_files.order(prompt_files.load_prompts(Path(prompts or prompt_files.SHIPPED)), 0)
    hosts = load_hosts(inventory, limit)
    interruptible = Interruptible()

    with render.CalibrationProgress(hosts) as progress:

        def measure(host: Host, endpoint: Endpoint) -> Entry:
            return interruptible.run(
                calibration.calibrate(
                    endpoint,
                    chosen,
                    budget=seconds,
                    batches=at_batches,
                    contexts=at_contexts,
                    on_progress=progress.of(host),
                )
            )

        def work(host: Host) -> Entry:
            entry = with_server(host, lambda endpoint: measure(host, endpoint))
            if entry["ok"]:
                entry["stored"] = store(host, entry["profile"], REACH_TIMEOUT_S)
            return entry

        entries = on_each(hosts, work, interruptible=interruptible)
    finish(calibration.SCHEMA, entries, json, render.calibration)


@diagnostic_task("specgate.status/1", timeout="seconds that each step may take on a host")
def status(
    context: fabric.Connection,
    *,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
    timeout: str = "10",
) -> None:
    """Show unit, deployment, threshold, gate, requests and GPUs of each host."""
    seconds = number("timeout", timeout, minimum=1, unit="seconds")
    entries = on_each(load_hosts(inventory, limit), lambda host: read_status(host, seconds))
    finish("specgate.status/1", entries, json, render.status)


@diagnostic_task(
    "specgate.logs/1",
    lines="how many of the last lines",
    grep="only lines that match this regular expression",
    follow="go on with new lines until Ctrl-C",
    timeout="seconds that reading may take",
)
def logs(
    context: fabric.Connection,
    *,
    lines: str = "50",
    grep: str | None = None,
    follow: bool = False,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
    timeout: str = "30",
) -> None:
    """Print the journal of the service's running invocation."""
    if follow and json:
        raise UsageError("--follow and --json are both given; a document has an end: leave one of them out")
    count = integer("lines", lines, minimum=1)
    seconds = number("timeout", timeout, minimum=1, unit="seconds")
    hosts = load_hosts(inventory, limit)

    def work(host: Host) -> Entry:
        seen: list[str] = []
        # A followed journal is shown as it comes; otherwise hosts are shown one after the other.
        on_line = render.line_printer(host, len(hosts)) if follow else seen.append
        journal(host, on_line, lines=count, pattern=grep, follow=follow, timeout=seconds)
        return {"ok": True, "reasons": [], "lines": seen}

    finish("specgate.logs/1", on_each(hosts, work), json, render.logs)


@diagnostic_task(
    verdict.SCHEMA,
    save="folder to write the evidence to, one file per host",
    evidence="judge the evidence in this folder (written by --save) and no host",
    log="judge this log alone (plain, gzip or zstd): it can refute, but never prove",
    timeout="seconds that a host may take",
    without_speculation="prove that the release serves without speculation, as some arms of fab compare do",
)
def verify_worker(
    context: fabric.Connection,
    *,
    save: str | None = None,
    evidence: str | None = None,
    log: str | None = None,
    timeout: str = "60",
    without_speculation: bool = False,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Prove that the serving processes run the patched file, in the worker that the configuration selects.

    Exit status: 0 proved, 1 refuted, 3 unknown, 2 wrong use.
    """
    if sum(given is not None for given in (save, evidence, log)) > 1:
        raise UsageError("allowed is one of --save, --evidence and --log: with the last two no host is asked")
    if log is not None and without_speculation:
        raise UsageError("--log and --without-speculation are both given; a log alone cannot prove: leave one out")
    seconds = number("timeout", timeout, minimum=1, unit="seconds")
    if log is not None:
        verdicts = verify.from_log(Path(log))
    elif evidence is not None:
        verdicts = verify.from_folder(Path(evidence), not without_speculation)
    else:
        folder = Path(save) if save is not None else None
        verdicts = verify.from_hosts(load_hosts(inventory, limit), seconds, folder, not without_speculation)
    if json:
        print_json(verdict.document(verdicts))
    else:
        verify.show(verdicts)
    raise Exit(code=verify.exit_status(verdicts))


@diagnostic_task(host_doctor.SCHEMA, timeout="seconds that a host may take")
def doctor(
    context: fabric.Connection,
    *,
    timeout: str = "60",
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Check each host as the deploy's preflight does: GPUs, driver, kernel, PCIe, memory, disk, port, models.

    Exit status: 0 fit, 1 a check failed or a host did not answer, 3 something could not be told, 2 wrong use.
    """
    seconds = number("timeout", timeout, minimum=1, unit="seconds")
    hosts = load_hosts(inventory, limit)
    wanted = {host.name: host_doctor.expected_of(host) for host in hosts}
    entries = on_each(hosts, lambda host: host_doctor.examine(host, wanted[host.name], seconds), seconds)
    status = host_doctor.exit_status(entries)
    if json:
        print_json({"schema": host_doctor.SCHEMA, "ok": status == SUCCESS, "hosts": entries})
    else:
        host_doctor.show(entries)
    raise Exit(code=status)


@diagnostic_task(
    "specgate.comparison/1",
    arms="what to compare, the first against each other",
    concurrency="requests in flight, one or more levels",
    rounds=f"how often each arm is started and measured; fewer than {LEAST_ROUNDS} call no difference",
    requests="requests at each level (default: five times the concurrency)",
    duration="send for so many seconds at each level instead",
)
def compare(
    context: fabric.Connection,
    *,
    arms: str = ",".join(NAMES),
    concurrency: str = "1,4,10",
    rounds: str = str(LEAST_ROUNDS),
    requests: str | None = None,
    duration: str | None = None,
    seed: str = "0",
    prompts: str | None = None,
    timeout: str = "120",
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Start, prove and measure other arms than the deployed one on a host, in turns; then that one serves again.

    Takes the host out of service meanwhile: each start interrupts it. Exit status: 0 complete, 1 not, 2 wrong use,
    3 the client was too slow for some figures.
    """
    if requests is not None and duration is not None:
        raise UsageError("--requests and --duration are both given; allowed is one of them")
    levels = integers("concurrency", concurrency, minimum=1)
    plan = Plan(
        requests=integer("requests", requests, minimum=1) if requests is not None else None,
        duration=number("duration", duration, minimum=1, unit="seconds") if duration is not None else None,
        seed=integer("seed", seed, minimum=0),
        timeout=number("timeout", timeout, minimum=1, unit="seconds"),
    )
    names = parse_names(arms)
    turns = integer("rounds", rounds, minimum=1)
    chosen = prompt_files.load_prompts(Path(prompts or prompt_files.SHIPPED))
    host, *others = load_hosts(inventory, limit)
    if others:
        several = ", ".join(found.name for found in (host, *others))
        raise UsageError(f"a comparison takes one host out of service, and here are {several}; choose with --limit")
    try:
        with connect(host, REACH_TIMEOUT_S) as connection:
            deployment = read_document(connection, host, REACH_TIMEOUT_S)
    except HostUnreachable as error:
        unreached: Entry = {"host": host.name, "ok": False, "reasons": [str(error)]}
        finish("specgate.comparison/1", [unreached], json, render.compare)
    comparison = Comparison(arms=make_arms(names, deployment), levels=levels, rounds=turns, load=plan)

    def prove(speculation: bool) -> tuple[str, str, str | None]:
        (found,) = verify.from_hosts([host], PROOF_TIMEOUT_S, speculation=speculation)
        return found.verdict, found.reason, found.worker

    bench = Bench(host, inventory or (), prove, lambda work: with_server(host, work))
    with render.Steps(comparison, deployment) as steps:
        entry = {"host": host.name} | run_compare(bench, comparison, deployment, chosen, steps.next)
    document = {"schema": "specgate.comparison/1", "ok": entry["ok"], "hosts": [entry]}
    # Kept for the report, which shows the latest comparison beside the deploy.
    runs.save(document, "compare", host.name, host.reports)
    finish("specgate.comparison/1", [entry], json, render.compare)


@diagnostic_task(
    "specgate.report/1",
    from_="folder of the documents, <host>/<UTC time>/<task>.json (default: acceptance_reports)",
    output="path of the page; the JSON behind it is written beside it (default: in the folder, named after the time)",
)
def report(
    context: fabric.Connection,
    *,
    from_: str | None = None,
    output: str | None = None,
    limit: str | None = None,
    inventory: Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Write one page about deployed hosts from the documents that their deploys left; no host is asked.

    Exit status: 0 when the page is written, whatever it says; 2 wrong use.
    """
    # Not at the top: matplotlib takes a second to import.
    from diagnostics.report import page

    # With a folder given the documents may be another's: hosts need not be in an inventory.
    hosts = load_hosts(inventory, limit) if from_ is None or limit is not None else []
    root = Path(from_) if from_ is not None else hosts[0].reports
    found = runs.read_runs(root, [host.name for host in hosts] or None)
    path, facts = page.write(found, root, Path(output) if output is not None else None)
    if json:
        print_json(facts | {"html": str(path.resolve())})
    else:
        render.report(facts, path.resolve())
    raise Exit(code=SUCCESS)
