"""The load of benchmarks/gate.py."""

import asyncio
import itertools
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gate


@pytest.fixture
def uneven_server():
    """Answers each request like a server with speculation, every third one late."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(0.04 if next(numbers) % 3 == 0 else 0.01)
            body = b'{"meta_info": {"spec_verify_ct": 50, "spec_num_correct_drafts": 75}}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_all_workers_of_a_level_send_equally_many(uneven_server):
    result = asyncio.run(gate.level(uneven_server, 4, 0.1))
    assert result["requests"] >= 4
    assert result["requests"] % 4 == 0
    assert result["accept_len"] == 2.5
    assert result["tok_s"] > 0
