"""Every picture of the documents shows what the program shows today."""

from __future__ import annotations

import json
import re

import pytest

from paths import REPOSITORY
from picture_sources import IMAGES, RECORD, drawn_pictures, picture_sources

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return picture_sources()


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_picture_is_up_to_date(sources: dict[str, str], name: str) -> None:
    assert RECORDED[name] == sources.get(name), f"docs/images/{name} is out of date; run scripts/pictures"


@pytest.mark.parametrize("name", sorted(drawn_pictures()))
def test_a_drawing_is_what_its_command_draws(name: str) -> None:
    drawn = (IMAGES / name).read_text(encoding="utf-8")
    assert drawn == drawn_pictures()[name], f"docs/images/{name} is out of date; run scripts/pictures"


def test_every_picture_is_made_by_the_script_and_shown(sources: dict[str, str]) -> None:
    there = {path.name for path in IMAGES.iterdir() if path.suffix != ".json"}
    assert there == set(sources) == set(RECORDED)
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"images/([\w.-]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == there
