"""A private package index, with a certificate of its own authority, that only a proxy reaches; all on this machine."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_WR, create_connection, socket
from typing import Any

NAME = "index.example.org"
"""Resolved nowhere: who asks the proxy for it gets the index."""


class Index(ThreadingHTTPServer):
    """Lists and serves wheels as indexes do (PEP 503), and can break off in the middle of one."""

    def __init__(self, wheels: Path, folder: Path) -> None:
        self.served: list[str] = []
        """The wheels that were asked for, in order."""
        self.breaks_at = ""
        """Project of which half a wheel is sent, and no more until `go_on`; then the connection is closed."""
        self.go_on = threading.Event()
        for wheel in wheels.glob("*.whl"):
            listed = folder / "www/simple" / wheel.name.partition("-")[0]
            listed.mkdir(parents=True)
            (listed / wheel.name).symlink_to(wheel)
        self.authority = folder / "authority.pem"
        super().__init__(("127.0.0.1", 0), partial(_Wheels, directory=str(folder / "www")))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*make_certificate(folder))
        # Each thread does its own handshake: a client that does none must not keep the others waiting.
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)


class _Wheels(SimpleHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name.endswith(".whl"):
            self.server.served.append(name)
        if not name.startswith(f"{self.server.breaks_at}-"):
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.server.go_on.wait()
        return None

    def log_message(self, *arguments: Any) -> None:
        pass


class Proxy(ThreadingHTTPServer):
    """Lets through to the index, and to nothing else."""

    def __init__(self, address: str, index: Index) -> None:
        super().__init__((address, 0), _Tunnel)
        self.index = index
        self.asked: set[str] = set()
        """Host and port of every connection that was asked for."""

    @property
    def url(self) -> str:
        return f"http://{self.server_name}:{self.server_port}"


class _Tunnel(BaseHTTPRequestHandler):
    server: Proxy

    def do_CONNECT(self) -> None:
        self.server.asked.add(self.path)
        if self.path != f"{NAME}:443":
            return self.send_error(403)
        with create_connection(("127.0.0.1", self.server.index.server_port)) as index:
            self.send_response(200)
            self.end_headers()
            answers = threading.Thread(target=_pump, args=(index, self.connection))
            answers.start()
            _pump(self.connection, index)
            answers.join()
        self.close_connection = True
        return None

    def log_message(self, *arguments: Any) -> None:
        pass


def _pump(source: socket, sink: socket) -> None:
    """What the one sends goes to the other, until either is gone."""
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(SHUT_WR)
    except OSError:
        pass


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key of the index, by an authority whose certificate is `authority.pem`."""
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    commands = [
        "-subj /CN=authority -keyout authority.key -out authority.pem",
        f"-subj /CN={NAME} -addext subjectAltName=DNS:{NAME} -addext basicConstraints=critical,CA:FALSE "
        "-CA authority.pem -CAkey authority.key -keyout index.key -out index.pem",
    ]
    for command in commands:
        subprocess.run([*new, *command.split()], cwd=folder, check=True, capture_output=True)
    return folder / "index.pem", folder / "index.key"


@contextmanager
def serving(*servers: ThreadingHTTPServer) -> Iterator[None]:
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
