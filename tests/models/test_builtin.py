"""Built-in models: parameters to the unit, FLOPs as published, and what crosses each cut."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.models.builtin import BUILTIN_NAMES, builtin_model, is_builtin
from bapipe.models.layers import Layer, Model


def gmac(model: Model) -> float:
    return sum(layer.forward_flops for layer in model.layers) / 2e9


def named(model: Model, name: str) -> Layer:
    return next(layer for layer in model.layers if layer.name == name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vgg16", 138_357_544),
        ("alexnet", 61_100_840),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-70b", 68_976_648_192),
    ],
)
def test_parameters_to_the_unit(name: str, parameters: int) -> None:
    assert builtin_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("layers", "millions"), [(32, 445.62), (42, 550.56), (60, 739.45), (74, 886.37), (118, 1348.1), (158, 1767.9)]
)
def test_gnmt_has_the_parameters_of_table_iv(layers: int, millions: float) -> None:
    digits = 2 if layers < 100 else 1
    assert round(builtin_model(f"gnmt-{layers}").parameters / 1e6, digits) == millions


@pytest.mark.parametrize(
    ("name", "expected"), [("vgg16", 15.47), ("alexnet", 0.714), ("resnet18", 1.814), ("resnet50", 4.089)]
)
def test_published_multiply_adds(name: str, expected: float) -> None:
    assert gmac(builtin_model(name)) == pytest.approx(expected, rel=1e-3)


def test_one_training_image_of_resnet50_is_12_150_gmac() -> None:
    """Forward, error and gradient, less the error of the first convolution (shared/design/fpga.md)."""
    model = builtin_model("resnet50", granularity="conv")
    assert 3 * gmac(model) - model.layers[0].forward_flops / 2e9 == pytest.approx(12.150, abs=5e-4)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_table_is_sound(name: str) -> None:
    model = builtin_model(name)
    names = [layer.name for layer in model.layers]
    assert len(set(names)) == len(names)
    assert model.name == name
    assert model.description
    for layer in model.layers:
        assert layer.forward_flops >= 0
        assert layer.output_elements > 0
        assert layer.saved_elements > 0
        assert 0 <= (layer.elementwise_elements or 0) <= (layer.moved_elements or 0)
        assert (layer.weight_flops or 0) <= layer.forward_flops
        assert layer.shares_weights_with is None or layer.shares_weights_with in names


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_blocks_and_convolutions_agree(name: str) -> None:
    blocks, convs = builtin_model(name), builtin_model(name, granularity="conv")
    assert blocks.parameters == convs.parameters
    assert gmac(blocks) == pytest.approx(gmac(convs))
    assert len(convs.layers) == {"resnet18": 22, "resnet50": 55}[name]
    assert all(layer.conv for layer in convs.layers if layer.kind == "conv")
    ends = {layer.name: layer.output_elements for layer in blocks.layers if layer.kind == "block"}
    last = {"resnet18": "conv2", "resnet50": "conv3"}[name]
    assert {name: named(convs, f"{name}.{last}").output_elements for name in ends} == ends


def test_conv_dimensions_give_flops_and_outputs() -> None:
    for layer in (*builtin_model("vgg16").layers, *builtin_model("resnet50", granularity="conv").layers):
        if layer.conv:
            inputs, outputs, kernel, height, width = layer.conv
            assert layer.forward_flops == 2 * inputs * outputs * kernel**2 * height * width
            assert layer.split is not None
            assert layer.split.channels == outputs


def test_cuts_inside_a_residual_carry_the_skip() -> None:
    model = builtin_model("resnet50", granularity="conv")
    block_input, projected, narrow = 256 * 56**2, 512 * 28**2, 128 * 56**2
    assert named(model, "layer1.2.conv3").output_elements == block_input
    assert named(model, "layer2.0.downsample").output_elements == projected + block_input
    assert named(model, "layer2.0.conv1").output_elements == narrow + projected
    assert named(model, "layer2.0.conv3").output_elements == projected
    assert named(model, "layer2.1.conv1").output_elements == 128 * 28**2 + projected


def test_saved_activations_is_what_autograd_was_seen_to_keep() -> None:
    """Unique saved storages of one image, measured with torch: VGG-16 18.315 M elements, ResNet-50 21.531 M."""
    assert sum(layer.saved_elements for layer in builtin_model("vgg16").layers) == pytest.approx(
        18.315e6, rel=2e-3
    )
    assert sum(layer.saved_elements for layer in builtin_model("resnet50").layers) == pytest.approx(
        21.531e6, rel=5e-3
    )


def test_gnmt_cuts_and_stash() -> None:
    model = builtin_model("gnmt-8")
    size = 50 * 1024
    carried = {layer.name: layer.output_elements / size for layer in model.layers if layer.name != "classifier"}
    assert carried == {
        "source-embedding": 1,
        "encoder-1": 2,
        "encoder-2": 1,
        "encoder-3": 1,
        "encoder-4": 1,
        "target-embedding": 2,
        "decoder-1": 2,
        "decoder-2": 2,
        "decoder-3": 2,
        "decoder-4": 1,
    }
    assert named(model, "encoder-3").saved_elements / size == 7.25
    assert named(model, "decoder-3").saved_elements / size == 8.25
    assert 50 < named(model, "decoder-1").saved_elements / size < 60
    assert named(model, "classifier").saved_elements == size + 50 * 32320


def test_splits() -> None:
    model = builtin_model("gnmt-8")
    splits = {layer.name: (layer.split.channels, layer.split.by) for layer in model.layers if layer.split}
    assert splits == {
        "source-embedding": (1024, "output channels"),
        "encoder-1": (2, "directions"),
        "target-embedding": (1024, "output channels"),
        "classifier": (32320, "vocabulary"),
    }
    assert all(layer.split is None for layer in builtin_model("resnet50").layers if layer.kind == "block")


def test_tied_heads_share_with_the_embedding() -> None:
    head = builtin_model("gpt2").layers[-1]
    assert head.shares_weights_with == "embedding"
    assert head.parameters == 50257 * 768
    assert builtin_model("llama-7b").layers[-1].shares_weights_with is None


def test_bert_heads() -> None:
    model = builtin_model("bert-base", head="mlm")
    assert model.parameters == 109_514_298
    assert [layer.name for layer in model.layers[-2:]] == ["transform", "decoder"]


def test_grouped_queries_of_llama_70b() -> None:
    attention = named(builtin_model("llama-70b"), "block-0.attention")
    assert attention.parameters == 2 * 8192**2 + 2 * 8192 * 1024 + 8192


def test_flops_of_transformers_follow_the_sequence() -> None:
    short, long = builtin_model("gpt2", sequence=512), builtin_model("gpt2", sequence=1024)
    assert 2 < gmac(long) / gmac(short) < 2.2
    mlp = named(long, "block-0.mlp")
    assert mlp.forward_flops == 2 * 8 * 768**2 * 1024
    attention = named(long, "block-0.attention")
    assert attention.forward_flops - (attention.weight_flops or 0) == 2 * 1024**2 * 768


def test_options() -> None:
    assert named(builtin_model("vgg16", classes=10), "fc8").parameters == 40970
    assert builtin_model("resnet50", image=448).layers[0].output_elements == 4 * 64 * 56**2
    assert builtin_model("gnmt-8", sequence=25).layers[0].output_elements == 25 * 1024
    assert builtin_model("GNMT-6").name == "gnmt-6"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("vgg61", {}, r"unknown model 'vgg61' \(did you mean 'vgg16'\?\); built-in are vgg16, "),
        ("gnmt", {}, r"unknown model 'gnmt' \(did you mean 'gnmt-8'\?\)"),
        ("gnmt-7", {}, r"even number of layers of at least 4, got 7; take 8"),
        ("gnmt-2", {}, r"even number of layers of at least 4, got 2; take 4"),
        ("gnmt-9998", {}, r"at most 1000 layers"),
        (
            "vgg16",
            {"imgae": 3},
            r"vgg16 has no option 'imgae' \(did you mean 'image'\?\); its options are image, class",
        ),
        ("vgg16", {"image": 16}, r"image must be at least 32 pixels, got 16"),
        ("vgg16", {"image": "224"}, r"image must be a whole number of at least 1, got '224'"),
        ("vgg16", {"image": True}, r"image must be a whole number"),
        ("vgg16", {"image": -1}, r"image must be a whole number"),
        ("resnet50", {"granularity": "convs"}, r"one of block, conv, got 'convs' \(did you mean 'conv'\?\)"),
        ("resnet50", {"granularity": 3}, r"granularity must be a text"),
        ("gpt2", {"width": 3}, r"gpt2 has no option 'width'.*; its options are blocks, sequence"),
        ("gpt2", {"sequence": 2048}, r"gpt2 takes sequences of at most 1024 tokens, got 2048"),
        ("bert-base", {"head": "mml"}, r"head must be one of pooler, mlm, got 'mml' \(did you mean 'mlm'\?\)"),
        ("gnmt-8", {"hidden": 1}, r"hidden must be at least 2"),
    ],
)
def test_bad_names_and_options(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        builtin_model(name, **args)  # type: ignore[arg-type]


def test_is_builtin() -> None:
    assert is_builtin("gnmt-158")
    assert is_builtin("VGG16")
    assert not is_builtin("vgg17")
