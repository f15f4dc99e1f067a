"""Layer tables written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.models.layer_table import read_layer_table
from bapipe.models.layers import Model, Split
from paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "layers-small-cnn.toml"
HEAD = 'schema = "bapipe.layers/1"\nname = "net"\ninput_elements = 10\n'
LAYER = '[[layers]]\nname = "a"\nforward_flops = 100\nparameters = 5\noutput_elements = 20\n'
CONV = '[[layers]]\nname = "c"\nconv = [3, 8, 3, 4, 5]\n'


def read(tmp_path: Path, text: str) -> Model:
    file = tmp_path / "layers.toml"
    file.write_text(text, encoding="utf-8")
    return read_layer_table(file)


def test_example() -> None:
    model = read_layer_table(EXAMPLE)
    assert [layer.name for layer in model.layers] == ["conv1", "conv2", "pool", "hidden", "classifier"]
    assert model.parameters == 896 + 18496 + 4194560 + 2570
    assert model.layers[1].forward_flops == 2 * 32 * 64 * 9 * 32 * 32


def test_convolution_fills_in_the_rest(tmp_path: Path) -> None:
    (layer,) = read(tmp_path, HEAD + CONV).layers
    assert (layer.kind, layer.conv) == ("conv", (3, 8, 3, 4, 5))
    assert layer.forward_flops == 2 * 3 * 8 * 9 * 20
    assert layer.parameters == 3 * 8 * 9 + 8
    assert layer.output_elements == 160
    assert layer.saved_elements == 10
    assert layer.split == Split(channels=8)


def test_what_is_said_wins_over_the_convolution(tmp_path: Path) -> None:
    (layer,) = read(
        tmp_path, HEAD + CONV + "parameters = 216\nstash_elements = 1\nsplit = 0\nforward_flops = 7\n"
    ).layers
    assert (layer.parameters, layer.saved_elements, layer.split, layer.forward_flops) == (216, 1, None, 7)


def test_defaults_of_other_layers(tmp_path: Path) -> None:
    second = LAYER.replace('"a"', '"b"') + 'shares_weights_with = "a"\nerror_elements = 0\nkernels = 3\n'
    first, layer = read(tmp_path, HEAD + LAYER + second).layers
    assert (first.kind, first.saved_elements, first.split) == ("layer", 10, None)
    assert layer.saved_elements == 20
    assert layer.moved_elements == 60
    assert (layer.shares_weights_with, layer.error_elements, layer.kernels) == ("a", 0, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\n', r'schema must be "bapipe.layers/1", got nothing'),
        ('schema = "bapipe.cluster/1"\n', r"got 'bapipe.cluster/1'"),
        (HEAD, r"'layers' is missing"),
        (HEAD + "layers = []\n", r"has no layers; add \[\[layers\]\]"),
        (HEAD.replace("10", "-1") + LAYER, r"input_elements must be at least 0"),
        (
            HEAD + LAYER.replace("parameters", "paramters"),
            r"unknown key 'paramters' \(did you mean 'parameters'\?\)",
        ),
        (HEAD + LAYER.replace("parameters = 5\n", ""), r"layers\[0\] 'a': 'parameters' is missing"),
        (HEAD + LAYER.replace("forward_flops = 100\n", ""), r"'forward_flops' is missing; add it, or conv ="),
        (HEAD + LAYER.replace("output_elements = 20\n", ""), r"'output_elements' is missing"),
        (HEAD + LAYER.replace("100", "-1"), r"forward_flops must be from 0 to 1e18, got -1"),
        (HEAD + LAYER.replace("100", "nan"), r"forward_flops: expected a finite number"),
        (HEAD + LAYER.replace("= 5", "= 5.5"), r"parameters: expected a whole number"),
        (HEAD + LAYER.replace('"a"', '""'), r"a layer needs a name"),
        (HEAD + LAYER + LAYER, r"layers\[1\] 'a': an earlier layer has this name"),
        (HEAD + CONV.replace(", 5]", "]"), r"conv must be \[input channels, .*got \[3, 8, 3, 4\]"),
        (HEAD + CONV.replace("5]", "0]"), r"each from 1 to 1e6; got \[3, 8, 3, 4, 0\]"),
        (HEAD + CONV.replace("5]", "9" * 400 + "]"), r"conv\[4\]: expected a whole number within 64 bits"),
        (HEAD + LAYER.replace("= 5", "= " + "9" * 400), "parameters: expected a whole number within 64 bits"),
        (HEAD + LAYER + "split = 1\n", r"split must be 0 \(never\) or at least 2 channels, got 1"),
        (HEAD + LAYER + "kernels = 0\n", r"kernels must be at least 1"),
        (HEAD + LAYER + "weight_flops = 101\n", r"weight_flops must be at most forward_flops, 100; got 101"),
        (
            HEAD + LAYER + "elementwise_elements = 1e6\n",
            r"elementwise_elements must be at most moved_elements, 40",
        ),
        (HEAD + LAYER + 'shares_weights_with = "a"\n', r"shares_weights_with names no earlier layer: 'a'"),
        (
            HEAD + LAYER.replace('"a"', '"embed"') + LAYER + 'shares_weights_with = "embd"\n',
            r"'embd' \(did you mean 'embed'\?\)",
        ),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
