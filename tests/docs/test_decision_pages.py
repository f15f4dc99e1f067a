"""Every decision is one page of four parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paths import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_has_question_options_choice_and_consequence(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Question", "Options", "Choice", "Consequence"]
    assert text.startswith(f"# {int(page.stem[:4])}. ")
    assert len(text.splitlines()) <= 60
