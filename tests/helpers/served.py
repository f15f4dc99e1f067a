"""A real `bapipe serve` on a free port of this machine, and requests to it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

BAPIPE = str(Path(sys.executable).with_name("bapipe"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def ask(
        self,
        path: str,
        values: Mapping[str, object] | None = None,
        *,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            target = path if values is None else f"{path}?{urlencode(values)}"
            connection.request(method, target, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=found, body=response.read())
        finally:
            connection.close()


@contextmanager
def serving(*arguments: str, cwd: Path | None = None) -> Iterator[Served]:
    """`bapipe serve --port 0` with these arguments, ended as Ctrl+C ends it."""
    command = [BAPIPE, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and "http://" not in line:
            line = process.stdout.readline()
        assert line, f"{' '.join(command)} said nothing"
        yield Served(url=line[line.index("http://") :].split()[0], process=process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert process.stdout is not None
        process.stdout.close()
