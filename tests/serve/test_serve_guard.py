"""Other hosts, other sites and large bodies are refused by a server that runs."""

from __future__ import annotations

import socket

import pytest

from bapipe.serve.guard import LARGEST_BODY, allowed_host
from served import Served

SMALL = {
    "model": "alexnet",
    "cluster": "2xv100",
    "schedule": "data-parallel",
    "microbatch": "8",
    "global_batch": "16",
}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
@pytest.mark.parametrize("port", ["", ":8765", ":1"])
def test_its_own_names(host: str, port: str, served: Served) -> None:
    assert served.ask("/", headers={"Host": host + port}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8765", "evil.example@127.0.0.1",
        "10.0.0.1", "127.0.0.2", "0.0.0.0", "[::2]", "", "localhost:port", "localhost/", "127.0.0.1#@evil.example",
        "[::1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/plan", "/api/choices", "/assets/serve.js", "/nothing"])
def test_a_rebound_name_is_refused(host: str, path: str, served: Served) -> None:
    reply = served.ask(path, headers={"Host": host})
    assert reply.status in (400, 421)
    if reply.status == 421:
        assert reply.json["error"].startswith("this server answers to localhost")


def test_two_hosts_are_none(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert connection.recv(100).split()[1] in (b"400", b"421")


@pytest.mark.parametrize(
    ("header", "serving", "allowed"),
    [
        ("192.168.1.7:8765", "192.168.1.7", True),
        ("192.168.1.8:8765", "192.168.1.7", False),
        ("192.168.1.8:8765", "0.0.0.0", True),
        ("[fe80::1]", "::", True),
        ("evil.example", "0.0.0.0", False),
        (socket.gethostname(), "0.0.0.0", True),
        ("box.lan", "box.lan", True),
        ("box.lan", "127.0.0.1", False),
    ],
)
def test_the_address_that_was_asked_for(header: str, serving: str, allowed: bool) -> None:
    assert allowed_host(header, serving=serving) is allowed


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "https://127.0.0.1.evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_sites_are_refused(headers: dict[str, str], method: str, served: Served) -> None:
    reply = served.ask("/api/plan", SMALL, method=method, headers=headers)
    assert (reply.status, reply.json) == (403, {"error": "requests of other sites are refused"})


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link that was shared
    ],
)
def test_its_own_page_and_links_to_it_are_not(headers: dict[str, str], served: Served) -> None:
    own = {**headers, "Origin": f"http://127.0.0.1:{served.port}"}
    assert served.ask("/api/plan", SMALL, headers=own).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/assets/serve.js", "/api/choices", "/api/plan", "/nothing", "/files/plan.json"]
)
def test_every_reply_has_the_headers(path: str, served: Served) -> None:
    for headers in ({}, {"Host": "evil.example"}):
        found = served.ask(path, headers=headers).headers
        policy = dict(part.split(" ", 1) for part in found["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert {word for words in policy.values() for word in words.split()} <= {"'none'", "'self'", "data:"}
        assert found["x-content-type-options"] == "nosniff"
        assert found["referrer-policy"] == "no-referrer"
        assert found["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in found
        assert "server" not in found


@pytest.mark.parametrize(
    "line", ["POST /api/plan", "GET /api/plan", "PUT /", "POST /nothing", "GET /files/plan.json"]
)
def test_a_large_body_is_refused_before_it_is_read(line: str, served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as connection:
        head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {LARGEST_BODY + 1}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_without_a_length_is_refused_where_it_grows(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as connection:
        connection.sendall(b"POST /api/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        left = LARGEST_BODY + 1
        while left:  # one byte too many, so that all of it is read before the answer
            size = min(left, 0x10000)
            connection.sendall(f"{size:x}\r\n".encode() + b" " * size + b"\r\n")
            left -= size
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_at_the_limit_is_read(served: Served) -> None:
    reply = served.ask("/api/plan", method="POST", body=b" " * LARGEST_BODY)
    assert (reply.status, reply.json["error"][:28]) == (422, "the body must be a JSON obje")


def test_long_headers_and_half_requests_end(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n")
            found = connection.recv(100)
        except ConnectionError:  # it need not wait for the end of what it refuses
            found = b""
        assert not found or found.split()[1] in (b"400", b"431")
    with socket.create_connection(("127.0.0.1", served.port), timeout=120) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
    assert served.ask("/").status == 200
