"""The check of the built site's links."""

from __future__ import annotations

import sys
from pathlib import Path

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs" / "_ext"))

import check_links


def test_links_to_pages_and_places_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top-of-a">A</h1><a href="b.html#there">1</a><a href="#top-of-a">2</a><a href="https://x.y/z">3</a>'
        '<a href="b.html#gone">4</a><a href="c.html">5</a><img src="picture.png"><a href="sub%20page.html">6</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">B</p>')
    (tmp_path / "sub page.html").write_text("")
    assert check_links.broken_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "a.html: picture.png"]
    assert check_links.main([str(tmp_path)]) == 1
    (tmp_path / "a.html").write_text('<a href="b.html">1</a>')
    assert check_links.main([str(tmp_path)]) == 0
