"""Pages, help texts and the report use the glossary's words, not the older ones in its second column."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from bapipe.cli import COMMANDS
from bapipe.reporting.html.document import make_subject
from bapipe.reporting.html.sections import sections_html
from command import bapipe
from paths import REPOSITORY
from report_plans import planned, run_of

OLD = re.compile(
    r"\b(mini-batch(es)?|rivals?|put off|for a moment|told|of so many|kept whole|of best|(?<!aria-)live)\b",
    re.IGNORECASE,
)
EXEMPT = {"glossary.md", "versioning.md", "changelog.md"}
"""pages that name the older words as such"""


def found(text: str) -> list[str]:
    """Older words outside of code, where keys of files keep them."""
    prose = re.sub(r"`[^`\n]*`", "", text)
    return [match[0] for match in OLD.finditer(prose.replace("PipeDream's mini-batches", ""))]


def pages() -> Iterator[str]:
    yield "README.md"
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        if page.name not in EXEMPT and "_build" not in page.parts and "benchmarks" not in page.parts:
            yield page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", list(pages()))
def test_a_page_uses_the_words_of_the_glossary(page: str) -> None:
    assert found((REPOSITORY / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_uses_them(name: str) -> None:
    assert found(bapipe(name, "--help").stdout) == []


def test_the_report_uses_them() -> None:
    plan, profile = planned("zero bubble")
    html = sections_html(make_subject(plan, profile=profile, record=run_of(plan)))
    assert found(re.sub(r"<[^>]+>", " ", html)) == []


def test_an_older_word_is_found() -> None:
    assert found("a mini-batch of `rivals`, live at stage 1") == ["mini-batch", "live"]
