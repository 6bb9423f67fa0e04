"""A running SGLang server over HTTP: how it is reached, and what it says about itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from diagnostics.prompts import Prompt


class ServerError(Exception):
    """The server did not give a usable answer; the message names the request and what came."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers: behind the Unix *socket* (``connect.tunnel``), to those who send its *key* if it has one.

    With an *admin_key* its ADMINISTRATIVE paths want that. The keys are in no representation of this object.
    """

    socket: str
    key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)


# Of the paths that are asked here, those that SGLang marks AuthLevel.ADMIN_OPTIONAL.
ADMINISTRATIVE = ("/set_internal_state", "/abort_request")


class _Keys(httpx.Auth):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        administrative = request.url.path in ADMINISTRATIVE and self._endpoint.admin_key
        if key := self._endpoint.admin_key if administrative else self._endpoint.key:
            request.headers["Authorization"] = f"Bearer {key}"
        yield request


def api_client(endpoint: Endpoint, timeout: float) -> httpx.AsyncClient:
    """Return a client for the server at *endpoint*; *timeout* (s) bounds each silence.

    SGLang closes idle connections after 5 s; each request therefore opens its own, so that no reset of a stale one is
    taken for a fault. The environment's proxies are for other hosts, never for this socket.
    """
    transport = httpx.AsyncHTTPTransport(uds=endpoint.socket, limits=httpx.Limits(max_keepalive_connections=0))
    return httpx.AsyncClient(
        transport=transport,
        base_url="http://server",
        auth=_Keys(endpoint),
        timeout=httpx.Timeout(timeout, pool=None),
        trust_env=False,
    )


@dataclass(frozen=True)
class Gate:
    """The gate's counters since the server's start, summed over data-parallel replicas."""

    mode: str
    threshold: int
    profile: str | None  # the id of the profile that it goes by; None with a threshold above 0
    transitions: int
    open_steps: int
    closed_steps: int
    running: int
    forced: str | None  # "open" or "closed" while something holds it there, whatever the load
    processes: tuple[tuple[int, int], ...]  # (pid, start ticks) of each replica's first rank


@dataclass(frozen=True)
class ServerInfo:
    """The parts of ``/server_info`` that the diagnostics use; ``accept_length`` is a mean since the server's start."""

    model: str
    version: str
    speculative: bool
    accept_length: float | None
    gate: Gate | None


@contextlib.contextmanager
def _fields_of(path: str) -> Iterator[None]:
    """Turn what goes wrong in taking the answer of *path* apart into a ServerError."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ServerError(f"{path} has an unexpected form ({type(error).__name__}: {error})") from error


def parse_server_info(document: Mapping[str, Any]) -> ServerInfo:
    """Raises ServerError when a field that is needed is missing or of the wrong kind."""
    with _fields_of("/server_info"):
        states = document["internal_states"]
        gates = [state["spec_gate"] for state in states if state.get("spec_gate")]
        lengths = [state["avg_spec_accept_length"] for state in states if "avg_spec_accept_length" in state]
        return ServerInfo(
            model=str(document["served_model_name"]),
            version=str(document["version"]),
            speculative=document["speculative_algorithm"] is not None,
            accept_length=sum(lengths) / len(lengths) if lengths else None,
            gate=_gate(gates) if gates else None,
        )


def _gate(gates: list[Mapping[str, Any]]) -> Gate:
    modes = {str(gate["mode"]) for gate in gates}
    return Gate(
        mode="closed" if "closed" in modes else modes.pop(),
        threshold=int(gates[0]["threshold"]),
        profile=gates[0].get("profile"),
        transitions=sum(gate["transitions"] for gate in gates),
        open_steps=sum(gate["open_steps"] for gate in gates),
        closed_steps=sum(gate["closed_steps"] for gate in gates),
        running=sum(gate["running"] for gate in gates),
        forced=gates[0]["settings"]["forced"],
        processes=tuple((int(g["identity"]["pid"]), int(g["identity"]["start_ticks"])) for g in gates),
    )


def error_message(body: Any) -> str:
    """The sentence in an error document of SGLang (both of its forms), or the document itself."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def transport_error(error: httpx.TransportError) -> str:
    """What broke, in httpx's term, and what the system said to it, if anything."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def http_error(body: bytes) -> str:
    """The message of an error answer, or the start of its text when it is no JSON."""
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body[:200].decode(errors="replace").strip() or "no message"


async def call(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    """Return the JSON answer of one request; raises ServerError for anything else."""
    try:
        response = await client.request(method, path, json=body)
    except httpx.TimeoutException as error:
        raise ServerError(f"{method} {path}: no answer in time") from error
    except httpx.TransportError as error:
        raise ServerError(f"{method} {path}: {transport_error(error)}") from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{method} {path}: HTTP {response.status_code}: {http_error(response.content)}")
    try:
        return response.json()
    except ValueError as error:
        raise ServerError(f"{method} {path}: the answer is no JSON: {response.text[:80]!r}") from error


async def server_info(client: httpx.AsyncClient) -> ServerInfo:
    """Ask ``/server_info``."""
    return parse_server_info(await call(client, "GET", "/server_info"))


async def set_gate(client: httpx.AsyncClient, **settings: Any) -> None:
    """Change *settings* of the running gate, named as on the command line: ``speculative_gate_force="closed"``.

    Raises ServerError when the server refuses one; its log says why.
    """
    answer = await call(client, "POST", "/set_internal_state", {"server_args": settings})
    if not answer or answer != [True] * len(answer):
        raise ServerError(f"POST /set_internal_state: the server refused {settings} and its log says why (fab logs)")


@contextlib.asynccontextmanager
async def gate_given_back(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """For the time of the block the gate may be held open or closed; afterwards, come what may, it is as it was.

    Raises ServerError when it could not be given back and read back: then it decides nothing any more.
    """
    found = (await server_info(client)).gate
    if found is None:
        raise ServerError("the server has no gate to hold: it runs without the patch")
    try:
        yield
    finally:
        await set_gate(client, speculative_gate_force=found.forced)
        now = (await server_info(client)).gate
        if now is None or now.forced != found.forced:
            raise ServerError(f"the gate is held {now.forced if now else None} and could not be given back")


async def running_requests(client: httpx.AsyncClient) -> tuple[int, int]:
    """Return how many requests run and how many wait, over all replicas."""
    answer = await call(client, "GET", "/v1/loads?include=core")
    with _fields_of("/v1/loads"):
        loads = answer["loads"]
        return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)


async def context_length(client: httpx.AsyncClient) -> int:
    """Return the longest prompt plus answer that the model takes, in tokens."""
    answer = await call(client, "GET", "/v1/models")
    with _fields_of("/v1/models"):
        return int(answer["data"][0]["max_model_len"])


async def tokenise(client: httpx.AsyncClient, model: str, prompt: Prompt) -> list[int]:
    """Return the token ids of *prompt* under the model's chat template."""
    body = {"model": model, "messages": list(prompt.messages)}
    answer = await call(client, "POST", "/v1/tokenize", body)
    with _fields_of("/v1/tokenize"):
        return [int(token) for token in answer["tokens"]]
