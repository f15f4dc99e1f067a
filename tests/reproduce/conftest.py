"""Every table is computed once for all tests of this folder."""

from __future__ import annotations

import pytest

from bapipe.reproduce import TABLES, Table


@pytest.fixture(scope="session")
def tables() -> dict[str, Table]:
    return {name: make() for name, make in TABLES.items()}
