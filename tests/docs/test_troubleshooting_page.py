"""The troubleshooting page quotes messages; each must be one that the code has."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from paths import REPOSITORY

ROOT = REPOSITORY
PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")


def rendered(node: ast.AST) -> str | None:
    """A string as the page would quote it: … for what is filled in. None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = rendered(node.left), rendered(node.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


def plain(text: str) -> str:
    """White space and runs of … alike."""
    return re.sub(r"(… ?)+…", "…", " ".join(text.split()))


@functools.cache
def messages() -> list[str]:
    """Every string of the package that could be a message."""
    found = set()
    for path in sorted((ROOT / "src" / "bapipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = rendered(node)
            if text is not None and " " in text:
                found.add(plain(text))
    return sorted(found)


def quoted() -> list[str]:
    """What the page quotes: code that has a … or stands first in a row of a table, and is no command."""
    cells = re.findall(r"^\| `+(.+?)`+(?:, and a table)? \|", PAGE, re.MULTILINE)
    inline = re.findall(r"`([^`\n]*…[^`\n]*)`", "\n".join(line for line in PAGE.splitlines() if line[:1] != "|"))
    return sorted({plain(text) for text in (*cells, *inline) if text not in ("…", "Connection refused")})


def test_the_page_quotes_messages() -> None:
    assert len(quoted()) > 40


@pytest.mark.parametrize("text", quoted())
def test_a_quoted_message_is_in_the_code(text: str) -> None:
    parts = text.split("…")
    pattern, longest = re.compile(".*?".join(re.escape(part) for part in parts)), max(parts, key=len)
    assert any(pattern.search(message) for message in messages() if longest in message), text
