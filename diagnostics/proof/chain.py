"""The links from what was claimed about a host to what was seen on it, in the order of cause and effect."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diagnostics.proof.case import Case, is_same_process
from diagnostics.proof.link import Link, State, dicts, file_name, listed, text_of
from diagnostics.proof.log_chain import log_notes
from diagnostics.proof.logs import LogFacts
from diagnostics.proof.worker import WORKER_MODULES, selected_worker, wrong_file

DEPLOYMENT_SCHEMA = "specgate.deployment/1"


THRESHOLD_OPTION = "--speculative-disable-batch-threshold"
FORCE_OPTION = "--speculative-gate-force"


NOT_ESSENTIAL = ("the owners of GPU memory",)
NOT_VISIBLE = "the server's processes cannot be seen by the login user: allow it `sudo python3` without a password"


def _complete(case: Case) -> Iterator[Link]:
    """Whether everything could be read."""
    if case.evidence.get("changed_meanwhile"):
        reason = "the service was restarted while the evidence was gathered: run fab verify-worker again"
        yield Link("evidence", "one state", "changed meanwhile", "processes", "unknown", reason)
    problems = [entry for entry in dicts(case.evidence.get("problems")) if entry["what"] not in NOT_ESSENTIAL]
    if problems:
        what, why = problems[0]["what"], problems[0]["why"]
        reason = f"{what} could not be read: {why}"
        if not case.evidence.get("privileged"):
            reason = (
                f"the login user may not use sudo, so that {what} could not be read: "
                "allow it `sudo python3` without a password, or log in as another user"
            )
        seen = f"{len(problems)} missing: {listed(entry['what'] for entry in problems)}"
        yield Link("evidence", "complete", seen, "host", "unknown", reason)


def _service(case: Case) -> Iterator[Link]:
    """Whether a server runs."""
    name, where = "service", "systemd"
    if case.unit is None:
        others = [process for process in dicts(case.evidence.get("others")) if process["role"] == "main"]
        port = case.evidence.get("service_port")
        if case.main is None and len(others) > 1 and port is None:
            pids = listed(process["pid"] for process in others)
            reason = (
                f"there is no such unit, and {len(others)} servers run (pids {pids}): name the unit by service_name, "
                "or say the server's port by service_port"
            )
            yield Link(name, "one server", f"{len(others)} servers", "processes", "unknown", reason)
            return
        if case.main is None and not _all_visible(case):
            yield Link(name, "a server", "not visible", "systemd, processes", "unknown", NOT_VISIBLE)
            return
        if case.main is None:
            server = "process of SGLang's" if port is None else f"server of SGLang's on port {port}"
            reason = f"no unit of this name and no {server}: deploy first, or set service_name"
            yield Link(name, "a server", "none", "systemd, processes", "refuted", reason)
            return
        yield Link(name, "a unit", f"process {case.main['pid']}, no unit", "processes", "not applicable")
    else:
        state = case.unit.get("ActiveState", "")
        seen = f"{state} ({case.unit.get('SubState')}) since {case.unit.get('ExecMainStartTimestamp') or '-'}"
        if state in ("activating", "deactivating", "reloading"):
            reason = f"{case.unit_name} is {state}: wait, and run fab verify-worker again"
            yield Link(name, "active", seen, where, "unknown", reason)
            return
        if state != "active":
            reason = (
                f"{case.unit_name} is {state or 'absent'} ({case.unit.get('Result')}): nothing serves; see fab logs"
            )
            yield Link(name, "active", seen, where, "refuted", reason)
            return
        if case.main is None and not _all_visible(case):
            yield Link(name, "SGLang's server", "not visible", "processes", "unknown", NOT_VISIBLE)
            return
        if case.main is None or case.main["role"] != "main":
            command = " ".join(case.options[:4]) or "nothing"
            reason = f"{case.unit_name} runs {command}, which is not SGLang's server{case.drop_in}"
            yield Link(name, "SGLang's server", command, where, "refuted", reason)
            return
        yield Link(name, "active", seen, where, "proved")


def _all_visible(case: Case) -> bool:
    """Whether a process or a unit that was not seen does not exist."""
    return bool(case.evidence.get("privileged")) and not dicts(case.evidence.get("problems"))


def _ready(case: Case) -> Iterator[Link]:
    """Whether the server has finished starting."""
    if case.main is None:
        return
    if case.start is not None and case.start.crashes and len(case.schedulers) < len(case.expected_ranks):
        reason = f"a scheduler crashed ({case.start.crashes[-1]}): see fab logs, then restart {case.unit_name}"
        yield Link("ready", "serving", "crashed", "log", "refuted", reason)
    elif not case.ready:
        age = max(0, round(case.evidence.get("collected_at", 0) - case.main.get("started_at", 0)))
        reason = (
            f"the server has not said that it is ready, {age} s after its start, and /server_info does not answer: "
            "it is still loading, or hangs; see fab logs"
        )
        yield Link("ready", "serving", f"loading for {age} s", "log, /server_info", "unknown", reason)


def _ranks(case: Case) -> Iterator[Link]:
    """Whether the scheduler of every rank lives inside the service."""
    if case.main is None:
        return
    expected = case.expected_ranks
    missing = [rank for rank in expected if rank not in case.schedulers]
    seen = listed(f"rank {rank}: pid {process['pid']}" for rank, process in sorted(case.schedulers.items()))
    claimed = f"{len(expected)} scheduler(s)"
    if not case.ranks_are_unique:
        reason = "several schedulers have the same tensor-parallel rank: data and pipeline parallelism are not examined"
        yield Link("ranks", claimed, seen, "processes", "unknown", reason)
    elif not missing:
        yield Link("ranks", claimed, seen, "processes", "proved")
    elif not case.ready:
        reason = f"the scheduler of rank {listed(missing)} has not started yet: run fab verify-worker again"
        yield Link("ranks", claimed, seen or "none", "processes", "unknown", reason)
    else:
        who = "every scheduler" if not case.schedulers else f"the scheduler of rank {listed(missing)}"
        reason = f"the main process lives but {who} is gone: nothing can be answered; restart {case.unit_name}"
        yield Link("ranks", claimed, seen or "none", "processes", "refuted", reason)


def _claim(case: Case) -> Iterator[Link]:
    """Whether the active deployment is patched, and is the one that was started."""
    where = case.evidence.get("deployment_path", "deployment.json")
    claim = case.deployment
    if claim is None:
        seen = f"series {case.series}" if case.series else "none"
        yield Link("deployment", "none: not deployed by this project", seen, where, "not applicable")
        if case.manifest is None and case.main is not None:
            reason = (
                f"there is no patch series for SGLang {case.version or 'of unknown version'} in this checkout: "
                "nothing is known that these files could be compared with"
            )
            yield Link("series", "a known series", "none", "this checkout", "unknown", reason)
        return
    if claim.get("schema") != DEPLOYMENT_SCHEMA:
        reason = f"{where} is {claim.get('schema')!r}, this version reads {DEPLOYMENT_SCHEMA}: update this checkout"
        yield Link("deployment", DEPLOYMENT_SCHEMA, str(claim.get("schema")), where, "unknown", reason)
        return
    started = case.evidence.get("started_from")
    if started is not None and started != claim.get("id"):
        reason = f"`current` is deployment {claim.get('id')}, but the service was started from {started}: restart it"
        yield Link("deployment", str(claim.get("id")), str(started), where, "refuted", reason)
    elif claim.get("series") is None:
        reason = "the active deployment is not patched: deploy with the patch"
        yield Link("deployment", "a patch series", "none", where, "refuted", reason)
    elif case.manifest is None:
        reason = "the release has no manifest of its patch series: deploy again"
        yield Link("deployment", str(claim["series"]), "no manifest", where, "unknown", reason)
    elif case.series != claim["series"]:
        reason = f"the deployment claims series {claim['series']}, its release holds {case.series}: deploy again"
        yield Link("deployment", str(claim["series"]), str(case.series), where, "refuted", reason)
    else:
        yield Link("deployment", f"{claim.get('id')}", f"series {case.series}", where, "proved")
        yield from _shipped(case)


def _shipped(case: Case) -> Iterator[Link]:
    """Whether the release's manifest is the one that this checkout ships under that name."""
    for manifest in dicts(case.evidence.get("reference")):
        if manifest.get("series") == case.series and case.manifest and manifest != case.manifest[0]:
            reason = "the manifest in the release was changed after it was installed: deploy again"
            yield Link("manifest", "as shipped", "changed", case.manifest[1], "refuted", reason)


def _program(case: Case) -> Iterator[Link]:
    """Whether the interpreter is the release's."""
    if case.main is None or case.deployment is None:
        return
    claimed, seen = str(case.deployment.get("python")), (case.options or [""])[0]
    where = f"command line of process {case.main['pid']}"
    # The release's own scripts start python3 or python3.11 beside python.
    if os.path.dirname(seen) == os.path.dirname(claimed):
        yield Link("interpreter", claimed, seen, where, "proved")
    else:
        reason = (
            f"the service runs {seen}, while the patch is in {case.deployment.get('release_path')}{case.drop_in}: "
            "start the release's interpreter, or deploy again"
        )
        yield Link("interpreter", claimed, seen, where, "refuted", reason)


def _arguments(case: Case) -> Iterator[Link]:
    """Whether the running process has the arguments that the deployment claims (the threshold is a link of its own)."""
    if case.main is None or case.deployment is None:
        return
    claimed = case.deployment.get("server_arguments")
    if not isinstance(claimed, Mapping):
        return
    where = f"command line of process {case.main['pid']}"
    for name, value in claimed.items():
        option = f"--{name}"
        seen = option_words(case.options, option)
        if option == THRESHOLD_OPTION or seen == ["***"] or seen == claimed_words(value):
            continue
        text = "absent" if seen is None else " ".join(seen) or "present"
        reason = (
            f"the process runs with {option} {text}, the deployment says {text_of(value)}{case.drop_in}: "
            f"restart {case.unit_name}, or deploy again"
        )
        yield Link("arguments", f"{option} {text_of(value)}", text, where, "refuted", reason)
        return
    options = [word.partition("=")[0] for word in case.options if word.startswith("--")]
    extra = [option for option in options if option[2:] not in claimed]
    if extra:
        reason = (
            f"the process runs with {listed(extra)}, which the deployment does not have{case.drop_in}: "
            f"restart {case.unit_name}, or deploy again"
        )
        yield Link("arguments", f"{len(claimed)} as deployed", f"also {listed(extra)}", where, "refuted", reason)
        return
    yield Link("arguments", f"{len(claimed)} as deployed", "the same", where, "proved")


def option_words(command: Sequence[str], option: str) -> list[str] | None:
    """The words that follow the last `option` in a command line; None when it is absent."""
    words: list[str] | None = None
    collecting = False
    for word in command:
        if word == option:
            words, collecting = [], True
        elif word.startswith(option + "="):
            words, collecting = [word[len(option) + 1 :]], False
        elif word.startswith("--"):
            collecting = False
        elif collecting and words is not None:
            words.append(word)
    return words


def claimed_words(value: Any) -> list[str] | None:
    """The words that the service's unit has for an argument's value; None when it leaves the option out."""
    if value is None or value is False:
        return None
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _worker(case: Case) -> Iterator[Link]:
    """Whether the patch is in the file of the worker that the configuration selects and the ranks run."""
    if case.main is None:
        return
    patched = [file["module"] for file in case.manifest[0]["files"]] if case.manifest else None
    chosen: str | None = None
    if case.arguments is None:
        reason = (
            "the server's arguments are neither in the log (rotated?) nor answered by /server_info: "
            "the worker that they select cannot be told"
        )
        yield Link(
            "worker", "the class that the arguments select", "no arguments", "log, /server_info", "unknown", reason
        )
    else:
        arguments, where = case.arguments
        try:
            chosen, why = selected_worker(arguments, case.version)
        except KeyError as error:
            reason = f"{where} does not name the argument {error}: update this checkout for SGLang {case.version}"
            yield Link("worker", "", "", where, "unknown", reason)
            return
        if not case.speculation:
            yield from _no_speculation(case, chosen, arguments, where)
            return
        if chosen is None:
            reason = (
                "this server runs without speculative decoding: there is nothing to gate; set speculative-algorithm"
            )
            yield Link("worker", "a speculative worker", "none", where, "refuted", reason)
            return
        module = WORKER_MODULES.get(chosen, chosen)
        if patched is not None and module not in patched:
            reason = wrong_file(patched, chosen, module, f", because {why}")
            seen = listed(map(file_name, patched))
            yield Link("worker", f"{chosen} in {file_name(module)}", f"patched: {seen}", where, "refuted", reason)
            return
    for rank, (identity, _, where) in sorted(case.identities.items()):
        seen = str(identity.get("worker"))
        if chosen is not None and seen != chosen:
            reason = f"rank {rank} runs {seen}, but its arguments select {chosen}: deploy again"
            yield Link("worker", chosen, seen, where, "refuted", reason)
        elif patched is not None and identity.get("worker_module") not in patched:
            module = str(identity.get("worker_module"))
            reason = wrong_file(patched, seen, module, "")
            yield Link("worker", listed(map(file_name, patched)), file_name(module), where, "refuted", reason)
        elif chosen is not None:
            yield Link("worker", f"{chosen}, because {why}", f"rank {rank}: {seen}", where, "proved")


def _no_speculation(case: Case, chosen: str | None, arguments: Mapping[str, Any], where: str) -> Iterator[Link]:
    """Whether a server that is meant not to speculate does not, and schedules as the deployment says."""
    if chosen is not None:
        reason = f"this server speculates with {chosen}, and was meant not to: deploy again"
        yield Link("worker", "no speculation", chosen, where, "refuted", reason)
        return
    for rank, (identity, _, source) in sorted(case.identities.items()):
        seen = str(identity.get("worker"))
        if identity.get("worker_module") in WORKER_MODULES.values():
            reason = f"rank {rank} runs {seen}, but its arguments select no speculation: deploy again"
            yield Link("worker", "no speculation", seen, source, "refuted", reason)
        else:
            yield Link("worker", "no speculation", f"rank {rank}: {seen}", source, "proved")
    deployed = (case.deployment or {}).get("server_arguments")
    claimed = "off" if isinstance(deployed, Mapping) and deployed.get("disable-overlap-schedule") else "on"
    seen = "off" if arguments["disable_overlap_schedule"] else "on"
    if seen == claimed:
        yield Link("overlap schedule", claimed, seen, where, "proved")
    else:
        reason = f"the overlap schedule is {seen}, the deployment says {claimed}: SGLang chose otherwise; see fab logs"
        yield Link("overlap schedule", claimed, seen, where, "refuted", reason)


def _files(case: Case) -> Iterator[Link]:
    """Whether the serving interpreter imports each patched file, unchanged, from the release."""
    if case.main is None or case.manifest is None:
        return
    manifest, claimed_by = case.manifest
    if case.interpreter is None:
        reason = _first_problem(case, "the files that the serving interpreter imports")
        yield Link("files", claimed_by, "not examined", "host", "unknown", reason)
        return
    site = (case.evidence.get("release") or {}).get("site_packages")
    modules = case.interpreter.get("modules") or {}
    for file in manifest["files"]:
        name, found = file["module"], modules.get(file["module"]) or {}
        path, digest = found.get("file"), found.get("sha256")
        claimed_path = os.path.join(site, file["path"]) if site else None
        label = "file " + file_name(name)
        link = (label, f"SHA-256 {file['patched_sha256'][:12]}", f"SHA-256 {str(digest)[:12]}", str(path))
        if path is None:
            reason = f"the serving interpreter finds no module {name}: deploy again"
            yield Link(label, claimed_path or file["path"], "none", "the serving interpreter", "refuted", reason)
        elif claimed_path is not None and os.path.normpath(path) != os.path.normpath(claimed_path):
            reason = (
                f"the patched file is {claimed_path}, but the serving interpreter imports {path} "
                f"({_why_first(case, path, file['path'])}): remove that copy, or take it off the path, and restart"
            )
            yield Link(label, claimed_path, path, "the serving interpreter", "refuted", reason)
        elif digest is None:
            yield Link(*link, "unknown", f"{path} could not be read: {found.get('error')}")
        elif digest != file["patched_sha256"]:
            yield Link(*link, "refuted", _changed_file(case, path, file, digest))
        elif _stale_compiled(found):
            compiled = found["compiled"]
            reason = (
                f"{path} is patched, but the interpreter uses its compiled file {compiled['file']} "
                f"({compiled['kind']}), which is of other code: delete that file and restart {case.unit_name}"
            )
            yield Link(*link, "refuted", reason)
        else:
            yield Link(*link, "proved")


def _stale_compiled(found: Mapping[str, Any]) -> bool:
    compiled = found.get("compiled")
    return bool(compiled and compiled.get("used") and compiled.get("code_sha256") != found.get("source_code_sha256"))


def _why_first(case: Case, path: str, relative: str) -> str:
    """Where the entry of sys.path comes from below which `path` was found."""
    interpreter = case.interpreter or {}
    entry = path.removesuffix(relative).rstrip("/") or "/"
    environment = (case.main or {}).get("environment") or {}
    if entry not in [part.rstrip("/") or "/" for part in interpreter.get("path", []) if part]:
        return "an editable install: its finder is asked before the path"
    if entry in (environment.get("PYTHONPATH") or "").split(":"):
        return "it is on PYTHONPATH"
    if entry == (case.main or {}).get("cwd"):
        return "it is below the working directory"
    if "/.local/" in entry:
        return "it is in the service user's own site-packages"
    if "site-packages" in entry or "dist-packages" in entry:
        return "it is in another environment"
    return f"{entry} is on the path by a .pth file"


def _changed_file(case: Case, path: str, file: Mapping[str, Any], digest: str) -> str:
    loaded = " The ranks still run what they loaded before." if case.identities else ""
    installed = (case.interpreter or {}).get("sglang_version")
    expected = case.manifest[0]["sglang_version"] if case.manifest else None
    if installed is not None and installed != expected:
        return f"SGLang was changed from {expected} to {installed} after it was patched: deploy again.{loaded}"
    if digest == file["upstream_sha256"]:
        return f"{path} is SGLang's own file, without the patch: deploy with the patch.{loaded}"
    return f"{path} is neither SGLang's nor the patched file: somebody changed it; deploy again.{loaded}"


def _loaded(case: Case) -> Iterator[Link]:
    """Whether each rank itself says that it loaded the patched code."""
    if case.main is None or not case.ranks_are_unique:
        return
    for rank in case.expected_ranks:
        if rank not in case.schedulers:
            continue
        if rank not in case.identities:
            state, reason = _no_identity(case, rank)
            yield Link(
                f"loaded, rank {rank}", "the patched files", "no word from this rank", "status file", state, reason
            )
            continue
        yield from _loaded_modules(case, rank)


def _no_identity(case: Case, rank: int) -> tuple[State, str]:
    process = case.schedulers[rank]
    names = {file["module"] for file in case.manifest[0]["files"]} if case.manifest else set()
    found = [entry for name, entry in ((case.interpreter or {}).get("modules") or {}).items() if name in names]
    newest = max((max(entry.get("mtime", 0), entry.get("ctime", 0)) for entry in found), default=0)
    if case.start is not None and any(is_same_process(identity, process) for identity in case.start.identities):
        return "unknown", (
            f"rank {rank} printed its identity but keeps no status file, and a log proves nothing: "
            "start the server with RUNTIME_DIRECTORY or SPEC_GATE_RUNTIME_DIRECTORY set"
        )
    stale = f" ({case.stale_files[0]} is of a former process)" if case.stale_files else ""
    if found and newest > process.get("started_at", newest):
        return "refuted", (
            f"the files were patched after rank {rank} had started, so it runs the old code{stale}: "
            f"restart {case.unit_name}"
        )
    if not case.ready:
        return "unknown", f"rank {rank} has not reported yet{stale}: run fab verify-worker again"
    if case.start is not None and case.start.torn_identities:
        return (
            "unknown",
            f"rank {rank} keeps no status file{stale}, and the log has an identity line that is torn: "
            f"restart {case.unit_name}",
        )
    if case.start is not None and case.start.arguments_complete and case.start.ready:
        return "refuted", (
            f"rank {rank} neither keeps a status file nor printed its identity while it started{stale}: "
            f"it runs without the patch; deploy, or restart {case.unit_name}"
        )
    return "unknown", (
        f"rank {rank} keeps no status file{stale}, and its log does not reach back to its start: "
        f"restart {case.unit_name}"
    )


def _loaded_modules(case: Case, rank: int) -> Iterator[Link]:
    identity, _, where = case.identities[rank]
    name = f"loaded, rank {rank}"
    if identity.get("tp_size") not in (None, len(case.expected_ranks)) and case.arguments is None:
        reason = f"rank {rank} is one of {identity['tp_size']}, not of {len(case.expected_ranks)}: see fab logs"
        yield Link(name, f"{len(case.expected_ranks)} ranks", str(identity["tp_size"]), where, "unknown", reason)
    loaded = {entry.get("module"): entry for entry in dicts(identity.get("modules"))}
    if case.manifest is None:
        return
    for file in case.manifest[0]["files"]:
        module = file["module"]
        entry = loaded.get(module)
        label = f"{name}, {file_name(module)}"
        if entry is None:
            # The file of a worker class that this configuration does not select is patched but never imported.
            if module in WORKER_MODULES.values() and module != identity.get("worker_module"):
                continue
            reason = f"rank {rank} did not load the patched {file_name(module)}: restart {case.unit_name}"
            yield Link(label, f"series {case.series}", "not loaded", where, "refuted", reason)
            continue
        if entry.get("series") != case.series:
            reason = (
                f"rank {rank} loaded series {entry.get('series')}, claimed is {case.series}: restart {case.unit_name}"
            )
            yield Link(label, f"series {case.series}", f"series {entry.get('series')}", where, "refuted", reason)
            continue
        yield _loaded_code(case, rank, label, entry)


def _loaded_code(case: Case, rank: int, label: str, entry: Mapping[str, Any]) -> Link:
    where = case.identities[rank][2]
    on_disk = ((case.interpreter or {}).get("modules") or {}).get(entry["module"]) or {}
    seen_hash, path = str(entry.get("code_sha256")), on_disk.get("file")
    source_hash = on_disk.get("source_code_sha256")
    claimed, seen = f"code {str(source_hash)[:12]}", f"code {seen_hash[:12]}"
    if case.interpreter is None or path is None or source_hash is None:
        reason = f"what rank {rank} loaded cannot be compared: " + (
            str(on_disk.get("error")) if on_disk.get("error") else "the serving interpreter was not examined"
        )
        return Link(label, "code of the file on disk", seen, where, "unknown", reason)
    if os.path.normpath(str(entry.get("file"))) != os.path.normpath(path):
        reason = f"rank {rank} loaded {entry.get('file')}, while the patched file is {path}: restart {case.unit_name}"
        return Link(label, path, str(entry.get("file")), where, "refuted", reason)
    if seen_hash != source_hash:
        compiled = on_disk.get("compiled") or {}
        if compiled.get("code_sha256") == seen_hash:
            reason = (
                f"rank {rank} loaded the compiled file {compiled['file']} ({compiled['kind']}), which is not of the "
                f"patched source: delete it and restart {case.unit_name}"
            )
        else:
            reason = f"{path} was changed after rank {rank} had loaded it: restart {case.unit_name}, or deploy again"
        return Link(label, claimed, seen, where, "refuted", reason)
    return Link(label, claimed, seen, where, "proved")


def _threshold(case: Case) -> Iterator[Link]:
    """Whether the threshold is the same in the deployment, on the command line and in every rank."""
    if case.main is None or not case.identities:
        return
    words = option_words(case.options, THRESHOLD_OPTION)
    on_line = int(words[0]) if words and words[0].lstrip("-").isdigit() else None
    claimed = case.deployment.get("threshold") if case.deployment else on_line
    claim_text = f"{text_of(claimed)} ({'deployment.json' if case.deployment else 'command line'})"
    if case.deployment and (claimed or 0) != (on_line or 0):
        reason = (
            f"the deployment says threshold {text_of(claimed)}, the running process was started with "
            f"{text_of(on_line)}{case.drop_in}: restart {case.unit_name}, or deploy again"
        )
        yield Link("threshold", claim_text, f"command line {text_of(on_line)}", "processes", "refuted", reason)
        return
    for rank, (identity, gate, where) in sorted(case.identities.items()):
        seen = gate.get("threshold", identity.get("threshold"))
        if (seen or 0) == (claimed or 0):
            yield Link(f"threshold, rank {rank}", claim_text, text_of(seen), where, "proved")
        else:
            how = "changed while it ran" if (identity.get("threshold") or 0) == (claimed or 0) else "is another one"
            reason = (
                f"the threshold of rank {rank} is {text_of(seen)}, claimed is {text_of(claimed)} (it {how}): "
                f"set it back or restart {case.unit_name}"
            )
            yield Link(f"threshold, rank {rank}", claim_text, text_of(seen), where, "refuted", reason)


def _profile(case: Case) -> Iterator[Link]:
    """Whether every rank closes and opens its gate by the profile that the deployment claims, or by none."""
    if case.main is None or case.deployment is None:
        return
    claimed = case.deployment.get("profile")
    for rank, (identity, gate, where) in sorted(case.identities.items()):
        started_with = (identity.get("policy") or {}).get("profile")
        seen = gate.get("profile", started_with)
        link = (f"profile, rank {rank}", f"{text_of(claimed)} (deployment.json)", text_of(seen), where)
        if seen == claimed:
            if claimed is not None:
                yield Link(*link, "proved")
        elif claimed is not None and started_with == claimed:
            reason = (
                f"rank {rank} has loaded profile {claimed} but does not go by it, as its threshold is "
                f"{text_of(gate.get('threshold'))}: set that to 0, or restart {case.unit_name}"
            )
            yield Link(*link, "refuted", reason)
        else:
            reason = (
                f"the gate of rank {rank} goes by profile {text_of(seen)}, claimed is {text_of(claimed)}: "
                f"restart {case.unit_name}, or deploy again"
            )
            yield Link(*link, "refuted", reason)


def _held(case: Case) -> Iterator[Link]:
    """Whether a gate is held open or closed, as by a measurement that was cut short: it then decides nothing."""
    if case.main is None or case.deployment is None:
        return
    claimed = (case.deployment.get("server_arguments") or {}).get(FORCE_OPTION.removeprefix("--"))
    for rank, (_, gate, where) in sorted(case.identities.items()):
        seen = gate.get("forced", claimed)
        if seen != claimed:
            reason = (
                f"the gate of rank {rank} is held {text_of(seen)}, claimed is {text_of(claimed)}: what measured it did "
                f"not give it back; set speculative_gate_force to null, or restart {case.unit_name}"
            )
            yield Link(f"held, rank {rank}", text_of(claimed), text_of(seen), where, "refuted", reason)


def _answers(case: Case) -> Iterator[Link]:
    """Whether the server's port is answered by this server, in this version."""
    if case.main is None:
        return
    port, listener = case.server.get("port"), case.server.get("listener")
    claimed = f"port {port}"
    if port is None:
        problem = _first_problem(case, "the server's address")
        reason = f"{problem}: correct it and restart {case.unit_name}"
        yield Link("answers", "a port", "none", "command line", "unknown", reason)
    elif listener is None:
        reason = f"nobody listens on port {port}: the server is still loading or hangs; see fab logs"
        yield Link("answers", claimed, "nobody listens", "sockets", "unknown", reason)
    elif listener.get("inside") is None:
        reason = f"it cannot be seen whose port {port} is: gather the evidence with sudo"
        yield Link("answers", claimed, "owner not visible", "sockets", "unknown", reason)
    elif not listener["inside"]:
        who = f"{' '.join(listener.get('command', [])[:3])} (pid {listener['pid']})"
        reason = f"port {port} is answered by another program, {who}: stop it, or give the service another port"
        yield Link("answers", claimed, who, "sockets", "refuted", reason)
    elif case.info is None:
        reason = (
            f"/server_info gave no answer ({case.server.get('error')}): the server is loading or hangs; see fab logs"
        )
        yield Link("answers", claimed, str(case.server.get("error")), "/server_info", "unknown", reason)
    elif case.manifest is not None and case.info.get("version") != case.manifest[0]["sglang_version"]:
        expected = case.manifest[0]["sglang_version"]
        reason = f"the server is SGLang {case.info.get('version')}, the patch is for {expected}: deploy again"
        yield Link("answers", f"SGLang {expected}", str(case.info.get("version")), "/server_info", "refuted", reason)
    elif (disagreement := _disagreement(case)) is not None:
        yield Link("answers", "the gate's identity", disagreement, "/server_info", "unknown", disagreement)
    else:
        seen = f"pid {listener['pid']}, SGLang {case.info.get('version')}"
        yield Link("answers", claimed, seen, "sockets, /server_info", "proved")


def _disagreement(case: Case) -> str | None:
    """How what /server_info says of rank 0 and its status file contradict each other."""
    answered = [gate.get("identity") for gate in dicts((case.info or {}).get("gates"))]
    for identity, _, where in case.identities.values():
        if identity.get("tp_rank") == 0 and identity not in answered:
            what = "another identity than" if answered else "no identity, unlike"
            return f"/server_info gives {what} {where}: restart {case.unit_name} and run fab verify-worker again"
    return None


def _log(case: Case) -> Iterator[Link]:
    """Whether the log of the running start agrees; it may have been rotated, and proves nothing by itself."""
    if case.main is None:
        return
    where = str((case.evidence.get("log") or {}).get("source") or "log")
    start = case.start
    if start is None or not start.arguments_complete:
        yield Link("log", "identity of each rank", "does not reach back to the start", where, "not applicable")
        return
    if not start.ready:
        return
    silent = [
        rank
        for rank in case.expected_ranks
        if rank in case.identities
        and not any(is_same_process(identity, case.schedulers[rank]) for identity in start.identities)
    ]
    if silent and not start.torn_identities:
        reason = (
            f"rank {listed(silent)} keeps a status file but did not print its identity when it started: the two "
            f"disagree; restart {case.unit_name} and run fab verify-worker again"
        )
        yield Link("log", "identity of each rank", f"none from rank {listed(silent)}", where, "unknown", reason)
    elif len(case.identities) == len(case.expected_ranks):
        yield Link("log", "identity of each rank", f"{len(start.identities)} identity line(s)", where, "proved")


CHAIN = (
    _complete,
    _service,
    _claim,
    _program,
    _ranks,
    _ready,
    _arguments,
    _worker,
    _files,
    _loaded,
    _threshold,
    _profile,
    _held,
    _answers,
    _log,
)


def notes(case: Case) -> Iterator[str]:
    """What does not change the verdict but may explain the next surprise."""
    others = dicts(case.evidence.get("others"))
    mains = {process["pid"] for process in others if process["role"] == "main"}
    if case.main is not None:
        for process in others:
            if process["role"] == "main":
                yield f"another server runs on this host: pid {process['pid']}, {process['cgroup'] or 'no unit'}"
            elif process["role"] == "scheduler" and process["ppid"] not in mains:
                yield f"an orphaned scheduler of a former server lives, and may hold GPU memory: pid {process['pid']}"
    inside = {process["pid"] for process in case.processes}
    for owner in dicts(case.evidence.get("gpu_owners")):
        if owner["pid"] not in inside:
            yield f"GPU memory is held by a process outside the service: pid {owner['pid']}, {owner['used_mib']} MiB"
    if (case.unit or {}).get("NeedDaemonReload") == "yes":
        yield "the unit's files changed since systemd read them (systemctl daemon-reload)"
    for name, found in ((case.interpreter or {}).get("modules") or {}).items():
        for copy in found.get("copies") or []:
            if copy["file"] != found.get("file"):
                yield f"a second copy of {file_name(name)} is on the path, not used: {copy['file']}"
    for file in case.stale_files:
        yield f"{file} is of a process that is not this server's, or ended"
    facts = (case.evidence.get("log") or {}).get("facts")
    if facts:
        fields = {name: facts[name] for name in ("bytes", "recognised", "starts", "imitations", "truncated")}
        yield from log_notes(LogFacts(**fields))
    if case.start is not None and case.start.stop_signals:
        yield f"the server received {case.start.stop_signals[-1]}: it is draining"


def _first_problem(case: Case, what: str) -> str:
    for entry in dicts(case.evidence.get("problems")):
        if entry["what"] == what:
            return f"{what} could not be examined: {entry['why']}"
    return f"{what} could not be examined"
