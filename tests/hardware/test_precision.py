"""What each word of `--precision` means is said once, without torch."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.catalog import find_type
from bapipe.hardware.precision import PRECISIONS, WORDS, find_precision


def test_the_words() -> None:
    assert WORDS == ("fp32", "tf32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
    assert all(find_precision(word).word == word for word in PRECISIONS)


@pytest.mark.parametrize(
    ("word", "weights", "activations", "casts", "peak"),
    [
        ("fp32", 4, 4, 0, "fp32"),
        ("tf32", 4, 4, 0, "tf32"),
        ("bf16", 2, 2, 0, "bf16"),
        ("fp16", 2, 2, 0, "fp16"),
        ("bf16-mixed", 4, 2, 2, "bf16"),
        ("fp16-mixed", 4, 2, 2, "fp16"),
    ],
)
def test_bytes_and_peaks(word: str, weights: int, activations: int, casts: int, peak: str) -> None:
    found = find_precision(word)
    assert (found.weight_bytes, found.activation_bytes, found.cast_bytes) == (weights, activations, casts)
    a100 = find_type("a100")
    assert found.peak(a100) == a100.flops[peak]
    assert (found.autocast is not None) == word.endswith("-mixed")
    assert found.scaled == (word == "fp16-mixed")
    assert found.tf32 == (word == "tf32")
    assert found.takes_masters == (word in ("bf16", "fp16"))


def test_an_accelerator_without_it_is_refused() -> None:
    with pytest.raises(BaPipeError, match=r"'v100-16' has no peak for bf16; it has fp32, fp16"):
        find_precision("bf16-mixed").peak(find_type("v100"))


@pytest.mark.parametrize(
    ("word", "near"), [("bf16_mixed", "bf16-mixed"), ("fp23", "fp32"), ("mixed-fp16", "fp16-mixed"), ("?", "")]
)
def test_an_unknown_word_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(BaPipeError, match="unknown precision") as raised:
        find_precision(word)
    assert ("did you mean" in str(raised.value)) == bool(near)
    assert near in str(raised.value)
    assert "use one of fp32, tf32, bf16" in str(raised.value)
