"""What an older click lacks is not used while the command line is loaded."""

from __future__ import annotations

import click
import pytest

from loaded_files import load_file
from paths import REPOSITORY


def test_types_of_parameters_need_no_type_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParamType:
        """As of click 8.1: no type argument."""

    monkeypatch.setattr(click, "ParamType", ParamType)
    values = load_file(REPOSITORY / "src" / "bapipe" / "cli" / "values.py", "values_with_an_older_click")
    assert values.Numbers().convert("1,2", None, None) == (1.0, 2.0)
