"""Every link of the built site leads to a page that is there, and to a place on it: `check_links.py SITE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["broken_links", "main"]


class _Page(HTMLParser):
    """The links and the places of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.places.add(value)
            if value and (tag, name) in {("a", "href"), ("link", "href"), ("img", "src"), ("script", "src")}:
                self.links.add(value)


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_links(site: Path) -> list[str]:
    """`page: link` for each that leads nowhere; other sites are not asked."""
    pages = {path.resolve(): _read(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            there = target.exists() and (
                not place or target not in pages or place in pages[target].places or place == "top"
            )
            if not there:
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


def main(arguments: Sequence[str]) -> int:
    found = broken_links(Path(arguments[0]))
    for line in found:
        print(f"leads nowhere: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
