"""Addresses as other programs want them."""

from __future__ import annotations

from typing import Any


def url_host(address: str) -> str:
    """``::1`` to ``[::1]``, as a URL (RFC 3986, 3.2.2) and SGLang's router have it; other addresses as they are."""
    return f"[{address}]" if ":" in address else address


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"url_host": url_host}
