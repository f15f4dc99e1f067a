"""What stands before every request: the right host, no other site, no large body; and headers after it.

A web page of another site can make its reader's browser ask 127.0.0.1. It is kept out three times: by the Host
header (a name that was rebound to 127.0.0.1 is not ours), by Origin and Sec-Fetch-Site (a script of another site),
and by headers that forbid it to embed or read what it gets.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LARGEST_BODY", "Guard", "allowed_host"]

LARGEST_BODY = 1_000_000
"""bytes"""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def allowed_host(header: str, *, serving: str) -> bool:
    """Whether a Host header names this machine: localhost, the address served at, any port.

    Where every address is served, any IP address and this machine's own name do, since only names can be rebound.
    """
    try:
        name = urlsplit(f"//{header}").hostname
        _ = urlsplit(f"//{header}").port
    except ValueError:
        return False
    if not name or "@" in header or "/" in header:
        return False
    if name in _LOCAL or name == serving.lower():
        return True
    if serving not in _ANY:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == socket.gethostname().lower()
    return True


class Guard:
    """Refuses what should not be answered, and puts the headers on everything else."""

    def __init__(self, app: ASGIApp, *, serving: str) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(dressed, *refusal)
            return
        body = await _body(receive)
        if body is None:
            await _refuse(dressed, 413, f"a request may have {LARGEST_BODY} bytes; send less")
            return
        await self._app(scope, _replayed(body, receive), dressed)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not allowed_host(hosts[0], serving=self._serving):
            return 421, "this server answers to localhost, 127.0.0.1 and its own address only; use one of them"
        for origin in headers.get("origin", []):
            if origin.partition("://")[2].lower() != hosts[0].lower():
                return 403, "requests of other sites are refused"
        site, mode = headers.get("sec-fetch-site", ["none"])[-1], headers.get("sec-fetch-mode", [""])[-1]
        if site in ("cross-site", "same-site") and mode != "navigate":
            return 403, "requests of other sites are refused"
        length = headers.get("content-length", ["0"])[-1]
        if length.isascii() and length.isdigit() and int(length[:18]) > LARGEST_BODY:
            return 413, f"a request may have {LARGEST_BODY} bytes, got {length[:18]}; send less"
        return None


async def _body(receive: Receive) -> bytes | None:
    """All of the body; None where it is too large, whatever its Content-Length said."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
