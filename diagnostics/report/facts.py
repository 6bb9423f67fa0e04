"""Documents -> what the page says: the verdict first, then figures, each with its unit and where it came from.

Pure functions; no input or output. What was not run is said to be so, and is never a success.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from diagnostics.report.runs import Run

SCHEMA = "specgate.report/1"

Facts = dict[str, Any]
Row = dict[str, Any]

STATES = ("failed", "unknown", "partial", "good")
"""Verdicts on a host, the worst first. partial: deployed and proved, but not all was tested."""

TESTS = {"smoke": "smoke test", "load": "load test"}
SPECULATION = (
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)


def report(runs: Mapping[str, Sequence[Run]], made: str) -> Facts:
    """The ``specgate.report/1`` document over the runs of each host; *made* is the time (UTC, ISO 8601)."""
    hosts = [host_facts(name, found) for name, found in runs.items()]
    hosts.sort(key=lambda host: STATES.index(host["state"]))
    state = hosts[0]["state"]
    return {
        "schema": SCHEMA,
        "made": made,
        "ok": state == "good",
        "state": state,
        "headline": _headline(hosts),
        "reasons": hosts[0]["reasons"] if len(hosts) == 1 else list(_first_reasons(hosts)),
        "hosts": hosts,
    }


def _first_reasons(hosts: Sequence[Facts]) -> Iterator[str]:
    for host in hosts:
        if host["state"] != "good":
            yield ": ".join((host["host"], host["headline"], *host["reasons"][:1]))


def _headline(hosts: Sequence[Facts]) -> str:
    if len(hosts) == 1:
        return f"{hosts[0]['host']}: {hosts[0]['headline']}"
    good = sum(host["state"] == "good" for host in hosts)
    if good == len(hosts):
        return f"All {good} hosts are deployed, proved and tested"
    others = ", ".join(host["host"] for host in hosts if host["state"] != "good")
    return f"{good} of {len(hosts)} hosts are deployed, proved and tested; look at {others}"


def host_facts(name: str, runs: Sequence[Run]) -> Facts:
    """What the page says about one host: of its last deploy, and of its latest comparison and profile."""
    deploys = [run for run in runs if run.is_deploy]
    run = deploys[-1] if deploys else runs[-1]
    compared, profiled = _latest(runs, "compare"), _latest(runs, "profile")
    shown = {found.folder: found for found in (run, compared, profiled) if found is not None}
    state, headline, reasons = verdict(run)
    return {
        "host": name,
        "state": state,
        "headline": headline,
        "reasons": reasons,
        "time": run.time.isoformat(),
        "engine": engine_note(run),
        "figures": list(figures(run)),
        "deployed": list(deployed(run)),
        "arguments": dict(run.content("deployment").get("server_arguments") or {}),
        "proof": dict(run.entry("verify-worker")) or None,
        "smoke": dict(run.entry("smoke")) or None,
        "load": dict(run.entry("load")) or None,
        "comparison": _with_origin(compared, "compare", compared.entry("compare")) if compared else None,
        "profile": _with_origin(profiled, "profile", profiled.content("profile")) if profiled else None,
        "changes": changes(run, deploys),
        "origins": {task: origin(run, task) for task in ("deployment", "verify-worker", "smoke", "load")},
        "sources": [source for found in shown.values() for source in sources(found)],
    }


def _latest(runs: Sequence[Run], name: str) -> Run | None:
    return next((run for run in reversed(runs) if run.content(name)), None)


def _with_origin(run: Run, name: str, content: Mapping[str, Any]) -> Facts:
    return {"time": run.time.isoformat(), "source": origin(run, name), "document": dict(content)}


def origin(run: Run, name: str) -> str:
    """Where a figure came from: the document's file below the folder of reports."""
    return f"{run.host}/{run.folder.name}/{name}.json"


def verdict(run: Run) -> tuple[str, str, list[str]]:
    """The state of a host (one of STATES), a sentence, and the reasons for anything but success."""
    outcome, proof = run.content("outcome"), run.entry("verify-worker")
    unusable = [f"{found.path.name} {found.problem}" for found in run.documents.values() if found.problem]
    if run.is_deploy and outcome and not outcome.get("ok"):
        return "failed", "the deploy FAILED", [*_texts(outcome, "reason"), *unusable]
    failed = [TESTS[name] for name in TESTS if run.entry(name) and not run.entry(name).get("ok")]
    if proof.get("verdict") == "refuted":
        return "failed", "REFUTED: what serves is not what was deployed", [*_texts(proof, "reason"), *unusable]
    if failed:
        reasons = [f"{TESTS[name]}: {text}" for name in TESTS for text in run.entry(name).get("reasons", [])]
        return "failed", f"the {' and the '.join(failed)} FAILED", [*reasons, *unusable]
    if run.is_deploy and not outcome:
        return "unknown", "the deploy did not end, or has not yet", ["it left no outcome.json", *unusable]
    if not proof:
        return "unknown", "NOT PROVED: verify-worker was not run", unusable
    if proof.get("verdict") != "proved":
        return "unknown", "NOT PROVED", [*_texts(proof, "reason"), *unusable]
    missing = [text for name, text in TESTS.items() if not run.entry(name)]
    if unusable or missing:
        said = "deployed and proved" + (f"; not run: {', '.join(missing)}" if missing else "")
        return "partial", said, unusable
    return "good", "deployed, proved and tested", []


def _texts(document: Mapping[str, Any], key: str) -> list[str]:
    """The lines of a text that may hold several."""
    return [line.strip() for line in str(document.get(key) or "no reason given").splitlines() if line.strip()]


def engine_note(run: Run) -> str | None:
    """What must be known of the machine before any figure is read: the CPU engine, and figures that are simulated."""
    cpu = bool(run.content("run").get("cpu_engine"))
    simulation = run.content("deployment").get("simulation") or {}
    if not cpu and not simulation:
        return None
    engine = "CPU engine, no GPU. " if cpu else ""
    settings = ", ".join(f"{name}={value}" for name, value in sorted(simulation.items()))
    simulated = f"The server simulates another machine: {settings}. " if simulation else ""
    return f"{engine}{simulated}No figure on this page is that of a real deployment on a GPU."


def figures(run: Run) -> Iterator[Row]:
    """The figures to see first: name, value, unit and origin; a value of None was not measured."""
    smoke, load = run.entry("smoke"), run.entry("load")
    plan = load.get("plan") or {}
    at = f" at C={plan['concurrency']}" if plan.get("concurrency") else ""
    at = f" at {plan['rate']:g} requests/s" if plan.get("rate") else at
    gate = load.get("gate") or {}
    steps = (gate.get("open_steps") or 0) + (gate.get("closed_steps") or 0)

    def row(label: str, value: Any, unit: str, name: str) -> Row:
        return {"label": label, "value": value, "unit": unit, "source": origin(run, name) if run.entry(name) else None}

    requests = load.get("requests") or {}
    yield row("requests answered", requests.get("answered"), f"of {requests.get('sent', '-')}", "load")
    yield row(f"throughput{at}", load.get("output_tokens_per_s"), "tok/s", "load")
    yield row(f"first token{at}, p95", _percentile(load, "time_to_first_token_s", 1000), "ms", "load")
    yield row(f"between tokens{at}, p95", _percentile(load, "inter_token_s", 1000), "ms", "load")
    yield row("accept length, one request", smoke.get("accept_length"), "tokens per verify step", "smoke")
    yield row("gate closed", 100 * gate["closed_steps"] / steps if steps else None, f"% of {steps} steps", "load")


def _percentile(figures: Mapping[str, Any], name: str, factor: float, quantile: str = "p95") -> float | None:
    value = (figures.get(name) or {}).get(quantile)
    return None if value is None else value * factor


def deployed(run: Run) -> Iterator[Row]:
    """What was deployed, as names and values; from the host's own deployment.json."""
    document = run.content("deployment")
    if not document:
        return
    arguments = document.get("server_arguments") or {}
    profile = arguments.get("speculative-gate-profile")
    threshold = document.get("threshold")
    gate = f"closes at {threshold} running requests" if threshold else f"by profile {profile}" if profile else "off"
    rows = {
        "deployment": document.get("id"),
        "release": document.get("release"),
        "SGLang": document.get("sglang_version"),
        "patch series": document.get("series") or "none",
        "worker that runs": run.entry("verify-worker").get("worker"),
        "gate": gate,
        "model": arguments.get("model-path"),
        "draft model": arguments.get("speculative-draft-model-path"),
        "speculation": ", ".join(f"{name.removeprefix('speculative-')} {arguments[name]}" for name in SPECULATION
                                 if name in arguments) or "none",
        "tensor-parallel ranks": document.get("tp_size"),
        "listens on": f"{document.get('address')}:{document.get('port')} of the host",
    }  # fmt: skip
    for name, value in rows.items():
        if value is not None:
            yield {"name": name, "value": value}


def changes(run: Run, deploys: Sequence[Run]) -> Facts | None:
    """What differs from the last deploy before *run* that succeeded; None where there was none."""
    earlier = [found for found in deploys if found.time < run.time and found.content("outcome").get("ok")]
    if not earlier:
        return None
    before = earlier[-1]
    rows = [
        {"name": name, "before": then, "now": now}
        for name, then, now in _differences(_settings(before), _settings(run))
    ]
    pairs = zip(figures(before), figures(run), strict=True)
    return {
        "since": before.time.isoformat(),
        "source": ", ".join(f"{found.host}/{found.folder.name}" for found in (before, run)),
        "settings": rows if run.content("deployment") else None,
        "figures": [
            {"label": now["label"], "unit": now["unit"], "before": then["value"], "now": now["value"]}
            for then, now in pairs
            if then["label"] == now["label"] and None not in (then["value"], now["value"])
        ],
    }


def _settings(run: Run) -> dict[str, Any]:
    document = run.content("deployment")
    own = {"deployment": document.get("id")}
    own |= {name: document.get(name) for name in ("release", "sglang_version", "series")}
    arguments = {f"--{name}": value for name, value in (document.get("server_arguments") or {}).items()}
    return own | arguments | dict(document.get("simulation") or {})


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield name, before.get(name), now.get(name)


def sources(run: Run) -> Iterator[Row]:
    """The documents of *run*, with what identifies them."""
    for name, found in run.documents.items():
        yield {
            "document": origin(run, name),
            "schema": found.content.get("schema"),
            "sha256": found.sha256,
            "problem": found.problem,
        }
