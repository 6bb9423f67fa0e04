"""The role router: what it refuses before any host is reached, and what it asks SGLang's router and says of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_deploy_refusals import ARGUMENTS, HOST, LOCAL, ROOT, deploy, local_play

KEY = "0123456789abcdef"
WORKER = "http://127.0.0.1:1"


def refusal(tmp_path: Path, **variables: Any) -> str:
    given = tmp_path / "given.yml"
    given.write_text(json.dumps(variables))
    hosts = f"{HOST}\n[sglang_router]\nfront ansible_ssh_executable=/bin/false"
    reachable = "service_address=192.0.2.4\nservice_networks=['192.0.2.10']"
    status, output = deploy(
        tmp_path, "-e", f"@{given}", hosts=hosts, variables=f"threshold=5\n{ARGUMENTS}\n{reachable}"
    )  # fmt: skip
    assert status != 0
    return output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"router_address": "front.example.org"}, "front: router_address is front.example.org"),
        ({"router_address": "0.0.0.0"}, "front: router_address is every interface of the host"),
        ({"router_metrics_address": "::"}, "front: router_metrics_address is every interface of the host"),
        ({"router_arguments": {"host": "0.0.0.0"}}, "front: router_arguments has host. Names are written without"),
        ({"router_arguments": {"--api-key": KEY}}, "front: router_arguments has --api-key. Names are written without"),
        ({"router_arguments": {"api-key": KEY}}, "front: router_arguments has api-key. Everybody on the host can read"),
        ({"router_arguments": {"control-plane-api-keys": [f"a:b:admin:{KEY}"]}}, "control-plane-api-keys. Everybody"),
        ({"router_arguments": {"postgres-db-url": KEY}}, "front: router_arguments has postgres-db-url. Everybody"),
        ({"router_control_key": "short"}, "front: router_control_key: a key has at least 16 characters"),
    ],
)  # fmt: skip
def test_before_any_host_is_reached(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    output = refusal(tmp_path, **given)
    assert reason in output
    assert "Nothing that serves was touched" in output
    assert "Cannot become root" not in output
    assert KEY not in output


def test_what_is_allowed_is_followed_by_a_connection(tmp_path: Path) -> None:
    output = refusal(
        tmp_path, router_address="0.0.0.0", router_all_interfaces=True, router_control_key=KEY,
        router_arguments={"log-level": "info", "tokenizer-path": "/m"},
    )  # fmt: skip
    assert "Cannot become root on gpu-1" in output
    assert KEY not in output


class Router(ThreadingHTTPServer):
    """SGLang's router as far as the role asks it: with a key for `/workers`, as 0.3.2 with control-plane keys."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.workers: dict[str, bool] = {}
        self.asked: list[str] = []
        self.lets_go = self.finds_healthy = True


class Handler(BaseHTTPRequestHandler):
    server: Router

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def allowed(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {KEY}":
            return True
        self.answer(401, {})
        return False

    def do_GET(self) -> None:
        if self.path == "/liveness":
            self.answer(200, {})
        elif self.allowed():
            workers = [{"url": url, "id": "1", "is_healthy": healthy} for url, healthy in self.server.workers.items()]
            self.answer(200, {"workers": workers})

    def do_POST(self) -> None:
        if self.allowed():
            url = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["url"]
            self.server.asked.append(f"POST {url}")
            self.server.workers[url] = self.server.finds_healthy
            self.answer(202, {})

    def do_DELETE(self) -> None:
        if self.allowed():
            self.server.asked.append(f"DELETE {self.path}")
            if self.server.lets_go:
                self.server.workers.clear()
            self.answer(202, {})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def play(tmp_path: Path, router: Router, key: str, *entries: str) -> tuple[int, str]:
    """Runs entries of the role on a host whose router is the stand-in; only who owns the list is left out."""
    shutil.copytree(ROOT / "roles/router", tmp_path / "roles/router")
    for path in (tmp_path / "roles/router/tasks").iterdir():
        path.write_text(re.sub(r"\n *(owner|group): root", "", path.read_text()))
    given = {"router_worker": WORKER, "router_worker_key": "", "router_batch": [WORKER]}
    tasks = [
        {"ansible.builtin.include_role": {"name": "router", "tasks_from": entry}, "vars": given} for entry in entries
    ]
    (tmp_path / "given.yml").write_text(json.dumps({"router_control_key": key, "_router_workers": f"{tmp_path}/list"}))
    return deploy(
        tmp_path, "-e", f"@{tmp_path}/given.yml", "-vvv", "--limit=a",
        hosts=f"a {LOCAL}\n[sglang_router]\nfront {LOCAL}",
        variables=f"router_port={router.server_address[1]}\nrouter_ready_timeout=2",
        playbook=local_play(tmp_path, tasks),
    )  # fmt: skip


def test_a_host_is_put_back_and_drained_with_the_key_which_is_not_shown(tmp_path: Path, router: Router) -> None:
    status, output = play(tmp_path, router, KEY, "put_back", "drain")
    assert status == 0, output
    assert router.asked == [f"POST {WORKER}", "DELETE /workers/1"]
    assert (tmp_path / "list").read_text() == ""
    assert KEY not in output


def test_what_a_router_that_does_not_do_it_said_last_is_told(tmp_path: Path, router: Router) -> None:
    router.lets_go = router.finds_healthy = False
    for entry, said in {
        "put_back": f"given {WORKER}, the router on front does not find it healthy. It said last: {{",
        "drain": f"told to let {WORKER} go, the router on front may still send it requests. It said last: {{",
    }.items():
        (tmp_path / entry).mkdir()
        status, output = play(tmp_path / entry, router, KEY, entry)
        assert status != 0
        assert f"a: 2 s (router_ready_timeout) after it was {said}" in output
        assert '"is_healthy": false' in output
        assert "un the same command again." in output
        assert KEY not in output


def test_a_router_with_another_key_is_told(tmp_path: Path, router: Router) -> None:
    status, output = play(tmp_path, router, KEY[::-1], "put_back")
    assert status != 0
    assert "a: the router on front does not tell its workers (" in output
    assert "It asks for another router_control_key than the inventory's" in output
    assert router.asked == []


@pytest.mark.parametrize("with_key", [True, False])
def test_the_launcher_hands_the_key_over_in_the_process(tmp_path: Path, with_key: bool) -> None:
    """A stand-in for the package tells what it was given; the router itself is tried in tests/hosts/test_rolling.py."""
    package = tmp_path / "sglang_router"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_router.py").write_text(
        "import types\n"
        "def parse_router_args(given): return types.SimpleNamespace(given=given, control_plane_api_keys=[])\n"
        "def launch_router(arguments): print(arguments.given, arguments.control_plane_api_keys)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    if with_key:
        (tmp_path / "control-key").write_text(KEY)
        environment["CREDENTIALS_DIRECTORY"] = str(tmp_path)
    launcher = ROOT / "roles/router/files/launch_router.py"
    done = subprocess.run(
        [sys.executable, launcher, "--port", "1"], env=environment, capture_output=True, text=True, check=True
    )
    keys = [("deploy", "deploy", KEY, "admin")] if with_key else []
    assert done.stdout == f"['--port', '1'] {keys}\n"
