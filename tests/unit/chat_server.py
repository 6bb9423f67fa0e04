"""A small HTTP server on a Unix socket that streams answers as SGLang does, and misbehaves when the prompt says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnostics.prompts import Prompt

if TYPE_CHECKING:
    from diagnostics.server import Endpoint

TOKENS_PER_EVENT = (1, 3, 2)  # as with speculation: several tokens at a time


def prompt(behaviour: str, kind: str = "chat") -> Prompt:
    """A prompt that makes the server behave as *behaviour* names."""
    return Prompt(behaviour, kind, ({"role": "user", "content": behaviour},), max_tokens=6)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(tokens: int, finish: dict[str, Any] | None = None, **meta: Any) -> bytes:
    """One event of an answer with *tokens* output tokens by now, as SGLang's ``/generate`` streams it."""
    facts = {"prompt_tokens": 7, "cached_tokens": 1, "completion_tokens": tokens, "finish_reason": finish} | meta
    return event(text="word " * tokens, meta_info=facts)


class ChatServer:
    """Counts what it sees; ``info`` is what ``/server_info`` answers and may change while it runs."""

    def __init__(self, info: dict[str, Any] | None = None, key: str | None = None) -> None:
        self.key = key
        self.info = info or server_info()
        self.bodies: list[dict[str, Any]] = []
        # SGLang's own spec_accept_length would be 6 / 2; the right one is 1 + 4 / 2.
        self.counts: dict[str, Any] = {"spec_verify_ct": 2, "spec_num_correct_drafts": 4, "spec_accept_length": 3.5}
        self.context = 100
        self.running = self.most_running = self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, path, _ = head.split(maxsplit=2)
                sizes = [
                    line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length:")
                ]
                body = json.loads(await reader.readexactly(int(sizes[0]))) if sizes else None
                if self.key is not None and f"\r\nauthorization: Bearer {self.key}\r\n".lower() not in head.lower():
                    reply(writer, {"error": "Unauthorized"}, status=401)
                    continue
                await self.answer(method, path, body, writer)
        writer.close()

    async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path in ("/v1/chat/completions", "/generate"):
            self.bodies.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await (self.generate if path == "/generate" else self.chat)(body, writer)
            finally:
                self.running -= 1
        elif path == "/server_info":
            reply(writer, self.info)
        elif path == "/v1/models":
            reply(writer, {"data": [{"id": "tiny", "max_model_len": self.context}]})
        elif path == "/v1/loads?include=core":
            reply(writer, {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})
        elif path == "/v1/tokenize":
            reply(writer, {"tokens": [ord(character) for character in body["messages"][-1]["content"]]})
        elif path == "/set_internal_state":
            reply(writer, self.set_internal_state(body["server_args"]))
        else:
            reply(writer, {"message": f"no {path}"}, status=404)

    def set_internal_state(self, changes: dict[str, Any]) -> list[bool]:
        """Hold the gate, or give it back."""
        state = self.info["internal_states"][0]["spec_gate"]
        state["settings"]["forced"] = changes["speculative_gate_force"]
        state["mode"] = changes["speculative_gate_force"] or "open"
        return [True]

    async def chat(self, body: Any, writer: asyncio.StreamWriter) -> None:
        await self.behave(body["messages"][-1]["content"], False, writer)

    async def generate(self, body: Any, writer: asyncio.StreamWriter) -> None:
        await self.behave("".join(map(chr, body["input_ids"])), body["stream"], writer)

    async def behave(self, behaviour: str, stream: bool, writer: asyncio.StreamWriter) -> None:
        if behaviour == "refused":
            reply(writer, {"object": "error", "message": "too long"}, status=400)
        elif behaviour == "broken":
            reply(writer, "Internal Server Error", status=500)
        elif behaviour == "silent":
            await asyncio.sleep(3600)
        elif behaviour == "hang up":
            writer.transport.abort()
        elif stream:
            await self.stream(behaviour, writer)
        else:
            reply(writer, completion("" if behaviour == "empty" else "some text") | {"meta_info": self.counts})

    async def stream(self, behaviour: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        total = 0
        for tokens in TOKENS_PER_EVENT:
            total += tokens
            chunk(writer, delta(total))
            await writer.drain()
            await asyncio.sleep(0.01)
            if total > 1 and behaviour == "reset":
                writer.transport.abort()
                return
            if total > 1 and behaviour == "stall":
                await asyncio.sleep(3600)
        done = b"data: [DONE]\n\n"
        endings = {
            "error event": [event(error={"message": "out of memory"}), done],
            "no end": [delta(total, {"type": "stop"})],
            "no reason": [done],
            "aborted": [delta(total, {"type": "abort", "message": "out of memory", "status_code": 500}), done],
            "garbage": [b"data: {not json\n\n"],
        }
        for part in endings.get(behaviour, [delta(total, {"type": "length"}, **self.counts), done]):
            chunk(writer, part)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def completion(text: str) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def reply(writer: asyncio.StreamWriter, document: Any, status: int = 200) -> None:
    body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def server_info(speculative: bool = True, **gate: Any) -> dict[str, Any]:
    """What ``/server_info`` of a patched server says; *gate* changes the gate's fields, ``gate=None`` leaves it out."""
    state: dict[str, Any] = {"avg_spec_accept_length": 2.5}
    if gate.get("gate", True) is not None:
        counters = {"mode": "open", "threshold": 5, "transitions": 0, "open_steps": 0, "closed_steps": 0, "running": 0}
        state["spec_gate"] = (
            counters | {"identity": {"pid": 100, "start_ticks": 7}, "settings": {"forced": None}} | gate
        )
    return {
        "served_model_name": "tiny",
        "version": "0.5.12.post1",
        "speculative_algorithm": "EAGLE3" if speculative else None,
        "internal_states": [state],
    }


@contextlib.asynccontextmanager
async def listening(server: ChatServer, folder: Path, key: str | None = None) -> AsyncIterator[Endpoint]:
    """Serve on a Unix socket in *folder*; yields the endpoint for a client that has *key*."""
    from diagnostics.server import Endpoint  # what it imports is missing where serve_tcp runs

    path = str(folder / "s")
    listener = await asyncio.start_unix_server(server.serve, path)
    try:
        yield Endpoint(path, key)
    finally:
        listener.close()


async def serve_tcp(port: int) -> None:
    """Serve on the loopback until killed, as the service of a host does."""
    server = ChatServer()
    server.context = 100_000
    listener = await asyncio.start_server(server.serve, "127.0.0.1", port)
    print(f"listening on {port}", flush=True)
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_tcp(int(sys.argv[1])))
