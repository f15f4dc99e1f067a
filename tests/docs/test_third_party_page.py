"""Every package that BaPipe is installed with, and all data of others, is on the page of notices."""

from __future__ import annotations

import re
import tomllib

from paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "third-party.md").read_text(encoding="utf-8")


def test_every_dependency_is_named() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(item for name in extras if name != "dev" for item in extras[name])]
    for requirement in needed:
        name = re.split(r"[<>=!~\[; ]", requirement)[0]
        assert re.search(rf"^\| [^|]*\b{re.escape(name)}\b", PAGE, re.MULTILINE), f"{name} is not on the page"


def test_data_of_others_is_named() -> None:
    for folder in re.findall(r"`(bapipe/[\w/.]+)`", PAGE):
        assert (REPOSITORY / "src" / folder).exists(), folder
