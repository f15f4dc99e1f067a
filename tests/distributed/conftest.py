"""Processes of these tests begin with torch loaded, unless `--cold` is given."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm(warm: None) -> None:
    """In every file of this folder."""
