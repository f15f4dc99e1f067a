"""Every picture of the documents shows what the program shows today."""

from __future__ import annotations

import json
import re

import pytest

from paths import REPOSITORY
from picture_sources import IMAGES, RECORD, picture_sources

SOURCES = picture_sources()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_picture_is_up_to_date(name: str) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert recorded.get(name) == SOURCES[name], f"docs/images/{name} is out of date; run scripts/pictures"


def test_every_picture_is_made_by_the_script_and_shown() -> None:
    there = {path.name for path in IMAGES.iterdir()} - {RECORD.name}
    assert there == set(SOURCES)
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"images/([\w.-]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == there
