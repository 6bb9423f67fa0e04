"""The smoke test passes only with text, a finish reason and, where the server speculates, accepted drafts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import ChatServer, listening, prompt, server_info

from diagnostics import smoke as smoke_module
from diagnostics.server import Endpoint, ServerError, api_client, context_length, running_requests, tokenise
from diagnostics.smoke import smoke


def run(folder: Path, server: ChatServer, floor: float = 1.2, timeout: float = 30.0) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        async with listening(server, folder) as socket:
            return await smoke(socket, floor=floor, timeout=timeout)

    return asyncio.run(scenario())


def test_a_good_server_passes_and_the_document_tells_what_went_over(tmp_path: Path) -> None:
    document = run(tmp_path, ChatServer())
    assert document["reasons"] == []
    assert document["ok"] is True
    assert document["sent"]["messages"] == list(smoke_module.PROMPT.messages)
    assert document["got"]["text"] == "some text"
    assert document["got"]["finish_reason"] == "stop"
    assert document["accept_length"] == 3.0
    assert document["model"] == "tiny"


@pytest.mark.parametrize("length", [1.0, 1.2])
def test_an_accept_length_at_the_floor_fails(tmp_path: Path, length: float) -> None:
    server = ChatServer()
    server.counts |= {"spec_verify_ct": 10, "spec_num_correct_drafts": round(10 * (length - 1))}
    document = run(tmp_path, server)
    assert document["ok"] is False
    assert document["reasons"] == [
        f"accept length of a single request: {length:g}; allowed is more than 1.2: the draft does not fit the target "
        "(wrong draft model, or EAGLE in place of EAGLE3)"
    ]
    (limit,) = document["limits"]
    assert (limit["found"], limit["rule"], limit["allowed"], limit["kept"]) == (length, "more than", 1.2, False)


def test_speculation_that_verified_nothing_fails(tmp_path: Path) -> None:
    server = ChatServer()
    server.counts = {}
    assert "verified no draft" in run(tmp_path, server)["reasons"][0]


def test_without_speculation_there_is_no_accept_length_to_check(tmp_path: Path) -> None:
    server = ChatServer(server_info(speculative=False, gate=None))
    server.counts = {}
    document = run(tmp_path, server)
    assert document["ok"] is True
    assert document["accept_length"] is None


def test_a_threshold_of_one_leaves_no_accept_length_to_check(tmp_path: Path) -> None:
    server = ChatServer(server_info(threshold=1))
    server.counts = {}
    assert run(tmp_path, server)["ok"] is True


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("empty", "the answer has no text"),
        ("refused", "POST /v1/chat/completions: HTTP 400: too long"),
        ("broken", "POST /v1/chat/completions: HTTP 500: Internal Server Error"),
        ("hang up", "POST /v1/chat/completions: RemoteProtocolError"),
    ],
)
def test_a_bad_answer_fails_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, reason: str
) -> None:
    monkeypatch.setattr(smoke_module, "PROMPT", prompt(behaviour))
    document = run(tmp_path, ChatServer())
    assert document["ok"] is False
    assert document["reasons"][0].startswith(reason)


def test_a_silent_server_fails_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_module, "PROMPT", prompt("silent"))
    assert run(tmp_path, ChatServer(), timeout=0.3)["reasons"] == ["POST /v1/chat/completions: no answer in time"]


def test_a_server_info_of_another_form_fails(tmp_path: Path) -> None:
    document = run(tmp_path, ChatServer({"version": "9"}))
    assert document["ok"] is False
    assert document["reasons"][0].startswith("/server_info has an unexpected form")


ODD = (
    [],
    {},
    None,
    5,
    {"loads": [{}]},
    {"loads": 5},
    {"data": []},
    {"data": [{}]},
    {"tokens": None},
    {"tokens": "abc"},
)


@pytest.mark.parametrize("answer", ODD, ids=str)
def test_an_answer_of_another_form_is_a_server_error(answer: Any) -> None:
    async def scenario() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=json.dumps(answer)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            with pytest.raises(ServerError, match="/v1/loads has an unexpected form"):
                await running_requests(client)
            with pytest.raises(ServerError, match="/v1/models has an unexpected form"):
                await context_length(client)
            with pytest.raises(ServerError, match="/v1/tokenize has an unexpected form"):
                await tokenise(client, "m", prompt("plain"))

    asyncio.run(scenario())


@pytest.mark.parametrize(("sent", "ok"), [("the-key", True), ("another", False), (None, False)])
def test_a_server_that_asks_for_a_key_gets_it(tmp_path: Path, sent: str | None, ok: bool) -> None:
    async def scenario() -> dict[str, Any]:
        async with listening(ChatServer(key="the-key"), tmp_path, key=sent) as endpoint:
            assert "the-key" not in repr(endpoint)
            return await smoke(endpoint, floor=1.2, timeout=30.0)

    document = asyncio.run(scenario())
    assert document["ok"] is ok, document["reasons"]
    assert ok or document["reasons"] == ["GET /server_info: HTTP 401: Unauthorized"]


@pytest.mark.parametrize("speculative", [True, False])
def test_the_last_request_samples_where_the_server_speculates(tmp_path: Path, speculative: bool) -> None:
    server = ChatServer(server_info(speculative=speculative))
    document = run(tmp_path, server)
    assert document["ok"] is True, document["reasons"]
    temperatures = [body["temperature"] for body in server.bodies if "messages" in body]
    assert [temperature > 0 for temperature in temperatures] == ([False, True] if speculative else [False])
    assert (document["sampled_s"] is not None) == speculative


def test_administrative_requests_send_the_admin_key_where_there_is_one(tmp_path: Path) -> None:
    def sent(path: str, admin_key: str | None) -> str | None:
        endpoint = Endpoint("socket", "the-key", admin_key)
        assert "the-" not in repr(endpoint)
        request = httpx.Request("POST", f"http://server{path}")
        return next(api_client(endpoint, 1.0).auth.sync_auth_flow(request)).headers.get("Authorization")

    assert sent("/set_internal_state", "the-admin-key") == "Bearer the-admin-key"
    assert sent("/set_internal_state", None) == "Bearer the-key"
    assert sent("/server_info", "the-admin-key") == "Bearer the-key"
