"""Binds an address and runs the application until it is stopped."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import webbrowser
from collections.abc import Callable

import uvicorn

from bapipe.errors import BaPipeError
from bapipe.serve.app import ServeSettings, make_app

__all__ = ["bind", "run_server"]

_BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        raise BaPipeError(
            f"cannot serve at {host[:80]} port {port}: {error}; choose another --port or --host"
        ) from None
    return listening


def run_server(settings: ServeSettings, *, port: int, open_page: bool, say: Callable[[str], None]) -> None:
    """Serve until Ctrl+C. `say` is called with the page's address, and a warning where others can reach it."""
    listening = bind(settings.host, port)
    with contextlib.closing(listening):
        host, bound = listening.getsockname()[:2]
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            shown = f"[{host}]" if ":" in host else host
        else:
            say(f"warning: everyone who reaches {host} can ask this server and see the files of its folder")
            shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
            shown = f"[{shown}]" if ":" in shown else shown
        url = f"http://{shown}:{bound}/"
        config = uvicorn.Config(
            make_app(settings),
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            http="h11",
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        # From here on Ctrl+C ends it in order, planning processes included. Until uvicorn listens to it, asyncio
        # would cancel all that is under way, and could wait for a process that is half started.
        before = signal.signal(signal.SIGINT, server.handle_exit)
        try:
            say(f"BaPipe plans at {url} until Ctrl+C")
            if open_page:
                webbrowser.open(url)
            server.run(sockets=[listening])
        finally:
            signal.signal(signal.SIGINT, before)
