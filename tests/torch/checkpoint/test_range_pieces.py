"""A run of elements of a tensor is few boxes, which are all of it and nothing else."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="checkpoints need torch: pip install bapipe[torch]")

from bapipe.torch.capturing.stage_module import Slice  # noqa: E402
from bapipe.torch.checkpoint.tensor_pieces import range_pieces  # noqa: E402


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 6, 1), (2, 2, 2, 3)])
def test_boxes_are_the_elements(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.arange(count)
    for begin, end in itertools.combinations(range(count + 1), 2):
        found = torch.full(shape, -1)
        pieces = range_pieces(whole[begin:end], begin, shape)
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        for piece in pieces:
            place = tuple(slice(at, at + size) for at, size in zip(piece.start, piece.tensor.shape, strict=True))
            assert (found[place] == -1).all()
            found[place] = piece.tensor
        expected = torch.where((whole >= begin) & (whole < end), whole, -1).view(shape)
        assert torch.equal(found, expected), (begin, end)


def test_of_a_part_of_a_layer() -> None:
    part = Slice(dim=0, start=4, size=3, of=10)
    (piece,) = range_pieces(torch.arange(5), 5, (3, 5), part)
    assert piece.start == (5, 0)
    assert piece.whole == (10, 5)
    assert range_pieces(torch.empty(0), 15, (3, 5)) == []
