"""One real chat request, and whether speculation accepts anything: what is checked after each start of the service."""

from __future__ import annotations

import time
from typing import Any

from diagnostics.limits import Limit
from diagnostics.prompts import Prompt
from diagnostics.server import Endpoint, ServerError, ServerInfo, api_client, call, server_info, tokenise
from diagnostics.traffic import FINISHED, TokenPrompt, accept_length, generate_body, text_of

PROMPT = Prompt(
    name="smoke",
    kind="chat",
    messages=({"role": "user", "content": "Tell me in a few sentences how bread is made."},),
    max_tokens=64,
)

# A draft of the wrong kind gives exactly 1.00 and one with random weights 1.05 to 1.12; trained pairs exceed 1.5.
DEFAULT_ACCEPT_LENGTH_FLOOR = 1.2

# The first request that samples under speculation has FlashInfer compile its sampling kernels: about 90 s on an H200.
COMPILE_TIMEOUT_S = 600.0


async def smoke(endpoint: Endpoint, *, floor: float, timeout: float) -> dict[str, Any]:
    """Send one chat request to *endpoint* and return ``{"ok", "reasons", "sent", "got", "accept_length", ...}``.

    *floor* is the accept length (tokens a verify step, the bonus token included) that must be exceeded where the server
    speculates; *timeout* (seconds) bounds each request but the last, which samples: no client shall be the first to do
    so and wait for kernels to be compiled. What it took is ``sampled_s``.
    """
    facts: dict[str, Any] = {"ok": False, "sent": None, "got": None, "accept_length": None, "limits": []}
    facts["sampled_s"] = None
    reasons: list[str] = []
    try:
        async with api_client(endpoint, timeout) as client:
            info = await server_info(client)
            facts |= {"model": info.model, "sglang_version": info.version, "speculative": info.speculative}
            facts["sent"] = chat_body(info.model)
            began = time.monotonic()
            answer = await call(client, "POST", "/v1/chat/completions", facts["sent"])
            facts["got"] = got = _read(answer, time.monotonic() - began)
            if not got["text"].strip():
                reasons.append("the answer has no text")
            if got["finish_reason"] not in FINISHED:
                reasons.append(f"finish reason {got['finish_reason']!r}; expected one of {', '.join(FINISHED)}")
            if info.speculative and not _held_closed(info):
                tokens = await tokenise(client, info.model, PROMPT)
                # SGLang's native interface: only this one tells the accept length of a single request.
                prompt = TokenPrompt(PROMPT.name, PROMPT.kind, tuple(tokens), PROMPT.max_tokens)
                generated = await call(client, "POST", "/generate", generate_body(prompt, stream=False))
                facts["accept_length"], limit, problem = _accept_length(generated, floor)
                facts["limits"] = [limit.document()]
                reasons += [problem] if problem else []
                facts["sampled_s"] = await _sample(endpoint, info.model, max(timeout, COMPILE_TIMEOUT_S))
    except ServerError as error:
        reasons.append(str(error))
    return facts | {"ok": not reasons, "reasons": reasons}


async def _sample(endpoint: Endpoint, model: str, timeout: float) -> float:
    """Seconds of one short request with a temperature and a nucleus."""
    body = chat_body(model) | {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9}
    async with api_client(endpoint, timeout) as client:
        began = time.monotonic()
        _read(await call(client, "POST", "/v1/chat/completions", body), 0)
        return round(time.monotonic() - began, 3)


def _read(answer: Any, seconds: float) -> dict[str, Any]:
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        return {
            "status": 200,
            "text": text_of(choice["message"]),
            "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "seconds": round(seconds, 3),
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerError(f"the chat answer has an unexpected form ({type(error).__name__}: {error})") from error


def _held_closed(info: ServerInfo) -> bool:
    """With a threshold of 1 a single request closes the gate: there is no acceptance to measure."""
    return info.gate is not None and info.gate.threshold == 1


def chat_body(model: str) -> dict[str, Any]:
    """Return a greedy request for ``/v1/chat/completions``."""
    return {"model": model, "messages": list(PROMPT.messages), "max_tokens": PROMPT.max_tokens, "temperature": 0}


def _accept_length(generated: Any, floor: float) -> tuple[float | None, Limit, str | None]:
    try:
        length = accept_length(generated["meta_info"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"/generate has an unexpected form ({type(error).__name__}: {error})") from error
    limit = Limit("accept length of a single request", length, "more than", floor)
    if length is None:
        return (
            None,
            limit,
            "the server speculates, but verified no draft: the gate may be closed by other traffic, or held closed "
            "(fab status)",
        )
    problem = limit.problem()
    cause = "the draft does not fit the target (wrong draft model, or EAGLE in place of EAGLE3)"
    return length, limit, f"{problem}: {cause}" if problem else None
