"""ONNX graphs as layer tables, beside the built-in tables of the same models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs onnx: pip install onnx")

from onnx import TensorProto, helper

from bapipe.errors import BaPipeError
from bapipe.models.builtin import builtin_model
from bapipe.models.layer_table import layer_table_toml, read_layer_table
from bapipe.models.layers import Layer, Model
from bapipe.models.model_spec import parse_model_spec
from bapipe.models.onnx_graph import read_onnx
from bapipe.models.onnx_layers import onnx_model
from command import bapipe
from onnx_graphs import GraphMaker, gpt2_graph, resnet18_graph, vgg16_graph

FLOAT = TensorProto.FLOAT


def _model(path: Path, **dimensions: int) -> Model:
    return onnx_model(read_onnx(path, dimensions=dimensions))


def _read_back(model: Model, folder: Path) -> Model:
    (folder / "layers.toml").write_text(layer_table_toml(model), encoding="utf-8")
    return read_layer_table(folder / "layers.toml")


def _alike(layer: Layer, wanted: Layer) -> None:
    """All but the names."""
    assert replace(layer, name="", kind="") == replace(wanted, name="", kind=""), wanted.name


def test_a_chain_of_convolutions_is_the_built_in_table(tmp_path: Path) -> None:
    model, wanted = _model(vgg16_graph(tmp_path / "vgg16.onnx")), builtin_model("vgg16")
    assert model.parameters == 138_357_544
    assert model.input_elements == wanted.input_elements
    assert [layer.name for layer in model.layers[:3]] == ["features.0", "features.2", "features.5"]
    for layer, other in zip(model.layers, wanted.layers, strict=True):
        dropped = other.name in ("fc6", "fc7")  # whose dropout an export for evaluation lacks
        if dropped:
            count = other.output_elements
            other = replace(
                other,
                saved_elements=other.saved_elements - 1.25 * count,
                moved_elements=(other.moved_elements or 0) - 2.25 * count,
                elementwise_elements=(other.elementwise_elements or 0) - 2.25 * count,
            )
        split = other.split and replace(other.split, by="output channels")
        _alike(layer, replace(other, split=split, weight_flops=other.forward_flops))
    assert _read_back(model, tmp_path) == model


def test_sizes_are_of_one_sample_whatever_the_batch(tmp_path: Path) -> None:
    alone = _model(vgg16_graph(tmp_path / "vgg16.onnx"))
    assert _model(vgg16_graph(tmp_path / "vgg16.onnx", batch=6)) == alone
    assert _model(vgg16_graph(tmp_path / "vgg16.onnx"), batch=4) == alone


def test_residual_blocks_are_layers(tmp_path: Path) -> None:
    model, wanted = _model(resnet18_graph(tmp_path / "resnet18.onnx")), builtin_model("resnet18")
    assert [layer.name for layer in model.layers] == ["conv1", *(layer.name for layer in wanted.layers[1:9]), "fc"]
    for layer, other in zip(model.layers[:8], wanted.layers[:8], strict=True):
        _alike(layer, replace(other, weight_flops=other.forward_flops))
    # The pool is a layer of its own there, and goes with the last block here.
    block, pool = wanted.layers[8:10]
    last = model.layers[8]
    assert last.output_elements == pool.output_elements == 512
    assert last.moved_elements == (block.moved_elements or 0) + (pool.moved_elements or 0)
    assert model.parameters == wanted.parameters == 11_689_512


@pytest.mark.parametrize("fused", [True, False])
def test_a_transformer_is_cut_into_halves_of_blocks(tmp_path: Path, fused: bool) -> None:
    tokens, d, heads, blocks = 64, 768, 12, 12
    path = gpt2_graph(tmp_path / "gpt2.onnx", width=d, blocks=blocks, heads=heads, tokens=tokens, fused=fused)
    model, wanted = _model(path, sequence=tokens), builtin_model("gpt2", sequence=tokens)
    assert len(model.layers) == 2 + 2 * blocks
    assert model.parameters == wanted.parameters == 124_439_808
    embedding, attention, mlp, head = model.layers[0], model.layers[1], model.layers[2], model.layers[-1]
    assert [layer.name for layer in (embedding, attention, mlp)] == ["wte", "h.0.attn", "h.0.mlp"]
    assert (head.shares_weights_with, head.parameters) == (embedding.name, d * 50257)
    assert (embedding.kind, embedding.output_elements) == ("embedding", d * tokens)
    assert embedding.weight_reads < 0.05  # a gather; the positions, of which the file holds no tokens, are read
    own = wanted.layers[1]
    scores = 4.0 * d * tokens**2
    assert attention.forward_flops == own.forward_flops + (0 if fused else scores / 2)  # no masked half is skipped
    assert attention.weight_flops == own.weight_flops
    assert attention.parameters == own.parameters
    assert (attention.kind, attention.kernels, attention.output_elements) == ("attention", 4, d * tokens)
    # Without dropout (2.25 passes, a mask of a quarter) and the copies of heads (2 passes, one kept).
    extra = 0.0 if fused else heads * tokens**2
    assert attention.saved_elements == pytest.approx(
        own.saved_elements - 1.25 * d * tokens + (0 if fused else extra - heads * tokens)
    )
    if fused:
        # The bias of each linear layer is an Add of its own here.
        assert attention.elementwise_elements == (own.elementwise_elements or 0) + (8 - 4.25) * d * tokens
    assert mlp.saved_elements == wanted.layers[2].saved_elements - 0.25 * d * tokens
    assert mlp.forward_flops == wanted.layers[2].forward_flops
    assert _read_back(model, tmp_path) == model


def test_a_mask_that_all_blocks_read_cuts_nothing_off(tmp_path: Path) -> None:
    sizes = {"width": 32, "blocks": 2, "heads": 2, "tokens": 8}
    plain = _model(gpt2_graph(tmp_path / "a.onnx", **sizes), sequence=8)
    masked = _model(gpt2_graph(tmp_path / "b.onnx", **sizes, mask=True), sequence=8)
    assert len(masked.layers) == len(plain.layers)
    for layer, other in list(zip(masked.layers, plain.layers, strict=True))[:3]:
        assert layer.output_elements == other.output_elements + 64
        assert layer.error_elements == other.output_elements


def test_open_branches_are_cut_where_least_crosses(tmp_path: Path) -> None:
    """An output that every later layer reads, as a decoder reads its encoder's."""
    made = GraphMaker()
    source = x = made.linear("x", "encoder", 16, 16, bias=False)
    for index in range(3):
        y = made.linear(made.add("Concat", x, source, axis=-1), f"block.{index}.up", 32, 64, bias=False)
        x = made.linear(made.add("Relu", y), f"block.{index}.down", 64, 16, bias=False)
    model = _model(made.save(tmp_path / "open.onnx", {"x": (FLOAT, ("n", 4, 16))}, x))
    # In the last block only one value crosses: nothing after it reads the encoder's.
    assert [layer.output_elements for layer in model.layers] == [64, 128, 128, 256, 64]
    assert [layer.kernels for layer in model.layers] == [1, 2, 2, 1, 1]


def test_a_recurrent_layer_counts_its_steps(tmp_path: Path) -> None:
    made = GraphMaker()
    weights = (made.weight("W", 1, 32, 6), made.weight("R", 1, 32, 8), made.weight("B", 1, 64))
    x = made.add("LSTM", made.add("Transpose", "x", perm=[1, 0, 2]), *weights, hidden_size=8)
    (layer,) = _model(made.save(tmp_path / "lstm.onnx", {"x": (FLOAT, (2, 5, 6))}, x)).layers
    assert (layer.kind, layer.kernels, layer.parameters) == ("lstm", 5, 32 * 14 + 64)
    assert layer.forward_flops == 2 * 5 * 32 * (6 + 8)
    assert layer.weight_reads == (6 + 8 * 5) / 14


def _refused(folder: Path, made: GraphMaker, output: str, message: str, **dimensions: int) -> None:
    path = made.save(folder / "net.onnx", {"x": (FLOAT, ("n", "length", 4))}, output)
    with pytest.raises(BaPipeError, match=message) as caught:
        _model(path, **dimensions)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def product() -> tuple[GraphMaker, str]:
        made = GraphMaker()
        return made, made.linear("x", "net", 4, 4)

    made, x = product()
    _refused(tmp_path, made, x, "dimension 1 of input 'x' is free; give it, as --dim length=128")
    _refused(tmp_path, made, x, "no free dimension 'lenght' .did you mean 'length'.*free are length, n", lenght=3)
    _refused(tmp_path, made, x, "--dim length must be at least 1, got 0", length=0)
    made, x = product()
    made.nodes[-1].domain = "com.other"
    _refused(tmp_path, made, x, "is Add of com.other, whose work is not known", length=3)
    made, x = product()
    x = made.add("DequantizeLinear", x, x)
    _refused(tmp_path, made, x, "of a quantised model; export the one that is trained", length=3)
    made = GraphMaker()
    _refused(tmp_path, made, made.add("Relu", "x"), "has no convolution or matrix product", length=3)
    (tmp_path / "net.onnx").write_bytes(b"\x0a\xff\xff\xff")
    with pytest.raises(BaPipeError, match="cannot be read as an ONNX model"):
        _model(tmp_path / "net.onnx")
    with pytest.raises(BaPipeError, match="there is no file"):
        _model(tmp_path / "none.onnx")
    with pytest.raises(BaPipeError, match=r"run `bapipe import-onnx net.onnx -o layers.toml` first"):
        parse_model_spec("net.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BaPipeError, match="needs onnx, which is missing; pip install onnx"):
        _model(tmp_path / "net.onnx")


def test_a_branch_by_values_is_refused(tmp_path: Path) -> None:
    inner = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "inner", [], [
        helper.make_tensor_value_info("y", FLOAT, None)])  # fmt: skip
    made = GraphMaker()
    x = made.add("If", "x", then_branch=inner, else_branch=inner)
    _refused(tmp_path, made, x, "is If, whose work depends on values", length=3)


def test_from_a_file_to_a_plan_by_commands(tmp_path: Path) -> None:
    gpt2_graph(tmp_path / "small.onnx", width=64, blocks=4, heads=4, tokens=32)
    made = bapipe("import-onnx", "small.onnx", "--dim", "sequence=32", "-o", "layers.toml", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "10 layers" in made.stdout
    planned = bapipe("plan", "layers.toml", "--cluster", "2xv100", "--global-batch", "16", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    for arguments, message in (
        (("-o", "layers.json"), "a layer table is a .toml file"),
        (("--dim", "sequence", "-o", "layers.toml"), "--dim looks like sequence=128"),
        (("-o", "layers.toml"), "dimension 1 of input 'tokens' is free"),
    ):
        refused = bapipe("import-onnx", "small.onnx", *arguments, folder=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
