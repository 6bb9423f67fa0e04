"""Gathers, on the host itself, the facts from which `verdict` judges a server. Reads only, and judges nothing.

The text of this file, of `logs` and of `resolve` is sent over SSH to the host's own Python (3.9 or later, standard
library only), which prints one JSON document, `specgate.evidence/1`. Run as root it sees everything; run as another
user it says what it could not read, under `problems`.

Secrets stay on the host: of environment variables only the names, except for those that say which code runs; of
command lines and of the server's answers, no keys or tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from diagnostics.proof import logs

SCHEMA = "specgate.evidence/1"

UNIT_PROPERTIES = (
    "Id LoadState ActiveState SubState Result MainPID InvocationID ControlGroup ExecMainStartTimestamp NRestarts "
    "FragmentPath DropInPaths NeedDaemonReload StandardOutput User ExecStart"
)
SHOWN_VARIABLES = re.compile(
    r"(PYTHON|SGLANG_|SPEC_GATE_|CUDA_|NCCL_|OMP_)[A-Z0-9_]*|PATH|HOME|USER|VIRTUAL_ENV|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|RUNTIME_DIRECTORY|INVOCATION_ID"
)
SECRET_NAME = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)", re.IGNORECASE)
SECRET_ARGUMENT = re.compile(r"--(?:[a-z0-9-]*-)?(?:key|token|secret|password|credentials?)", re.IGNORECASE)
TITLE = re.compile(r"sglang::scheduler(?P<ranks>(?:_[A-Z][A-Z_]*\d+)*)")
TP_RANK = re.compile(r"_TP(\d+)")

GATE_MODULE = "spec_gate.loaded"
FILE_BYTES = 8 << 20  # the most that is read of a status file or of an answer
LISTEN = "0A"  # a socket's state in /proc/net/tcp


@dataclasses.dataclass
class Process:
    """One process as /proc shows it. `argv` is what the kernel keeps, which SGLang's schedulers replace by a title."""

    pid: int
    ppid: int
    state: str
    start_ticks: int
    uid: int | None
    gid: int | None
    cgroup: str
    argv: list[str]

    @property
    def role(self) -> str:
        """main, scheduler, other SGLang process, or none of its processes ("")."""
        title = self.argv[0] if self.argv else ""
        if TITLE.match(title):
            return "scheduler"
        if title.startswith("sglang::"):
            return "helper"
        script = os.path.basename(self.argv[1]) if len(self.argv) > 1 else ""
        serves = "sglang.launch_server" in self.argv or (script == "sglang" and self.argv[2:3] == ["serve"])
        return "main" if serves and os.path.basename(title).startswith("python") else ""

    @property
    def tp_rank(self) -> int | None:
        """Rank within the tensor-parallel group that the title gives; 0 where the title has none."""
        match = TITLE.match(self.argv[0]) if self.argv else None
        if match is None:
            return None
        rank = TP_RANK.search(match["ranks"])
        return int(rank[1]) if rank else 0


class Problems:
    """What could not be read, and why: evidence that is missing must not look like evidence of absence."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def add(self, what: str, why: object) -> None:
        """Note that `what` is missing."""
        if isinstance(why, OSError):
            why = why.strerror or why
        elif isinstance(why, subprocess.CalledProcessError):
            why = f"{why.cmd[0]} ended with status {why.returncode}: {why.stderr.strip()}"
        entry = {"what": what, "why": str(why)[:500]}
        if entry not in self.found:
            self.found.append(entry)

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Turn the expected failures of the block into a problem."""
        try:
            yield
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.add(what, error)


def collect(request: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """Gather the evidence.

    `request`: `unit`, `deployment_path`, `modules` (names to resolve besides those of the release's manifest),
    `timeout` in seconds for each slow step, and `port`, which tells servers apart where there is no unit, or None.
    `sources`: the texts of `resolve` and of `spec_gate.loaded`.
    """
    problems = Problems()
    processes = read_processes()
    unit = read_unit(request["unit"], problems)
    deployment = read_json(request["deployment_path"], problems, missing_is_problem=False)
    if deployment and deployment.get("unit") != request["unit"]:
        deployment = None  # it speaks of another server on this host
    release = manifest = None
    if deployment:
        release = read_json(os.path.join(deployment["release_path"], "release.json"), problems)
        manifest = read_manifest(release, problems)
    members = members_of(unit, processes)
    servers = [process for process in processes.values() if is_main(process, processes)]
    main = main_of(unit, members, servers, deployment, request["port"])
    if main is not None and main.pid not in members:  # no unit: a server that somebody started by hand
        members = {main.pid: main, **descendants(main.pid, processes)}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "collected_at": time.time(),
        "host": socket.gethostname(),
        "privileged": os.geteuid() == 0,
        "unit": unit,
        "service_port": request["port"],
        "deployment_path": request["deployment_path"],
        "deployment": deployment,
        "release": release,
        "manifest": manifest,
        "main_pid": main.pid if main else None,
        "processes": [describe(process, problems) for process in members.values()],
        "others": [brief(process) for process in processes.values() if process.role and process.pid not in members],
        "gpu_owners": gpu_owners(problems),
    }
    modules = sorted({*request["modules"], *(file["module"] for file in (manifest or {}).get("files", []))})
    timeout = request["timeout"]
    found = interpreter(main, [*modules, GATE_MODULE], sources, timeout, problems) if main else None
    if main and found and manifest is None:
        # Not deployed by this project: the claim is the series that lies beside the gate of that interpreter.
        document["manifest"] = manifest = beside_gate(found, problems)
        more = {file["module"] for file in (manifest or {}).get("files", [])} - set(modules)
        if more:
            found = interpreter(main, [*modules, *sorted(more), GATE_MODULE], sources, timeout, problems)
    document["interpreter"] = found
    runtime = runtime_directory(main, deployment)
    document["rank_files"] = rank_files(runtime, main, problems)
    document["started_from"] = started_from(runtime, main, problems)
    document["log"] = read_log(unit, main, request["timeout"], problems)
    argv = main.argv if main is not None else []
    server: dict[str, Any] = {"address": None, "port": None, "listener": None, "info": None, "error": "not asked"}
    document["server"] = server
    with problems.noted("the server's address"):
        server["address"], server["port"] = address, port = endpoint(argv, deployment or {})
        with problems.noted(f"the owner of port {port}"):
            server["listener"] = listener(port, main.pid if main else None, members, processes)
        server.update(server_info(address, port, key_of(main, argv, problems), request["timeout"]))
    # Read again: what has ended or was replaced meanwhile must not pass for one and the same state.
    after = read_unit(request["unit"], Problems())
    document["changed_meanwhile"] = after != unit or any(
        (now := read_process(process.pid)) is None or now.start_ticks != process.start_ticks
        for process in members.values()
        if process.role in ("main", "scheduler")
    )
    document["problems"] = problems.found
    return document


def read_unit(name: str, problems: Problems) -> dict[str, Any] | None:
    """The unit's state and settings; None when systemd does not know it, or does not run this host."""
    if not os.path.isdir("/run/systemd/system"):  # sd_booted(3)
        return None
    command = ["systemctl", "show", "--no-pager", "--property", UNIT_PROPERTIES.replace(" ", ","), name]
    with problems.noted("the unit"):
        properties = dict(line.partition("=")[::2] for line in output_of(command).splitlines() if "=" in line)
        if properties.get("LoadState") == "not-found" and properties.get("ActiveState") != "active":
            return None
        command_line = properties.pop("ExecStart", "").partition("argv[]=")[2].partition(" ; ")[0]
        return {
            **properties,
            "exec_start": redact(command_line.split()),
            "drop_ins": [drop_in(path, problems) for path in properties.pop("DropInPaths", "").split()],
        }
    return None


def output_of(command: list[str]) -> str:
    """What a program of the system prints; raises OSError or SubprocessError when it fails or hangs."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=20, check=True
    ).stdout


def drop_in(path: str, problems: Problems) -> dict[str, Any]:
    """Which settings a drop-in makes; not their values, which may be secret."""
    settings: list[str] = []
    with problems.noted(path), open(path, encoding="utf-8", errors="replace") as file:
        settings = sorted({line.partition("=")[0].strip() for line in file if "=" in line and line[:1] not in "#;"})
    return {"file": path, "settings": settings}


def read_json(path: str, problems: Problems, missing_is_problem: bool = True) -> dict[str, Any] | None:
    """A JSON object of bounded size from a regular file; None, with a problem, when there is none."""
    try:
        return json_object(read_file(path))
    except FileNotFoundError as error:
        if missing_is_problem:
            problems.add(path, error)
    except (OSError, ValueError) as error:
        problems.add(path, error)
    return None


def read_file(path: str) -> bytes:
    """A regular file's content. The status files lie in a folder that the service may write to: no link, no pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        data = file.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise ValueError(f"larger than {FILE_BYTES} bytes")
    return data


def json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; ValueError for anything else."""
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def read_manifest(release: dict[str, Any] | None, problems: Problems) -> dict[str, Any] | None:
    """The manifest of the patch series as it was installed in the release."""
    if not release or not release.get("series"):
        return None
    folder = os.path.join(release["site_packages"], "spec_gate", "series", release["sglang_version"])
    return read_json(os.path.join(folder, "manifest.json"), problems)


def beside_gate(found: dict[str, Any], problems: Problems) -> dict[str, Any] | None:
    """The manifest in the gate's package that the serving interpreter finds, if it finds one."""
    gate = found["modules"].get(GATE_MODULE, {}).get("file")
    if gate is None or found["sglang_version"] is None:
        return None
    path = os.path.join(os.path.dirname(gate), "series", found["sglang_version"], "manifest.json")
    return read_json(path, problems, missing_is_problem=False)


# Processes


def read_processes() -> dict[int, Process]:
    """Every process of the host, by pid."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def read_process(pid: int) -> Process | None:
    """One process, or None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold spaces and parentheses
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            argv = [part.decode("utf-8", "replace") for part in file.read().rstrip(b"\0").split(b"\0")]
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            status = dict(line.rstrip("\n").partition(":")[::2] for line in file)
    except OSError:
        return None
    # systemd's units are in the entry without controllers (cgroup v2), in systemd's own hierarchy (v1), or in both; an
    # entry that it does not use says "/".
    cgroup = max((path for _, names, path in groups if names in ("name=systemd", "")), key=len, default="")
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        state=fields[0].decode(),
        start_ticks=int(fields[19]),
        uid=int(status["Uid"].split()[1]),
        gid=int(status["Gid"].split()[1]),
        cgroup=cgroup,
        argv=argv if argv != [""] else [],
    )


def members_of(unit: dict[str, Any] | None, processes: dict[int, Process]) -> dict[int, Process]:
    """The processes in the unit's cgroup."""
    group = (unit or {}).get("ControlGroup")
    if not group:
        return {}
    return {
        process.pid: process
        for process in processes.values()
        if process.cgroup == group or process.cgroup.startswith(group + "/")
    }


def is_main(process: Process, processes: dict[int, Process]) -> bool:
    """Whether this is the outermost process of a server."""
    parent = processes.get(process.ppid)
    return process.role == "main" and process.state != "Z" and (parent is None or parent.role != "main")


def main_of(
    unit: dict[str, Any] | None,
    members: dict[int, Process],
    servers: list[Process],
    deployment: dict[str, Any] | None,
    port: int | None,
) -> Process | None:
    """The main process of the unit; where there is no such unit, that of the only server of the host, or of `port`."""
    inside = [process for process in servers if process.pid in members]
    if inside:
        return inside[0]
    if unit is not None:
        return members.get(int(unit.get("MainPID") or 0))
    if port is not None:
        servers = [process for process in servers if (option(process.argv, "--port") or "30000") == str(port)]
    return servers[0] if len(servers) == 1 and deployment is None else None


def descendants(pid: int, processes: dict[int, Process]) -> dict[int, Process]:
    """The processes below `pid`."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    found: dict[int, Process] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found[child.pid] = child
            waiting.append(child.pid)
    return found


def brief(process: Process) -> dict[str, Any]:
    """What is said of an SGLang process outside the unit."""
    return {
        "pid": process.pid,
        "ppid": process.ppid,
        "role": process.role,
        "cgroup": process.cgroup,
        "command": redact(process.argv)[:4],
    }


def describe(process: Process, problems: Problems) -> dict[str, Any]:
    """A process of the server."""
    document = {
        "pid": process.pid,
        "ppid": process.ppid,
        "state": process.state,
        "start_ticks": process.start_ticks,
        "started_at": boot_time() + process.start_ticks / os.sysconf("SC_CLK_TCK"),
        "uid": process.uid,
        "role": process.role,
        "tp_rank": process.tp_rank,
        "command": redact(process.argv),
        "exe": None,
        "cwd": None,
        "environment": None,
    }
    if process.state == "Z":
        return document
    with problems.noted(f"executable and environment of process {process.pid}"):
        document["exe"] = os.readlink(f"/proc/{process.pid}/exe")
        document["cwd"] = os.readlink(f"/proc/{process.pid}/cwd")
        document["environment"] = shown_environment(environment_of(process.pid))
        document["host_files"] = shares_root(process.pid)
    return document


def boot_time() -> float:
    """Unix time at which the clock of /proc's start times began."""
    with open("/proc/stat", encoding="ascii") as file:
        return float(next(line for line in file if line.startswith("btime")).split()[1])


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with. SGLang's schedulers overwrite theirs with their title."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read(FILE_BYTES).split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def shown_environment(environment: dict[str, str]) -> dict[str, str | None]:
    """Names with the values of those variables that say which code runs; None stands for a value kept back."""
    return {
        name: value if SHOWN_VARIABLES.fullmatch(name) and not SECRET_NAME.fullmatch(name) else None
        for name, value in sorted(environment.items())
    }


def redact(argv: Iterable[str]) -> list[str]:
    """A command line with the values of keys, tokens and passwords replaced."""
    result: list[str] = []
    hide = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = SECRET_ARGUMENT.fullmatch(name) is not None
        result.append("***" if hide else f"{name}=***" if secret and equals else argument)
        hide = secret and not equals
    return result


def shares_root(pid: int) -> bool:
    """Whether the process sees the host's files (it may be in a container)."""
    own, other = os.stat("/"), os.stat(f"/proc/{pid}/root")
    return (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino)


# What the serving interpreter imports


PROBE = """\
import json, sys
request = json.load(sys.stdin)
loaded, resolve = {"__name__": "loaded"}, {"__name__": "resolve"}
exec(compile(request["loaded"], "loaded.py", "exec"), loaded)
exec(compile(request["resolve"], "resolve.py", "exec"), resolve)
print(json.dumps(resolve["report"](request["modules"], request["first_path"], loaded["code_sha256"])))
"""


def interpreter(
    main: Process, modules: list[str], sources: dict[str, str], timeout: float, problems: Problems
) -> dict[str, Any] | None:
    """Ask the interpreter of the serving processes where it finds `modules`.

    Started as the main process was: same flags, environment, working folder, mount namespace, and as its user, since
    the interpreter's start-up runs the code of .pth files.
    """
    what = "the files that the serving interpreter imports"
    with problems.noted(what):
        if not shares_root(main.pid):
            problems.add(what, "the process runs in a container; its code is not run outside of it")
            return None
        environment = environment_of(main.pid)
        cwd = os.readlink(f"/proc/{main.pid}/cwd")
        python = executable_of(main, environment, cwd)
        flags, first_path = python_start(main.argv, cwd)
        command = [python, *flags, "-B", "-c", PROBE]
        if os.geteuid() == 0:
            enter = ["--target", str(main.pid), "--mount", "--wd", f"--setgid={main.gid}", f"--setuid={main.uid}"]
            command = ["nsenter", *enter, "--", *command]
            cwd = "/"
        elif os.geteuid() != main.uid:
            problems.add(what, "needs sudo: the interpreter is asked as the service's user")
            return None
        answer = subprocess.run(
            command,
            input=json.dumps({**sources, "modules": modules, "first_path": first_path}),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=environment,
            check=False,
        )
        if answer.returncode != 0:
            raise ValueError(f"{python} failed: {answer.stderr.strip()[-300:]}")
        # A .pth file may print something of its own before.
        return {"python": python, "flags": flags, **json_object(answer.stdout.strip().rpartition("\n")[2].encode())}
    return None


def executable_of(main: Process, environment: dict[str, str], cwd: str) -> str:
    """The path by which the interpreter was started: a virtual environment is told by it, not by /proc's exe."""
    name = main.argv[0] if main.argv else ""
    if os.sep in name:
        path: str | None = os.path.join(cwd, name)
    else:
        path = shutil.which(name, path=environment.get("PATH", os.defpath))
    actual = os.readlink(f"/proc/{main.pid}/exe")
    if path is None or os.path.realpath(path) != actual:
        raise ValueError(f"{name or 'the command line'} is not the running interpreter, {actual}")
    return path


WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def python_start(argv: list[str], cwd: str) -> tuple[list[str], str | None]:
    """The interpreter's own flags in a command line, and the entry that it puts first on sys.path."""
    flags: list[str] = []
    position = 1
    while position < len(argv):
        argument = argv[position]
        if argument in WITH_VALUE:
            flags += argv[position : position + 2]
            position += 2
        elif argument in ("-m", "-c") or argument.startswith("-m"):
            return flags, cwd
        elif argument.startswith("-"):
            flags.append(argument)
            position += 1
        else:
            return flags, os.path.dirname(os.path.realpath(os.path.join(cwd, argument)))
    return flags, cwd


# What the server says


def runtime_directory(main: Process | None, deployment: dict[str, Any] | None) -> str | None:
    """The folder in which the ranks keep their status files, by the same rule as the gate's."""
    if main is not None:
        with contextlib.suppress(OSError):
            environment = environment_of(main.pid)
            given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
            if given or "SPEC_GATE_RUNTIME_DIRECTORY" in environment:
                return given or environment["SPEC_GATE_RUNTIME_DIRECTORY"]
    return (deployment or {}).get("runtime_directory")


def as_seen_by(main: Process | None, path: str) -> str:
    """The path by which the collector reaches a file that a process calls `path`."""
    return f"/proc/{main.pid}/root{path}" if main is not None and os.geteuid() == 0 else path


def started_from(folder: str | None, main: Process | None, problems: Problems) -> str | None:
    """The id of the deployment that this start came from; `current` may have been switched since."""
    if folder is None:
        return None
    document = read_json(as_seen_by(main, os.path.join(folder, "deployment.json")), problems, missing_is_problem=False)
    return (document or {}).get("id")


def rank_files(folder: str | None, main: Process | None, problems: Problems) -> list[dict[str, Any]]:
    """The status files that the ranks keep, as they are: old ones of ended processes too."""
    if folder is None:
        return []
    within = as_seen_by(main, folder)
    found: list[dict[str, Any]] = []
    try:
        names = sorted(os.listdir(within))
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.add(folder, error)
        return []
    for name in names:
        if name.startswith("rank-") and name.endswith(".json"):
            entry: dict[str, Any] = {"file": os.path.join(folder, name), "document": None}
            try:
                entry["document"] = json_object(read_file(os.path.join(within, name)))
            except (OSError, ValueError) as error:
                entry["error"] = str(error)
            found.append(entry)
    return found


def read_log(
    unit: dict[str, Any] | None, main: Process | None, timeout: float, problems: Problems
) -> dict[str, Any] | None:
    """Facts of the running start's log: from the journal by invocation, or from the file that stderr goes to."""
    deadline = time.monotonic() + timeout
    output = (unit or {}).get("StandardOutput", "")
    with problems.noted("the log"):
        path = log_file(main) if main is not None else None
        if path is not None:
            with logs.open_log(path) as stream:
                return {"source": path, "facts": dataclasses.asdict(logs.parse(stream, deadline))}
        invocation = (unit or {}).get("InvocationID")
        if not invocation or output == "null":
            return None
        command = ["journalctl", "--quiet", "--no-pager", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={invocation}"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        ) as journal:
            assert journal.stdout is not None
            try:
                facts = logs.parse(journal.stdout, deadline)
            finally:
                journal.kill()
        if facts.bytes == 0 and os.geteuid() != 0:  # for root it is empty: not written yet, or rotated
            problems.add("the log", "the journal has no line of this invocation that this user may read")
        return {"source": f"journal, invocation {invocation[:8]}", "facts": dataclasses.asdict(facts)}
    return None


def log_file(main: Process) -> str | None:
    """The regular file that the server's standard error goes to, if it is one."""
    with contextlib.suppress(OSError):
        path = f"/proc/{main.pid}/fd/2"
        if stat.S_ISREG(os.stat(path).st_mode):
            return os.readlink(path) if shares_root(main.pid) else f"/proc/{main.pid}/root{os.readlink(path)}"
    return None


def key_of(main: Process | None, argv: list[str], problems: Problems) -> str | None:
    """The key that a server asks for, from its command line or the file that this names; None where it names none."""
    key, path = option(argv, "--api-key"), option(argv, "--config")
    if key is None and path is not None:
        with problems.noted("the server's key"):
            # The deploy writes JSON, which is YAML; another file of somebody's own may be more than that.
            key = json_object(read_file(as_seen_by(main, path))).get("api-key")
    return key


def server_info(address: str, port: int, key: str | None, timeout: float) -> dict[str, Any]:
    """What /server_info answers, asked with the server's key."""
    document: dict[str, Any] = {"info": None, "error": None}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    host = f"[{address}]" if ":" in address else address
    for path in ("/server_info", "/get_server_info"):
        try:
            request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
            with opener.open(request, timeout=timeout) as answer:
                document["info"] = shown_info(json_object(answer.read(FILE_BYTES)))
            document["error"] = None
            break
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
            document["error"] = f"{path}: {error}"
            if not isinstance(error, urllib.error.HTTPError) or error.code != 404:
                break
    return document


def endpoint(argv: list[str], deployment: dict[str, Any]) -> tuple[str, int]:
    """Address and port of the server: as its command line says, else as the deployment claims, else SGLang's own.

    Raises ValueError when the port is none.
    """
    address = option(argv, "--host") or deployment.get("address") or "127.0.0.1"
    port = str(option(argv, "--port") or deployment.get("port") or 30000)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{port!r} is not a port")
    return {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(address, address), int(port)


def shown_info(info: dict[str, Any]) -> dict[str, Any]:
    """Of the answer, the arguments that the log's reader keeps too, the version, and the gate's blocks."""
    states = info.get("internal_states")
    return {
        "arguments": {name: info[name] for name in sorted(logs.ARGUMENTS) if name in info},
        "version": info.get("version"),
        "gates": [
            state.get("spec_gate") if isinstance(state, dict) else None
            for state in (states if isinstance(states, list) else [])
        ],
    }


def option(argv: list[str], name: str) -> str | None:
    """The last value of an option in a command line."""
    value = None
    for position, argument in enumerate(argv):
        if argument == name and position + 1 < len(argv):
            value = argv[position + 1]
        elif argument.startswith(name + "="):
            value = argument[len(name) + 1 :]
    return value


def listener(
    port: int, main_pid: int | None, members: dict[int, Process], processes: dict[int, Process]
) -> dict[str, Any] | None:
    """The process that listens on a TCP port, in the network namespace of the main process."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{main_pid or 'self'}/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in sorted(processes.values(), key=lambda process: process.pid not in members):
        with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            for name in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{process.pid}/fd/{name}") in inodes:
                        return {
                            "pid": process.pid,
                            "inside": process.pid in members,
                            "command": redact(process.argv)[:4],
                        }
    return {"pid": None, "inside": None}


def gpu_owners(problems: Problems) -> list[dict[str, Any]] | None:
    """The processes that hold GPU memory (MiB each); None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with problems.noted("the owners of GPU memory"):
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        )
        rows = [line.split(",") for line in answer.stdout.splitlines() if "," in line]
        return [
            {"pid": int(pid), "used_mib": int(used) if used.strip().isdigit() else None}
            for pid, used in rows
            if pid.strip().isdigit()
        ]
    return None


def print_evidence(request: dict[str, Any], sources: dict[str, str]) -> None:
    """Print the evidence as one line of JSON."""
    json.dump(collect(request, sources), sys.stdout)
    sys.stdout.write("\n")
