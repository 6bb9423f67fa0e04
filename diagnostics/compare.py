"""The comparison of arms on one host: each is started, proved, measured and stopped by the same code, in turns.

Starting an arm is what a deploy does with a deployment (``playbooks/activate.yml``), the proof is ``verify-worker``'s,
and the measurement ``fab load``'s. Whatever happens, the deployment that served before is active again at the end, and
is proved to be; what was written for the arms is then removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diagnostics.arms import GATED, PROFILE, Arm, own_arguments
from diagnostics.connect import HostUnreachable
from diagnostics.inventory import REPOSITORY, Host
from diagnostics.load import Plan
from diagnostics.load import load as run_load
from diagnostics.noise import difference
from diagnostics.prompts import Prompt, order
from diagnostics.server import Endpoint

Entry = dict[str, Any]

FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "output_tokens_per_s": lambda measured: measured["output_tokens_per_s"],
    "time_to_first_token_p95_s": lambda measured: (measured["time_to_first_token_s"] or {}).get("p95"),
    "inter_token_p95_s": lambda measured: (measured["inter_token_s"] or {}).get("p95"),
    "end_to_end_p95_s": lambda measured: (measured["end_to_end_s"] or {}).get("p95"),
    "accept_length": lambda measured: measured["accept_length"],
}
"""The figures of a comparison's summary, out of what a load measured."""

KEPT = (
    "requests",
    "elapsed_s",
    "output_tokens",
    "output_tokens_per_s",
    "accept_length",
    "time_to_first_token_s",
    "inter_token_s",
    "end_to_end_s",
    "client",
)

STOP_WAIT_S = 20.0


class ArmFailed(Exception):
    """An arm could not be started, proved or measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare: in each of ``rounds``, each arm at each concurrency of ``levels``, with ``load`` as the plan."""

    arms: Sequence[Arm]
    levels: Sequence[int]
    rounds: int
    load: Plan

    def turns(self) -> Iterator[tuple[int, Arm]]:
        """Round (from 1) and arm, in order: each round begins with another arm, so that none always comes first."""
        for number in range(self.rounds):
            first = number % len(self.arms)
            for arm in (*self.arms[first:], *self.arms[:first]):
                yield number + 1, arm


class Bench:
    """What a comparison does to one host; the tests put another in its place."""

    def __init__(
        self,
        host: Host,
        inventories: Sequence[str],
        prove: Callable[[bool], tuple[str, str, str | None]],
        with_server: Callable[[Callable[[Endpoint], Entry]], Entry],
    ) -> None:
        self._host, self._inventories, self._prove, self._with_server = host, inventories, prove, with_server
        self._written: list[str] = []

    def write(self, arms: Sequence[Arm], deployment: Mapping[str, Any]) -> dict[str, str]:
        """Write the arms' deployments on the host; returns their ids by name. What serves is not touched.

        Raises ArmFailed when the inventory does not give the deployment that serves any more: then an arm would differ
        from it by more than its speculation.
        """
        profile = deployment.get("profile")
        serving = {
            "name": GATED,
            "threshold": deployment["threshold"],
            "profile": {"id": profile, "path": deployment["server_arguments"][PROFILE]} if profile else {},
            "server_arguments": own_arguments(deployment["server_arguments"]),
        }
        others = [
            {"name": arm.name, "threshold": 0, "profile": {}, "server_arguments": arm.server_arguments}
            for arm in arms
            if arm.server_arguments is not None
        ]
        wanted = {
            "release": {
                "id": deployment["release"],
                "path": deployment["release_path"],
                "sglang_version": deployment["sglang_version"],
                "series": deployment["series"],
                "commit": deployment.get("commit") or "",
            },
            "address": deployment["address"],
            "port": deployment["port"],
            "arms": [serving, *others],
        }
        with tempfile.TemporaryDirectory(prefix="specgate-") as folder:
            given, found = Path(folder, "arms.json"), Path(folder, "ids.json")
            given.write_text(json.dumps(wanted), encoding="utf-8")
            self._play("arms.yml", arms_file=str(given), arms_ids=str(found))
            written = json.loads(found.read_text(encoding="utf-8"))
        ids: dict[str, str] = written["ids"]
        self._written = written["new"]
        if ids[GATED] != deployment["id"]:
            raise ArmFailed(
                f"{deployment['id']} serves, but the inventory gives {ids[GATED]} by now: its environment or another "
                "setting was changed, or given with -e. Deploy from the inventory first, so that the arms differ by "
                "their speculation alone"
            )
        return ids

    def remove(self) -> None:
        """Remove the deployments that ``write`` made, except those that were there before; raises ArmFailed."""
        if self._written:
            self._play("remove_arms.yml", arms_written=self._written)

    def activate(self, deployment_id: str) -> None:
        """Make *deployment_id* serve and wait until it is ready; raises ArmFailed."""
        self._play("activate.yml", service_deployment_id=deployment_id)

    def prove(self, speculation: bool) -> tuple[str, str, str | None]:
        """Return verify-worker's verdict, its sentence and the worker that runs (None: no speculation)."""
        return self._prove(speculation)

    def measure(self, plan: Plan, prompts: Sequence[Prompt]) -> Entry:
        """Return the entry of ``fab load`` for *plan*."""
        try:
            return self._with_server(lambda endpoint: asyncio.run(run_load(endpoint, plan, prompts)))
        except HostUnreachable as error:
            raise ArmFailed(str(error)) from error

    def _play(self, playbook: str, **variables: str | list[str]) -> None:
        """Run a playbook for this host; raises ArmFailed with what it said.

        In a session of its own, so that Ctrl-C reaches this process alone, which then ends it and goes back.
        """
        command = [str(Path(sys.executable).with_name("ansible-playbook")), f"playbooks/{playbook}"]
        command += [f"--inventory={source}" for source in self._inventories]
        command += ["--limit", self._host.name, "--extra-vars", json.dumps(variables)]
        environment = os.environ | {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")}
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate()
            except BaseException:
                # Its workers too: none may go on activating an arm while the way back is gone.
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.communicate(timeout=STOP_WAIT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != 0:
            said = output[output.find("fatal:") :] if "fatal:" in output else output[-2000:]
            raise ArmFailed(f"{playbook} failed: {said.partition('PLAY RECAP')[0].strip()}")


def compare(
    bench: Bench,
    comparison: Comparison,
    deployment: Mapping[str, Any],
    prompts: Sequence[Prompt],
    on_step: Callable[[str], None] = lambda text: None,
) -> Entry:
    """Run *comparison*; the entry is ok when every arm was proved and measured, and the former deployment is back.

    *deployment* is the active one (``deployment.json``). *on_step* is told what is done next, once for each start and
    each level. Ctrl-C, SIGTERM and SIGHUP end it early; they cannot end the way back. A measurement that the client was
    too slow for is told (``invalid``) and left out of the figures.
    """
    facts: Entry = {
        "former": {"id": deployment["id"], "threshold": deployment["threshold"], "profile": deployment.get("profile")},
        "simulation": dict(deployment.get("simulation") or {}),
        "plan": {
            "arms": [arm.name for arm in comparison.arms],
            "concurrency": list(comparison.levels),
            "rounds": comparison.rounds,
            "load": asdict(comparison.load),
        },
        "arms": [],
        "measurements": [],
        "invalid": [],
    }
    reasons: list[str] = []
    try:
        with _one_interrupt():
            _measure(bench, comparison, deployment, prompts, on_step, facts=facts)
    except ArmFailed as error:
        reasons.append(str(error))
    except KeyboardInterrupt:
        reasons.append(f"interrupted after {len(facts['measurements'])} measurements")
    with _undisturbed():
        on_step(f"back to the former deployment {deployment['id']}")
        facts["restored"], problem = _restored(bench, deployment)
        if problem is None:
            try:
                bench.remove()
            except ArmFailed as error:
                problem = f"the deployments of the arms are still there: {error}"
    reasons += [*facts["invalid"], *([problem] if problem else [])]
    valid = [found for found in facts["measurements"] if found["valid"]]
    return facts | {
        "summary": summarise(valid),
        "differences": differences(valid, [arm.name for arm in comparison.arms]),
        "ok": not reasons,
        "reasons": reasons,
    }


def _measure(
    bench: Bench,
    comparison: Comparison,
    deployment: Mapping[str, Any],
    prompts: Sequence[Prompt],
    on_step: Callable[[str], None],
    *,
    facts: Entry,
) -> None:
    """Fill *facts* as far as it goes; raises ArmFailed."""
    ids = bench.write(comparison.arms, deployment)
    described: dict[str, Entry] = {
        arm.name: {
            "name": arm.name,
            "what": arm.what,
            "deployment": ids[arm.name],
            "proof": "not started",
            "starts_s": [],
        }
        for arm in comparison.arms
    }
    facts["arms"] = list(described.values())
    for number, arm in comparison.turns():
        where = f"round {number} of {comparison.rounds}, arm {arm.name}"
        on_step(f"{where}: starting")
        began = time.monotonic()
        bench.activate(ids[arm.name])
        described[arm.name]["starts_s"].append(round(time.monotonic() - began, 1))
        described[arm.name]["proof"] = _proved(bench, arm)
        for level in comparison.levels:
            on_step(f"{where}: C={level}")
            plan = replace(comparison.load, concurrency=level, warm_up=level)
            if plan.duration is None and plan.requests is None:
                plan = replace(plan, requests=5 * level)
            # Another order of the prompts in each round, and the same for all arms.
            entry = bench.measure(plan, order(prompts, comparison.load.seed + number))
            problem = f"{where}, C={level}: {'; '.join(entry['reasons'])}"
            if not entry["ok"] and entry["reasons"] != entry.get("invalid"):
                raise ArmFailed(problem)
            facts["invalid"] += [] if entry["ok"] else [problem]
            measured = {name: entry[name] for name in KEPT} | {"gate": _gate(entry.get("gate")), "valid": entry["ok"]}
            facts["measurements"].append({"round": number, "arm": arm.name, "concurrency": level, **measured})


def _gate(gate: Mapping[str, Any] | None) -> Entry | None:
    names = ("transitions", "open_steps", "closed_steps")
    return {name: gate.get(name) for name in names} if gate else None


def _proved(bench: Bench, arm: Arm) -> str:
    """Prove that *arm* serves; raises ArmFailed for anything else than proved, and for another worker."""
    verdict, reason, worker = bench.prove(arm.worker is not None)
    if verdict != "proved":
        raise ArmFailed(f"arm {arm.name} is not proved ({verdict}): {reason}")
    if arm.worker is not None and worker != arm.worker:
        raise ArmFailed(f"arm {arm.name} runs {worker}, and {arm.worker} was meant")
    return f"{verdict}: {reason}"


def _restored(bench: Bench, deployment: Mapping[str, Any]) -> tuple[Entry, str | None]:
    """Activate and prove the former deployment; returns what is known of it, and what is wrong."""
    speculates = "speculative-algorithm" in deployment["server_arguments"]
    by_hand = f"ansible-playbook playbooks/rollback.yml -e rollback_to={deployment['id']}"
    try:
        bench.activate(str(deployment["id"]))
        verdict, reason, _ = bench.prove(speculates)
    except (ArmFailed, HostUnreachable) as error:
        found = {"deployment": deployment["id"], "proof": "unknown"}
        return found, f"GOING BACK FAILED, the former deployment does not serve: {error}; by hand: {by_hand}"
    found = {"deployment": deployment["id"], "proof": f"{verdict}: {reason}"}
    if verdict != "proved":
        return found, f"the former deployment is active again but not proved ({verdict}): {reason}"
    return found, None


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let the ends that a shell or a lost terminal sends count as Ctrl-C. The first begins the way back."""

    def interrupt(number: int, frame: object) -> None:
        for end in ENDS:
            signal.signal(end, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handlers(dict.fromkeys(ENDS, interrupt)):
        yield


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Going back is not interrupted half-way."""
    with _handlers(dict.fromkeys(ENDS, signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def _handlers(wanted: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summarise(measurements: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Each arm's figures at each concurrency over the rounds: ``{"median", "min", "max", "rounds"}`` or None."""
    rows = []
    for level, arm in dict.fromkeys((found["concurrency"], found["arm"]) for found in measurements):
        mine = [found for found in measurements if (found["concurrency"], found["arm"]) == (level, arm)]
        rows.append(
            {"concurrency": level, "arm": arm} | {name: _spread(map(read, mine)) for name, read in FIGURES.items()}
        )
    return rows


def _spread(values: Any) -> Entry | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": len(found)}


def differences(measurements: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[Entry]:
    """The throughput of the first arm against each other, at each concurrency, over the rounds that have both."""
    rates = {(f["concurrency"], f["arm"], f["round"]): f["output_tokens_per_s"] for f in measurements}
    rows: list[Entry] = []
    for level in dict.fromkeys(found["concurrency"] for found in measurements):
        medians = {
            arm: statistics.median(found)
            for arm in arms[1:]
            if (found := [rate for (c, a, _), rate in rates.items() if (c, a) == (level, arm)])
        }
        for other in medians:
            pairs = [
                (rate, rates[level, other, number])
                for (c, arm, number), rate in rates.items()
                if (c, arm) == (level, arms[0]) and (level, other, number) in rates
            ]
            if pairs and all(rate and against for rate, against in pairs):
                told = asdict(difference([rate for rate, _ in pairs], [against for _, against in pairs]))
                best = other == max(medians, key=medians.__getitem__)
                rows.append({"concurrency": level, "arm": arms[0], "against": other, "best": best} | told)
    return rows
