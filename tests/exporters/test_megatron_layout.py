"""Layout strings: what Megatron expands them to, and what it refuses."""

from __future__ import annotations

import random

import pytest

from bapipe.errors import BaPipeError
from bapipe.exporters.megatron_layout import layout_text, looks_like_layout, parse_layout
from bapipe.exporters.module_stages import BlockStage


def test_repeats_are_expanded_as_megatron_expands_them() -> None:
    assert [stage.blocks for stage in parse_layout("Et*3|(tt|)*29,t|L")] == [3, *[2] * 29, 1, 0]
    assert [stage.blocks for stage in parse_layout("Et | t*2 | L")] == [1, 2, 0]


def test_round_trips() -> None:
    chance = random.Random(0)
    for _ in range(200):
        count = chance.randint(1, 9)
        blocks = [chance.randint(0, 5) for _ in range(count)]
        blocks[0] = blocks[0] or 1
        stages = tuple(
            BlockStage(embedding=index == 0, blocks=number, head=index == count - 1)
            for index, number in enumerate(blocks)
        )
        assert parse_layout(layout_text(stages)) == stages


def test_equal_rows_are_written_once() -> None:
    assert layout_text(parse_layout("Ett|tt|tt|tt|ttt|L")) == "Ett|(tt|)*3t*3|L"


@pytest.mark.parametrize(
    "text, message",
    [
        ("tt|tL", "one E first"),
        ("Et|tt", "one L last"),
        ("Et|m|L", "multi-token prediction"),
        ("Et|(t|)*L", "no part of a layout"),
        ("E(t*9999|)*9999L", "more than 100000 layers"),
        ("Ex|tL", "no part of a layout"),
    ],
)
def test_what_megatron_refuses_is_refused(text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        parse_layout(text)


def test_a_layout_is_told_from_a_file_name() -> None:
    assert looks_like_layout("Et*3|(tt|)*4L")
    assert not looks_like_layout("layout.txt")
    assert not looks_like_layout("EtL")
