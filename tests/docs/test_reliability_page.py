"""The figures of the reliability page are those of the results beside the programs."""

from __future__ import annotations

import sys

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "reliability"))

from tables import BEGIN, END, PAGE, rendered


def test_the_page_has_the_figures_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == rendered(), (
        "run python benchmarks/reliability/tables.py"
    )
