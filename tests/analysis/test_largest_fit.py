"""The ladder of what fits: sizes found by halving, rows by the planner, pictures for narrow screens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bapipe.analysis.largest_fit import LADDER, SizeRange, _last_fitting, climb_ladder
from bapipe.errors import BaPipeError
from bapipe.models.builtin import builtin_model, size_option
from bapipe.planner import Request
from bapipe.reporting.terminal.fit_table import fit_page, fit_svg
from command import bapipe
from made_profiles import made_cluster, made_profile


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_last_that_fits_is_found(count: int) -> None:
    for last in range(-1, count):
        assert _last_fitting(lambda place, last=last: place <= last, count) == (None if last < 0 else last)


def test_every_rung_of_its_kind_reaches_at_least_as_far_as_the_one_before() -> None:
    count = 6
    profile = made_profile(
        {"x": [3.0] * count}, boundary=[1.0] * count, weights=[4.0] * count, saved_activations=[9.0] * count,
        sizes=(1, 2, 4, 8),
    )  # fmt: skip
    found = climb_ladder(
        lambda _: profile,
        lambda size: Request(global_batch=4 * size, microbatch=size, effort="low"),
        made_cluster({"x": 2}, bandwidth=1e3, memory=130.0),
        SizeRange(least=1, step=0, most=8),
        quantity="batch",
        asked=1,
    )
    assert [rung.name for rung in found.rungs] == [rung.name for rung in LADDER]
    largest = {rung.name: rung.largest or 0 for rung in found.rungs}
    data, layers = largest["data parallelism"], largest["and layers recompute, as each needs"]
    assert data <= largest["and layers recompute"] <= layers
    assert largest["pipeline stages"] <= layers
    assert layers > data
    for text in (fit_svg(found, title="<made>"), fit_page(found, title="<made>")):
        assert "&lt;made&gt;" in text
        assert all(rung.name in text for rung in found.rungs)


def test_built_in_models_have_sizes_to_change() -> None:
    deep = size_option("gpt2", "depth")
    assert (deep.name, deep.usual) == ("blocks", 12)
    assert len(builtin_model("gpt2", blocks=3).layers) < len(builtin_model("gpt2").layers)
    assert size_option("gnmt-8", "depth").least == 4
    assert size_option("llama-7b", "sequence").usual == 4096
    with pytest.raises(BaPipeError, match="has no sequence to change"):
        size_option("vgg16", "sequence")


def test_the_command_writes_table_page_and_json(tmp_path: Path) -> None:
    words = ("fit", "gpt2", "--cluster", "1xv100", "--memory-limit", "8GB", "--optimizer", "adam")
    page, picture = tmp_path / "fit.html", tmp_path / "fit.svg"
    told = bapipe(*words, "--json", "--report", str(page), "--svg", str(picture))
    assert told.returncode == 0, told.stderr
    rungs = {rung["name"]: rung for rung in json.loads(told.stdout)["rungs"]}
    assert rungs["and layers recompute"]["largest"] > rungs["data parallelism"]["largest"]
    assert "width=device-width" in page.read_text()
    assert picture.read_text().startswith("<svg")
    refused = bapipe("fit", "profile.json", "--cluster", "1xv100", "--largest", "depth")
    assert refused.returncode != 0
