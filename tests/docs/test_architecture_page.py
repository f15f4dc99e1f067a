"""The architecture and how-to pages name files that exist, and every folder of the package."""

from __future__ import annotations

import re

import pytest

from paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
HOW_TO = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs" / "howto").glob("*.md"))
SOURCES = REPOSITORY / "src" / "bapipe"
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z0-9_]+\.(?:py|toml))`", PAGE + HOW_TO)))


@pytest.mark.parametrize("path", [path for path in NAMED if not path.startswith(("tests/", "docs/"))])
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert (SOURCES / path).is_file()


@pytest.mark.parametrize("path", [path for path in NAMED if path.startswith("tests/")])
def test_a_test_that_a_page_names_exists(path: str) -> None:
    assert (REPOSITORY / path).is_file()


def test_every_folder_is_in_the_picture() -> None:
    folders = {path.name for folder in (SOURCES, SOURCES / "torch") for path in folder.iterdir() if path.is_dir()}
    missing = {name for name in folders - {"__pycache__"} if not re.search(rf"\b{name}\b", PAGE)}
    assert not missing


def test_nothing_lies_loose() -> None:
    loose = {path.name for path in SOURCES.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "errors.py", "units.py"}
    assert {path.name for path in (SOURCES / "torch").glob("*.py")} == {"__init__.py"}


def test_file_and_class_names_do_not_repeat() -> None:
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in SOURCES.rglob("*.py"):
        where = path.relative_to(SOURCES).as_posix()
        if path.name != "__init__.py" and not where.startswith("cli/"):
            files.setdefault(path.name, []).append(where)
        for name in re.findall(r"^\s*class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            classes.setdefault(name, []).append(where)
    assert not {name: found for name, found in files.items() if len(found) > 1}
    assert not {name: found for name, found in classes.items() if len(found) > 1}
