"""The collector's parts on live processes of this machine, and what it must not disclose or follow."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import py_compile
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spec_gate import loaded

from diagnostics.proof import collector, evidence
from diagnostics.proof.collector import Problems, Process

WORKER = "sglang.srt.speculative.eagle_worker"
SOURCES = {
    "resolve": (Path(collector.__file__).parent / "resolve.py").read_text(),
    "loaded": Path(loaded.__file__).read_text(),
}
SERVER = "import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n"


def package(site: Path, worker: str = "kind = 'released'\n") -> Path:
    """A package laid out as SGLang is: `sglang.srt` without an __init__.py. Returns the worker's file."""
    file = site / "sglang/srt/speculative/eagle_worker.py"
    file.parent.mkdir(parents=True)
    file.write_text(worker)
    (site / "sglang/__init__.py").write_text("raise SystemExit('looking for a module must not import its package')\n")
    (file.parent / "__init__.py").write_text("")
    return file


def environment(tmp_path: Path) -> tuple[Path, Path]:
    """A virtual environment; its interpreter and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv/bin/python", next((tmp_path / "venv/lib").glob("python3*/site-packages"))


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start an interpreter on a script and see it as the collector does."""
    started: list[subprocess.Popen[str]] = []

    def start(python: Path, *flags: str, cwd: Path | None = None, **variables: str) -> Process:
        script = tmp_path / "bin/serve.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(SERVER)
        child = subprocess.Popen(
            [python, *flags, script],
            cwd=cwd or tmp_path,
            env={"PATH": os.environ["PATH"], **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        found = collector.read_process(child.pid)
        assert found is not None
        return found

    yield start
    for child in started:
        child.kill()
        child.communicate()


def resolved(process: Process) -> dict[str, Any]:
    problems = Problems()
    answer = collector.interpreter(process, [WORKER, "no.such.module"], SOURCES, 30, problems)
    assert problems.found == []
    assert answer is not None
    assert answer["modules"]["no.such.module"]["file"] is None
    return answer


def worker_of(process: Process) -> dict[str, Any]:
    found: dict[str, Any] = resolved(process)["modules"][WORKER]
    return found


def test_finds_what_the_process_would_import(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    file = package(site)
    found = worker_of(serve(python))
    assert found["file"] == str(file)
    assert found["source_code_sha256"] == loaded.source_code_sha256(str(file))
    assert (found["compiled"], found["copies"]) == (None, [])


def test_pythonpath_comes_before_site_packages(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    released, other = package(site), package(tmp_path / "src", "kind = 'other'\n")
    found = worker_of(serve(python, PYTHONPATH=str(tmp_path / "src")))
    assert found["file"] == str(other)
    assert [copy["file"] for copy in found["copies"]] == [str(released)]


def test_isolated_process_ignores_pythonpath(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    released, _ = package(site), package(tmp_path / "src")
    assert worker_of(serve(python, "-I", PYTHONPATH=str(tmp_path / "src")))["file"] == str(released)


def test_folder_of_the_script_comes_first(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    package(site)
    beside = package(tmp_path / "bin")
    assert worker_of(serve(python))["file"] == str(beside)


def test_pth_file_and_editable_finder(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    other = package(tmp_path / "src", "kind = 'other'\n")
    (site / "extra.pth").write_text(f"{tmp_path / 'src'}\n")
    assert worker_of(serve(python))["file"] == str(other)
    (site / "extra.pth").unlink()
    released = package(site)
    # What an editable install of setuptools does: a finder of its own, put before the path's.
    (site / "_editable.py").write_text(
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'sglang':\n"
        f"            place = {str(tmp_path / 'src/sglang')!r}\n"
        "            return importlib.util.spec_from_file_location(\n"
        "                name, place + '/__init__.py', submodule_search_locations=[place])\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    (site / "_editable.pth").write_text("import _editable\n")
    found = worker_of(serve(python))
    assert found["file"] == str(other)
    assert [copy["file"] for copy in found["copies"]] == [str(released)]


def test_user_site(tmp_path: Path, serve: Serve) -> None:
    base = Path(sys.executable).resolve()
    variables = {"PYTHONUSERBASE": str(tmp_path / "user"), "HOME": str(tmp_path)}
    site = subprocess.run(
        [base, "-c", "import site; print(site.getusersitepackages())"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    file = package(Path(site))
    assert worker_of(serve(base, **variables))["file"] == str(file)
    assert worker_of(serve(base, "-s", **variables))["file"] is None


MODES = {
    "timestamp": py_compile.PycInvalidationMode.TIMESTAMP,
    "checked hash": py_compile.PycInvalidationMode.CHECKED_HASH,
    "unchecked hash": py_compile.PycInvalidationMode.UNCHECKED_HASH,
}


@pytest.mark.parametrize("kind", MODES)
def test_compiled_file_of_the_source(tmp_path: Path, serve: Serve, kind: str) -> None:
    python, site = environment(tmp_path)
    file = package(site)
    py_compile.compile(str(file), invalidation_mode=MODES[kind])
    found = worker_of(serve(python))
    assert (found["compiled"]["kind"], found["compiled"]["used"]) == (kind, True)
    assert found["compiled"]["code_sha256"] == found["source_code_sha256"]


@pytest.mark.parametrize("kind", MODES)
def test_compiled_file_of_another_source(tmp_path: Path, serve: Serve, kind: str) -> None:
    python, site = environment(tmp_path)
    file = package(site)
    py_compile.compile(str(file), invalidation_mode=MODES[kind])
    file.write_text("kind = 'patched'\n")
    os.utime(file, (1, 1))
    found = worker_of(serve(python))
    # Only an unchecked one is used although the source says something else.
    assert found["compiled"]["used"] is (kind == "unchecked hash")
    assert found["compiled"]["code_sha256"] != found["source_code_sha256"]


def test_compiled_file_that_is_damaged(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    file = package(site)
    compiled = Path(py_compile.compile(str(file)) or "")
    compiled.write_bytes(compiled.read_bytes()[:20])
    assert "code_sha256" not in worker_of(serve(python))["compiled"]
    compiled.write_bytes(b"")
    assert worker_of(serve(python))["compiled"]["kind"] == "damaged"


def test_looking_writes_nothing(tmp_path: Path, serve: Serve) -> None:
    python, site = environment(tmp_path)
    package(site)
    process = serve(python)
    before = sorted(path for path in (tmp_path / "venv").rglob("*"))
    resolved(process)
    assert sorted(path for path in (tmp_path / "venv").rglob("*")) == before


def test_another_program_is_not_taken_for_the_interpreter(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        process = collector.read_process(child.pid)
        assert process is not None
        process.argv = [sys.executable, "-m", "sglang.launch_server"]
        problems = Problems()
        assert collector.interpreter(process, [WORKER], SOURCES, 30, problems) is None
        assert "is not the running interpreter" in problems.found[0]["why"]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("argv", "flags", "first"),
    [
        (["python", "-m", "sglang.launch_server"], [], "/cwd"),
        (["python", "-O", "-X", "dev", "-m", "sglang.launch_server", "-x"], ["-O", "-X", "dev"], "/cwd"),
        (["python3", "-W", "ignore", "/venv/bin/sglang", "serve"], ["-W", "ignore"], "/venv/bin"),
        (["python3", "serve.py"], [], "/cwd"),
        (["python", "-c", "pass"], [], "/cwd"),
    ],
)
def test_python_start(argv: list[str], flags: list[str], first: str) -> None:
    assert collector.python_start(argv, "/cwd") == (flags, first)


@pytest.mark.parametrize(("port", "main"), [(None, None), (30001, 11), (30009, None)])
def test_without_a_unit_the_port_tells_servers_apart(port: int | None, main: int | None) -> None:
    command = ["/v/bin/python", "-m", "sglang.launch_server", "--port"]
    servers = [Process(10 + number, 1, "S", 1, 0, 0, "/", [*command, f"3000{number}"]) for number in range(2)]
    found = collector.main_of(None, {}, servers, None, port)
    assert (found.pid if found else None) == main
    only = collector.main_of(None, {}, servers[1:], None, None)
    assert only is servers[1]


@pytest.mark.parametrize(
    ("argv", "role", "rank"),
    [
        (["/v/bin/python", "-m", "sglang.launch_server", "--tp", "2"], "main", None),
        (["/v/bin/python3.11", "/v/bin/sglang", "serve", "--model", "m"], "main", None),
        (["sglang::scheduler"], "scheduler", 0),
        (["sglang::scheduler_TP3"], "scheduler", 3),
        (["sglang::scheduler_DP1_TP2_EP2"], "scheduler", 2),
        (["sglang::detokenizer"], "helper", None),
        (["/v/bin/python", "-c", "from multiprocessing.spawn import spawn_main"], "", None),
        (["grep", "-r", "sglang.launch_server"], "", None),
        ([], "", None),
    ],
)
def test_roles(argv: list[str], role: str, rank: int | None) -> None:
    process = Process(1, 0, "S", 1, 0, 0, "/", argv)
    assert (process.role, process.tp_rank) == (role, rank)


def test_secrets_stay_on_the_host() -> None:
    argv = [
        "python",
        "--api-key",
        "s1",
        "--admin-api-key=s2",
        "--max-total-tokens",
        "5",
        "--tokenizer-path",
        "/t",
        "--hf-token",
        "s3",
    ]
    shown = collector.redact(argv)
    assert shown == ["python", "--api-key", "***", "--admin-api-key=***", *argv[4:8], "--hf-token", "***"]
    variables = {
        "HF_TOKEN": "s4",
        "AWS_SECRET_ACCESS_KEY": "s5",
        "PYTHONPATH": "/p",
        "SGLANG_API_KEY": "s6",
        "OTHER": "s7",
    }
    assert collector.shown_environment(variables) == {
        "AWS_SECRET_ACCESS_KEY": None,
        "HF_TOKEN": None,
        "OTHER": None,
        "PYTHONPATH": "/p",
        "SGLANG_API_KEY": None,
    }


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers /server_info to those who know the key."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer hidden":
            self.send_error(401)
            return
        body = {
            "tp_size": 1,
            "api_key": "hidden",
            "version": "0.5.12.post1",
            "internal_states": [{"spec_gate": {"a": 1}}],
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing: the test's output is not the place."""


@pytest.fixture
def answering() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_server_info_with_the_servers_own_key(answering: int) -> None:
    document = collector.server_info("127.0.0.1", answering, "hidden", 5)
    assert document["error"] is None
    assert document["info"] == {"arguments": {"tp_size": 1}, "version": "0.5.12.post1", "gates": [{"a": 1}]}
    assert "hidden" not in json.dumps(document)
    assert "401" in collector.server_info("127.0.0.1", answering, None, 5)["error"]


def test_the_key_of_a_server_that_has_it_from_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps({"api-key": "hidden"}))
    problems = collector.Problems()
    assert collector.key_of(None, ["python", "--config", str(file)], problems) == "hidden"
    assert collector.key_of(None, ["python", "--api-key=given"], problems) == "given"
    assert collector.key_of(None, ["python"], problems) is None
    assert problems.found == []
    file.write_text("api-key: hidden")
    assert collector.key_of(None, ["python", "--config", str(file)], problems) is None
    assert "hidden" not in json.dumps(problems.found)
    assert problems.found[0]["what"] == "the server's key"


class Mumble(http.server.BaseHTTPRequestHandler):
    """Speaks something other than HTTP."""

    def handle(self) -> None:
        self.wfile.write(b"SSH-2.0-none\r\n\r\n")


class ServerV6(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[int]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def test_server_info_over_ipv6() -> None:
    asked: list[str | None] = []

    class Noted(Answer):
        def do_GET(self) -> None:
            asked.append(self.headers["Host"])
            super().do_GET()

    try:
        server = ServerV6(("::1", 0), Noted)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(server) as port:
        assert collector.server_info("::1", port, "hidden", 5)["info"]["version"] == "0.5.12.post1"
    assert asked == [f"[::1]:{port}"]


@pytest.mark.parametrize("address", ["127.0.0.1", "no host", "a:b"])
def test_server_info_of_something_else_is_an_error(address: str) -> None:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mumble)) as port:
        document = collector.server_info(address, port, None, 5)
    assert document["info"] is None
    assert document["error"].startswith("/server_info: ")


@pytest.mark.parametrize(
    ("argv", "deployment", "found"),
    [
        ([], {}, ("127.0.0.1", 30000)),
        ([], {"address": "10.0.0.1", "port": 31000}, ("10.0.0.1", 31000)),
        (["--host", "0.0.0.0", "--port=32000"], {"port": 31000}, ("127.0.0.1", 32000)),
        (["--host", "::"], {}, ("::1", 30000)),
    ],
)
def test_endpoint(argv: list[str], deployment: dict[str, Any], found: tuple[str, int]) -> None:
    assert collector.endpoint(argv, deployment) == found


@pytest.mark.parametrize("port", ["http", "-1", "0", "65536", "1.5", [1]])
def test_a_port_that_is_none_is_a_problem_and_ends_nothing(tmp_path: Path, port: Any) -> None:
    deployment = {"unit": "none.service", "release_path": str(tmp_path), "port": port}
    (tmp_path / "deployment.json").write_text(json.dumps(deployment))
    path = str(tmp_path / "deployment.json")
    document = collector.collect(
        {"unit": "none.service", "deployment_path": path, "modules": [], "port": None, "timeout": 1}, SOURCES
    )
    assert document["server"] == {"address": None, "port": None, "listener": None, "info": None, "error": "not asked"}
    assert {"what": "the server's address", "why": f"{str(port)!r} is not a port"} in document["problems"]


def test_who_listens(answering: int) -> None:
    processes = collector.read_processes()
    own = {os.getpid(): processes[os.getpid()]}
    assert collector.listener(answering, None, own, processes)["inside"] is True  # type: ignore[index]
    assert collector.listener(answering, None, {}, processes)["inside"] is False  # type: ignore[index]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert collector.listener(unused.getsockname()[1], None, own, processes) is None


def test_status_files_are_not_followed_and_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"secret": 1}')
    (tmp_path / "rank-0.json").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "rank-1.json")
    (tmp_path / "rank-2.json").write_text("[" * 100_000)
    (tmp_path / "rank-3.json").write_text('{"schema": "spec_gate.rank/1"}')
    (tmp_path / "rank-4.json").write_bytes(b" " * (collector.FILE_BYTES + 1))
    (tmp_path / "other.json").write_text("{}")
    found = collector.rank_files(str(tmp_path), None, Problems())
    assert [bool(entry["document"]) for entry in found] == [False, False, False, True, False]
    assert all(entry.get("error") for entry in found if not entry["document"])


def test_cgroup_members() -> None:
    def process(pid: int, cgroup: str) -> Process:
        return Process(pid, 1, "S", 1, 0, 0, cgroup, [])

    group = "/system.slice/sglang.service"
    processes = {
        p.pid: p for p in (process(1, group), process(2, group + "/sub"), process(3, group + "2"), process(4, "/"))
    }
    assert sorted(collector.members_of({"ControlGroup": group}, processes)) == [1, 2]
    assert collector.members_of({"ControlGroup": ""}, processes) == {}
    assert collector.members_of(None, processes) == {}


REQUEST = {
    "unit": "no-such.service",
    "deployment_path": "/nowhere/deployment.json",
    "modules": [WORKER],
    "port": None,
    "timeout": 5,
}


def test_the_command_prints_evidence_and_fits_a_command_line() -> None:
    command = evidence.command(REQUEST)
    assert len(command) < 100_000  # Linux takes 131072 bytes in one argument
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    document = json.loads(answer.stdout)
    assert (document["schema"], document["unit"], document["deployment"]) == (evidence.SCHEMA, None, None)
    assert document["privileged"] is (os.geteuid() == 0)


def test_a_host_without_python_is_told(tmp_path: Path) -> None:
    (tmp_path / "id").symlink_to("/usr/bin/id")
    command = evidence.command(REQUEST)
    (tmp_path / "sh").symlink_to("/bin/sh")
    answer = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, "python3 is not installed" in answer.stderr) == (127, True)


def test_a_process_that_ends_meanwhile_is_no_error() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert collector.read_process(child.pid) is None


def test_zombies_are_described_without_problems() -> None:
    child = subprocess.Popen(["/bin/true"])
    deadline = time.monotonic() + 10
    while (process := collector.read_process(child.pid)) is None or process.state != "Z":
        assert time.monotonic() < deadline
    problems = Problems()
    assert collector.describe(process, problems)["exe"] is None
    assert problems.found == []
    child.wait()


def test_saved_evidence_is_what_was_gathered(tmp_path: Path) -> None:
    documents = [evidence.unreachable("gpu-1", "down"), {"schema": evidence.SCHEMA, "host": "gpu-2", "error": None}]
    evidence.save(documents, tmp_path / "made")
    assert evidence.load(tmp_path / "made") == documents


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, "[]", '{"schema": "specgate.evidence/2", "host": "h"}', '{"schema": "specgate.evidence/1"}'],
)
def test_what_is_no_evidence_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(evidence.EvidenceError, match="holds no evidence"):
        evidence.load(tmp_path)
    (tmp_path / "gpu-1.json").write_text(text)
    with pytest.raises(evidence.EvidenceError, match=r"gpu-1\.json"):
        evidence.load(tmp_path)
