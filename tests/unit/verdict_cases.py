"""The cases that `fab verify-worker` must tell apart: evidence of a healthy host, and what is wrong with it in each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

Evidence = dict[str, Any]

SERIES = "0.5.12.post1-0123456789ab"
RELEASE = "/opt/sglang/releases/0.5.12.post1-abcdefabcdef"
SITE = f"{RELEASE}/lib/python3.11/site-packages"
SPECULATIVE = "sglang.srt.speculative"
V1, V2, SCHEDULER = f"{SPECULATIVE}.eagle_worker", f"{SPECULATIVE}.eagle_worker_v2", "sglang.srt.managers.scheduler"
STARTED = 1_800_000_000.0
DROP_IN = "/etc/systemd/system/sglang.service.d/override.conf"


def path_of(module: str, site: str = SITE) -> str:
    return f"{site}/{module.replace('.', '/')}.py"


def manifest(*modules: str) -> dict[str, Any]:
    return {
        "schema": "spec_gate.manifest/1",
        "sglang_version": "0.5.12.post1",
        "series": SERIES,
        "files": [
            {
                "path": path_of(module, "").lstrip("/"),
                "module": module,
                "upstream_sha256": f"upstream {module}",
                "patched_sha256": f"patched {module}",
            }
            for module in modules
        ],
    }


def identity(rank: int, tp_size: int, worker: str = "EAGLEWorker", module: str = V1) -> dict[str, Any]:
    return {
        "schema": "spec_gate.identity/1",
        "pid": 200 + rank,
        "start_ticks": 5000 + rank,
        "tp_rank": rank,
        "tp_size": tp_size,
        "worker": worker,
        "worker_module": module,
        "sglang_version": "0.5.12.post1",
        "series": SERIES,
        "threshold": 5,
        "policy": {},
        "modules": [
            {"module": name, "file": path_of(name), "series": SERIES, "code_sha256": f"code {name}"}
            for name in (V1, SCHEDULER)
        ],
    }


def gate(rank: int, tp_size: int) -> dict[str, Any]:
    return {"mode": "open", "threshold": 5, "transitions": 0, "open_steps": 1, "closed_steps": 0}


def server_arguments(tp_size: int = 1, top_k: int = 4) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": top_k,
        "disable_overlap_schedule": top_k > 1,
        "enable_multi_layer_eagle": False,
        "tp_size": tp_size,
        "dp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "port": 30000,
        "speculative_disable_batch_threshold": 5,
    }


def process(pid: int, role: str, command: list[str], rank: int | None = None) -> dict[str, Any]:
    return {
        "pid": pid,
        "ppid": 1 if role == "main" else 100,
        "state": "S",
        "start_ticks": 4800 + pid,
        "started_at": STARTED + (pid - 100) / 10,
        "uid": 990,
        "role": role,
        "tp_rank": rank,
        "command": command,
        "exe": "/usr/bin/python3.11",
        "cwd": "/",
        "environment": {"RUNTIME_DIRECTORY": "/run/sglang"} if role == "main" else {},
        "host_files": True,
    }


def healthy(tp_size: int = 1) -> Evidence:
    """A host on which everything is as it should be."""
    command = [f"{RELEASE}/bin/python", "-m", "sglang.launch_server", "--port", "30000", "--tp-size", str(tp_size)]
    command += ["--speculative-eagle-topk", "4", "--speculative-disable-batch-threshold", "5"]
    ranks = [identity(rank, tp_size) for rank in range(tp_size)]
    titles = [f"sglang::scheduler{'' if tp_size == 1 else f'_TP{rank}'}" for rank in range(tp_size)]
    return {
        "schema": "specgate.evidence/1",
        "host": "gpu-1",
        "error": None,
        "collected_at": STARTED + 3600,
        "privileged": True,
        "changed_meanwhile": False,
        "problems": [],
        "reference": [manifest(V1, SCHEDULER)],
        "unit": {
            "Id": "sglang.service",
            "ActiveState": "active",
            "SubState": "running",
            "Result": "success",
            "MainPID": "100",
            "InvocationID": "feed",
            "ExecMainStartTimestamp": "Fri 2027-01-15 08:00:00 UTC",
            "NeedDaemonReload": "no",
            "drop_ins": [],
            "exec_start": command,
        },
        "deployment_path": "/opt/sglang/current/deployment.json",
        "deployment": {
            "schema": "specgate.deployment/1",
            "id": "d1",
            "release_path": RELEASE,
            "python": f"{RELEASE}/bin/python",
            "series": SERIES,
            "threshold": 5,
            "tp_size": tp_size,
            "server_arguments": {
                "port": 30000,
                "tp-size": tp_size,
                "speculative-eagle-topk": 4,
                "speculative-disable-batch-threshold": 5,
            },
        },
        "started_from": "d1",
        "release": {"site_packages": SITE, "series": SERIES, "sglang_version": "0.5.12.post1"},
        "manifest": manifest(V1, SCHEDULER),
        "main_pid": 100,
        "processes": [
            process(100, "main", command),
            *(process(200 + rank, "scheduler", [title], rank) for rank, title in enumerate(titles)),
        ],
        "others": [],
        "gpu_owners": None,
        "interpreter": {
            "python": f"{RELEASE}/bin/python",
            "path": ["/", "/usr/lib/python3.11", SITE],
            "sglang_version": "0.5.12.post1",
            "modules": {
                name: {
                    "file": path_of(name),
                    "sha256": f"patched {name}",
                    "mtime": STARTED - 900,
                    "ctime": STARTED - 900,
                    "source_code_sha256": f"code {name}",
                    "compiled": {
                        "file": path_of(name) + "c",
                        "kind": "timestamp",
                        "used": True,
                        "code_sha256": f"code {name}",
                    },
                    "copies": [],
                }
                for name in (V1, SCHEDULER)
            },
        },
        "rank_files": [
            {
                "file": f"/run/sglang/rank-{rank}.json",
                "document": {
                    "schema": "spec_gate.rank/1",
                    "identity": ranks[rank],
                    "gate": gate(rank, tp_size),
                    "updated": STARTED + 3599,
                },
            }
            for rank in range(tp_size)
        ],
        "log": {
            "source": "journal, invocation feed",
            "facts": {
                "bytes": 100_000,
                "recognised": True,
                "starts": 1,
                "imitations": 0,
                "truncated": False,
                "current": {
                    "arguments": server_arguments(tp_size),
                    "arguments_form": "call",
                    "arguments_complete": True,
                    "speculation": "v1",
                    "speculation_line": "Spec v1 is used for eagle/eagle3/standalone speculative decoding because ...",
                    "identities": copy.deepcopy(ranks),
                    "torn_identities": 0,
                    "transitions": 0,
                    "last_transitions": [],
                    "ready": True,
                    "stop_signals": [],
                    "crashes": [],
                },
            },
        },
        "server": {
            "address": "127.0.0.1",
            "port": 30000,
            "listener": {"pid": 100, "inside": True, "command": command[:4]},
            "error": None,
            "info": {
                "arguments": server_arguments(tp_size),
                "version": "0.5.12.post1",
                "gates": [{**gate(0, tp_size), "identity": copy.deepcopy(ranks[0])}],
            },
        },
    }


class Case(NamedTuple):
    """A case: its name, what it changes in a healthy host's evidence, the verdict, and words of its sentence."""

    name: str
    spoil: Callable[[Evidence], None]
    verdict: str
    says: tuple[str, ...]
    tp_size: int = 1

    def evidence(self) -> Evidence:
        made = healthy(self.tp_size)
        self.spoil(made)
        return made


def current(evidence: Evidence) -> dict[str, Any]:
    start: dict[str, Any] = evidence["log"]["facts"]["current"]
    return start


def no_word(evidence: Evidence, rank: int = 0) -> None:
    """The rank keeps no status file, printed no identity, and does not answer with one."""
    evidence["rank_files"] = [entry for entry in evidence["rank_files"] if f"rank-{rank}." not in entry["file"]]
    start = current(evidence)
    start["identities"] = [found for found in start["identities"] if found["tp_rank"] != rank]
    if rank == 0:
        evidence["server"]["info"]["gates"] = [None]


def in_file(evidence: Evidence, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = evidence["rank_files"][rank]["document"]["identity"]
    return found


def nothing(evidence: Evidence) -> None:
    pass


def wrong_workers_file(evidence: Evidence) -> None:
    evidence["manifest"] = manifest(V2, SCHEDULER)
    evidence["reference"] = [manifest(V2, SCHEDULER)]
    for entry in (
        in_file(evidence),
        current(evidence)["identities"][0],
        evidence["server"]["info"]["gates"][0]["identity"],
    ):
        entry["modules"] = entry["modules"][1:]
    modules = evidence["interpreter"]["modules"]
    modules[V2] = {**modules.pop(V1), "file": path_of(V2), "sha256": f"patched {V2}"}


def series_of_v1_while_v2_runs(evidence: Evidence) -> None:
    for arguments in (evidence["server"]["info"]["arguments"], current(evidence)["arguments"]):
        arguments.update(server_arguments(top_k=1))


def other_environment(evidence: Evidence) -> None:
    evidence["processes"][0]["command"][0] = "/srv/venv/bin/python"
    evidence["interpreter"]["path"] = ["/srv/venv/lib/python3.11/site-packages"]
    for name, found in evidence["interpreter"]["modules"].items():
        found.update(file=path_of(name, "/srv/venv/lib/python3.11/site-packages"), sha256=f"upstream {name}")
    no_word(evidence)


def copy_first(entry: str, **main: Any) -> Callable[[Evidence], None]:
    def spoil(evidence: Evidence) -> None:
        evidence["interpreter"]["path"].insert(0, entry)
        evidence["processes"][0].update(main)
        for name, found in evidence["interpreter"]["modules"].items():
            found["copies"] = [{"file": found["file"], "sha256": found["sha256"]}]
            found.update(file=path_of(name, entry), sha256=f"upstream {name}")
        no_word(evidence)

    return spoil


def editable_install(evidence: Evidence) -> None:
    copy_first("/unused")(evidence)
    for name, found in evidence["interpreter"]["modules"].items():
        found["file"] = path_of(name, "/home/dev/sglang/python")


def patched_after_start(evidence: Evidence) -> None:
    for found in evidence["interpreter"]["modules"].values():
        found["ctime"] = STARTED + 1800
    no_word(evidence)


def upgraded(evidence: Evidence) -> None:
    evidence["interpreter"]["sglang_version"] = "0.5.13"
    for name, found in evidence["interpreter"]["modules"].items():
        found.update(sha256=f"newer {name}", source_code_sha256=f"newer code {name}", compiled=None)


def edited(evidence: Evidence) -> None:
    evidence["interpreter"]["modules"][V1].update(sha256="edited", source_code_sha256="edited code", compiled=None)


def stale_compiled(evidence: Evidence) -> None:
    compiled = {"file": path_of(V1) + "c", "kind": "unchecked hash", "used": True, "code_sha256": "code of the past"}
    evidence["interpreter"]["modules"][V1]["compiled"] = compiled
    no_word(evidence)


def stale_compiled_was_loaded(evidence: Evidence) -> None:
    stale_compiled(evidence)
    fresh = healthy()
    evidence["rank_files"] = fresh["rank_files"]
    evidence["interpreter"]["modules"][V1]["compiled"]["used"] = False  # deleted and built again since
    in_file(evidence)["modules"][0]["code_sha256"] = "code of the past"


def restarted_file_left(evidence: Evidence) -> None:
    no_word(evidence)
    evidence["rank_files"] = healthy()["rank_files"]
    in_file(evidence).update(pid=150, start_ticks=1)


def former_start_in_log(evidence: Evidence) -> None:
    no_word(evidence)
    evidence["log"]["facts"]["starts"] = 2


def reused_pid(evidence: Evidence) -> None:
    restarted_file_left(evidence)
    in_file(evidence).update(pid=200, start_ticks=77)


def other_arguments(evidence: Evidence) -> None:
    command = evidence["processes"][0]["command"]
    command[command.index("--speculative-eagle-topk") + 1] = "1"
    series_of_v1_while_v2_runs(evidence)


def drop_in_environment(evidence: Evidence) -> None:
    other_environment(evidence)
    evidence["unit"]["drop_ins"] = [{"file": DROP_IN, "settings": ["ExecStart"]}]


def drop_in_threshold(evidence: Evidence) -> None:
    evidence["unit"]["drop_ins"] = [{"file": DROP_IN, "settings": ["ExecStart"]}]
    evidence["processes"][0]["command"][-1] = "9"


def drop_in_adds_an_argument(evidence: Evidence) -> None:
    evidence["unit"]["drop_ins"] = [{"file": DROP_IN, "settings": ["ExecStart"]}]
    evidence["processes"][0]["command"].append("--speculative-gate-force=open")


def harmless_drop_in(evidence: Evidence) -> None:
    evidence["unit"]["drop_ins"] = [{"file": DROP_IN, "settings": ["LimitNOFILE"]}]


def log_rotated(evidence: Evidence) -> None:
    evidence["log"]["facts"].update(current=None, starts=0)


def log_rotated_and_mute(evidence: Evidence) -> None:
    log_rotated(evidence)
    evidence["server"].update(info=None, error="/server_info: timed out")


def threshold_on_disk(evidence: Evidence) -> None:
    evidence["deployment"]["threshold"] = 8


def switched_not_restarted(evidence: Evidence) -> None:
    evidence["deployment"]["id"] = "d2"


def threshold_changed_at_run_time(evidence: Evidence) -> None:
    evidence["rank_files"][0]["document"]["gate"]["threshold"] = 7


def threshold_differs_between_ranks(evidence: Evidence) -> None:
    in_file(evidence, 1)["threshold"] = 9
    evidence["rank_files"][1]["document"]["gate"]["threshold"] = 9


PROFILE = "0a1b2c3d4e5f"


def by_profile(evidence: Evidence) -> None:
    """A deployment with a profile instead of a threshold."""
    evidence["deployment"].update(threshold=None, profile=PROFILE)
    path = f"/opt/sglang/profiles/{PROFILE}.json"
    options = evidence["processes"][0]["command"]
    where = options.index("--speculative-disable-batch-threshold")
    options[where:] = ["--speculative-gate-profile", path]
    arguments = evidence["deployment"]["server_arguments"]
    del arguments["speculative-disable-batch-threshold"]
    arguments["speculative-gate-profile"] = path
    for rank, entry in enumerate(evidence["rank_files"]):
        in_file(evidence, rank).update(threshold=0, policy={"profile": PROFILE})
        entry["document"]["gate"].update(threshold=0, profile=PROFILE, forced=None)
    for told in evidence["server"]["info"]["gates"]:
        told["identity"].update(threshold=0, policy={"profile": PROFILE})
        told.update(threshold=0, profile=PROFILE, forced=None)


def profile_claimed_only(evidence: Evidence) -> None:
    evidence["deployment"]["profile"] = PROFILE


def other_profile(evidence: Evidence) -> None:
    by_profile(evidence)
    in_file(evidence, 1)["policy"] = {"profile": "ffffffffffff"}
    evidence["rank_files"][1]["document"]["gate"]["profile"] = "ffffffffffff"


def threshold_set_over_the_profile(evidence: Evidence) -> None:
    by_profile(evidence)
    # As a deployment with both would have it, so that the threshold itself is as claimed.
    evidence["deployment"]["threshold"] = 7
    evidence["processes"][0]["command"] += ["--speculative-disable-batch-threshold", "7"]
    evidence["deployment"]["server_arguments"]["speculative-disable-batch-threshold"] = 7
    for entry in evidence["rank_files"]:
        entry["document"]["gate"].update(threshold=7, profile=None)


def profile_without_a_claim(evidence: Evidence) -> None:
    by_profile(evidence)
    evidence["deployment"]["profile"] = None


def held_closed(evidence: Evidence) -> None:
    evidence["rank_files"][0]["document"]["gate"]["forced"] = "closed"


def schedulers_dead(evidence: Evidence) -> None:
    evidence["processes"] = evidence["processes"][:1]
    evidence["server"].update(info=None, error="/server_info: timed out")


def scheduler_zombie(evidence: Evidence) -> None:
    evidence["processes"][2]["state"] = "Z"


def crashed(evidence: Evidence) -> None:
    schedulers_dead(evidence)
    current(evidence).update(ready=False, crashes=["RuntimeError: The size of tensor a (160) must match ..."])


def loading(evidence: Evidence) -> None:
    evidence["collected_at"] = STARTED + 40
    evidence["processes"] = evidence["processes"][:1]
    evidence["rank_files"] = []
    evidence["server"].update(info=None, listener=None, error="/server_info: Connection refused")
    current(evidence).update(ready=False, identities=[])


def foreign_port(evidence: Evidence) -> None:
    evidence["server"]["listener"] = {"pid": 4711, "inside": False, "command": ["nginx: master process"]}
    evidence["server"]["info"] = {"version": "0.5.12.post1", "arguments": server_arguments(), "gates": []}


def two_servers_one_unit(evidence: Evidence) -> None:
    evidence["others"] = [
        {"pid": 900, "ppid": 1, "role": "main", "cgroup": "/system.slice/other.service", "command": []},
        {"pid": 901, "ppid": 900, "role": "scheduler", "cgroup": "/system.slice/other.service", "command": []},
    ]


def no_unit(evidence: Evidence) -> None:
    evidence.update(unit=None, deployment=None, release=None, manifest=None, started_from=None)


def two_servers_no_unit(evidence: Evidence) -> None:
    two_servers_one_unit(evidence)
    no_unit(evidence)
    evidence["others"].append({"pid": 100, "ppid": 1, "role": "main", "cgroup": "/user.slice", "command": []})
    evidence.update(main_pid=None, processes=[], interpreter=None)


def nothing_runs(evidence: Evidence) -> None:
    no_unit(evidence)
    evidence.update(main_pid=None, processes=[], interpreter=None)


def container(evidence: Evidence) -> None:
    no_unit(evidence)
    evidence["interpreter"] = None
    what = "the files that the serving interpreter imports"
    evidence["problems"] = [{"what": what, "why": "the process runs in a container; its code is not run outside of it"}]


def no_sudo(evidence: Evidence) -> None:
    evidence.update(privileged=False, interpreter=None)
    evidence["problems"] = [
        {"what": "executable and environment of process 100", "why": "Permission denied"},
        {"what": "the files that the serving interpreter imports", "why": "needs sudo"},
    ]
    evidence["server"]["listener"] = {"pid": None, "inside": None}
    evidence["log"] = None


def processes_hidden(evidence: Evidence) -> None:
    evidence.update(privileged=False, main_pid=None, processes=[], interpreter=None, log=None)


def unpatched_server(evidence: Evidence) -> None:
    no_unit(evidence)
    for name, found in evidence["interpreter"]["modules"].items():
        found["sha256"] = f"upstream {name}"
    no_word(evidence)


def unpatched_deployment(evidence: Evidence) -> None:
    evidence["deployment"]["series"] = None
    evidence["manifest"] = None
    no_word(evidence)


def no_speculation(evidence: Evidence) -> None:
    for arguments in (evidence["server"]["info"]["arguments"], current(evidence)["arguments"]):
        arguments.update(speculative_algorithm=None, disable_overlap_schedule=False)
    no_word(evidence)


def stopped(evidence: Evidence) -> None:
    evidence["unit"].update(ActiveState="failed", SubState="failed", Result="exit-code")
    evidence.update(main_pid=None, processes=[], interpreter=None)


def restarted_meanwhile(evidence: Evidence) -> None:
    evidence["changed_meanwhile"] = True


def one_rank_silent(evidence: Evidence) -> None:
    no_word(evidence, 1)


def one_rank_silent_log_rotated(evidence: Evidence) -> None:
    no_word(evidence, 1)
    log_rotated(evidence)


def only_the_log_speaks(evidence: Evidence) -> None:
    evidence["rank_files"] = []
    evidence["server"]["info"]["gates"] = [None]


def status_file_without_line(evidence: Evidence) -> None:
    current(evidence)["identities"] = []


def data_parallel(evidence: Evidence) -> None:
    evidence["processes"].append(process(300, "scheduler", ["sglang::scheduler_DP1_TP0"], 0))


def unexpected_rank(evidence: Evidence) -> None:
    evidence["processes"].append(process(300, "scheduler", ["sglang::scheduler_TP1"], 1))


def other_worker_at_run_time(evidence: Evidence) -> None:
    for entry in (in_file(evidence), evidence["server"]["info"]["gates"][0]["identity"]):
        entry.update(worker="EAGLEWorkerV2", worker_module=V2)


def two_identities(evidence: Evidence) -> None:
    evidence["server"]["info"]["gates"][0]["identity"]["threshold"] = 6


def torn_identity(evidence: Evidence) -> None:
    no_word(evidence)
    current(evidence)["torn_identities"] = 1


def other_series_loaded(evidence: Evidence) -> None:
    for entry in in_file(evidence)["modules"]:
        entry["series"] = "0.5.12.post1-ffffffffffff"


def manifest_forged(evidence: Evidence) -> None:
    evidence["manifest"]["files"][0]["patched_sha256"] = "edited"
    evidence["interpreter"]["modules"][V1]["sha256"] = "edited"


def other_release_of_sglang(evidence: Evidence) -> None:
    no_unit(evidence)
    no_word(evidence)
    evidence["server"]["info"]["version"] = evidence["interpreter"]["sglang_version"] = "0.5.23"


def orphan(evidence: Evidence) -> None:
    evidence["others"] = [{"pid": 77, "ppid": 1, "role": "scheduler", "cgroup": "/", "command": ["sglang::scheduler"]}]
    evidence["gpu_owners"] = [{"pid": 77, "used_mib": 70_000}, {"pid": 200, "used_mib": 70_000}]


def imitation(evidence: Evidence) -> None:
    no_word(evidence)
    evidence["log"]["facts"]["imitations"] = 3


CASES = (
    Case("healthy", nothing, "proved", ("EAGLEWorker", SERIES, "threshold 5")),
    Case("healthy, two ranks", nothing, "proved", ("all 2 ranks", "EAGLEWorker"), 2),
    Case(
        "wrong worker's file patched",
        wrong_workers_file,
        "refuted",
        ("the patch is in eagle_worker_v2.py", "run EAGLEWorker from eagle_worker.py", "top-k 4 forces", "set top-k 1"),
    ),
    Case(
        "v1 series while v2 runs",
        series_of_v1_while_v2_runs,
        "refuted",
        ("the patch is in eagle_worker.py", "run EAGLEWorkerV2 from eagle_worker_v2.py", "v2 series"),
    ),
    Case("other worker at run time", other_worker_at_run_time, "refuted", ("rank 0 runs EAGLEWorkerV2",)),
    Case("second virtual environment", other_environment, "refuted", ("runs /srv/venv/bin/python", RELEASE)),
    Case(
        "copy in the user site",
        copy_first("/var/lib/sglang/.local/lib/python3.11/site-packages"),
        "refuted",
        ("own site-packages",),
    ),
    Case("copy by editable install", editable_install, "refuted", ("/home/dev/sglang", "editable install")),
    Case(
        "copy on PYTHONPATH",
        copy_first("/srv/src", environment={"PYTHONPATH": "/srv/src"}),
        "refuted",
        ("on PYTHONPATH", "/srv/src"),
    ),
    Case(
        "copy in the working directory", copy_first("/srv/cwd", cwd="/srv/cwd"), "refuted", ("the working directory",)
    ),
    Case("patched after the start", patched_after_start, "refuted", ("patched after rank 0 had started", "restart")),
    Case("patched, then upgraded by pip", upgraded, "refuted", ("from 0.5.12.post1 to 0.5.13", "deploy again")),
    Case("patched file edited by hand", edited, "refuted", ("neither SGLang's nor the patched file",)),
    Case("stale compiled file on disk", stale_compiled, "refuted", ("unchecked hash", "delete that file")),
    Case("stale compiled file was loaded", stale_compiled_was_loaded, "refuted", ("rank 0 loaded the compiled file",)),
    Case("one rank of two is silent", one_rank_silent, "refuted", ("rank 1", "without the patch"), 2),
    Case("one rank silent, log rotated", one_rank_silent_log_rotated, "unknown", ("rank 1", "restart"), 2),
    Case("two schedulers of one rank", data_parallel, "unknown", ("same tensor-parallel rank",)),
    Case("a rank that nobody expects", unexpected_rank, "refuted", ("rank 1", "without the patch")),
    Case("two servers, one is the unit", two_servers_one_unit, "proved", ("EAGLEWorker",)),
    Case("two servers, no unit", two_servers_no_unit, "unknown", ("2 servers", "service_name")),
    Case(
        "restarted with other arguments",
        other_arguments,
        "refuted",
        ("--speculative-eagle-topk 1", "deployment says 4"),
    ),
    Case("log rotated, server answers", log_rotated, "proved", ("EAGLEWorker",)),
    Case("log rotated, server mute", log_rotated_and_mute, "unknown", ("/server_info",)),
    Case("identity of a former start in the log", former_start_in_log, "refuted", ("rank 0", "without the patch")),
    Case("status file of a former start", restarted_file_left, "refuted", ("rank-0.json is of a former process",)),
    Case("status file of a reused pid", reused_pid, "refuted", ("rank-0.json is of a former process",)),
    Case("drop-in runs another environment", drop_in_environment, "refuted", ("override.conf sets ExecStart",)),
    Case("drop-in changes the threshold", drop_in_threshold, "refuted", ("threshold 5", "with 9", "override.conf")),
    Case(
        "drop-in adds an argument", drop_in_adds_an_argument, "refuted", ("--speculative-gate-force", "override.conf")
    ),
    Case("drop-in that does not matter", harmless_drop_in, "proved", ("EAGLEWorker",)),
    Case("threshold on disk differs", threshold_on_disk, "refuted", ("threshold 8", "with 5", "restart")),
    Case("deployment switched, not restarted", switched_not_restarted, "refuted", ("d2", "from d1", "restart")),
    Case("threshold changed while running", threshold_changed_at_run_time, "refuted", ("is 7, claimed is 5",)),
    Case("threshold differs between ranks", threshold_differs_between_ranks, "refuted", ("rank 1 is 9",), 2),
    Case("by a profile", by_profile, "proved", (f"profile {PROFILE}",), 2),
    Case("profile claimed, threshold runs", profile_claimed_only, "refuted", ("by profile none", PROFILE)),
    Case("profile differs between ranks", other_profile, "refuted", ("rank 1 goes by profile ffffffffffff",), 2),
    Case("threshold set over the profile", threshold_set_over_the_profile, "refuted", ("its threshold is 7",)),
    Case("profile that is not claimed", profile_without_a_claim, "refuted", (PROFILE, "claimed is none")),
    Case("gate held by a measurement", held_closed, "refuted", ("held closed", "speculative_gate_force")),
    Case("schedulers dead, main alive", schedulers_dead, "refuted", ("main process lives", "every scheduler is gone")),
    Case("one scheduler is a zombie", scheduler_zombie, "refuted", ("rank 1 is gone",), 2),
    Case("crashed while starting", crashed, "refuted", ("size of tensor a (160)",)),
    Case("still loading", loading, "unknown", ("not started yet",)),
    Case("port answered by another program", foreign_port, "refuted", ("nginx", "4711")),
    Case("SSH works, sudo does not", no_sudo, "unknown", ("may not use sudo",)),
    Case("processes of others are hidden", processes_hidden, "unknown", ("cannot be seen by the login user",)),
    Case("no unit: a server started by hand", no_unit, "proved", ("EAGLEWorker",)),
    Case("no unit, not patched", unpatched_server, "refuted", ("SGLang's own file, without the patch",)),
    Case("no unit, another SGLang", other_release_of_sglang, "refuted", ("without the patch",)),
    Case("in a container", container, "unknown", ("container",)),
    Case("nothing runs", nothing_runs, "refuted", ("no process of SGLang's",)),
    Case("unit failed", stopped, "refuted", ("failed (exit-code)", "fab logs")),
    Case("deployment without a patch", unpatched_deployment, "refuted", ("not patched",)),
    Case("no speculation", no_speculation, "refuted", ("without speculative decoding",)),
    Case("restarted meanwhile", restarted_meanwhile, "unknown", ("restarted while",)),
    Case("identity in the log only", only_the_log_speaks, "unknown", ("a log proves nothing",)),
    Case("status file, no line in the log", status_file_without_line, "unknown", ("disagree",)),
    Case("no status file, identity torn in the log", torn_identity, "unknown", ("torn",)),
    Case("/server_info and status file differ", two_identities, "unknown", ("another identity",)),
    Case("another series loaded", other_series_loaded, "refuted", ("ffffffffffff",)),
    Case("manifest changed on the host", manifest_forged, "refuted", ("manifest", "changed")),
    Case("orphan of a former server", orphan, "proved", ("EAGLEWorker",)),
    Case("identity imitated in a prompt", imitation, "refuted", ("without the patch",)),
)


def table() -> str:
    """The cases with their verdicts, as docs/verify-worker.md shows them."""
    from diagnostics.proof.verdict import judge

    rows = ["| case | verdict | sentence |", "| --- | --- | --- |"]
    rows += [f"| {case.name} | {case.verdict} | {judge(case.evidence()).reason} |" for case in CASES]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
