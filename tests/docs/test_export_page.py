"""The guide's tables of engines are what the exports go by."""

from __future__ import annotations

import re

import pytest

from bapipe.exporters.capability_table import capability_table, version_table
from bapipe.exporters.plan_features import Feature
from bapipe.exporters.targets import TARGETS
from paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "guide" / "export.md"


@pytest.mark.parametrize("mark, made", [("versions", version_table()), ("table", capability_table())])
def test_the_page_has_the_table(mark: str, made: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n?<!-- end -->", text, re.DOTALL)
    assert found is not None
    assert found[1].strip() == made.strip(), "write fill_page(text) of exporters/capability_table.py to the page"


def test_nothing_is_both_held_and_refused() -> None:
    assert not {name for name, target in TARGETS.items() if target.holds & target.refuses}
    assert len(capability_table().splitlines()) == 2 + len(Feature)
