"""What the FPGA model takes from a layer table, and what it refuses."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.fpga import Parameters, make_network
from bapipe.fpga.cut_places import make_units
from bapipe.models.builtin import builtin_model
from bapipe.models.layers import Layer, Model, Split
from fpga_cases import conv_model


def test_resnet50_trains_with_12_gigamacs() -> None:
    network = make_network(builtin_model("resnet50", granularity="conv"))
    assert network.training_macs == pytest.approx(12.150e9, rel=1e-3)
    assert network.weights == 25_557_032


def test_two_branches_keep_their_common_input_once() -> None:
    network = make_network(builtin_model("resnet50", granularity="conv"))
    by_name = {layer.name: layer for layer in network.layers}
    projection, beside = by_name["layer2.0.downsample"], by_name["layer2.0.conv1"]
    assert projection.input == beside.input == 256 * 56 * 56
    assert (projection.kept, beside.kept) == (projection.input, 0.0)
    assert by_name["layer2.0.conv2"].input == 128 * 56 * 56
    assert by_name["layer2.0.conv2"].rows == 56
    units = make_units(network, Parameters(slices=1))
    at = [layer.name for layer in network.layers].index("layer2.0.conv1")
    assert units.entry[at] == beside.input


@pytest.mark.parametrize("name", ["vgg16", "alexnet", "resnet18"])
def test_other_tables_are_supported(name: str) -> None:
    options = {"granularity": "conv"} if name == "resnet18" else {}
    network = make_network(builtin_model(name, **options))
    assert network.layers[0].modules == ("FP", "WG")
    assert network.layers[1].modules == ("FP", "EB", "WG")
    assert 1 / 3 < network.forward_share < 0.4


def test_a_cut_inside_a_layer_sends_its_input_and_the_outputs_so_far() -> None:
    model = conv_model([(4, 8, 3, 10, 10), (8, 16, 3, 10, 10)])
    units = make_units(make_network(model), Parameters(slices=4))
    assert len(units) == 8
    assert units.forward[4] == 8 * 100
    assert units.forward[6] == 8 * 100 + 16 * 100 / 2
    assert (units.forward[2], units.backward[2]) == (4 * 100 + 8 * 100 / 2, 8 * 100 / 2)
    assert units.forward[8] == 0


def test_a_linear_layers_loops_follow_from_its_flops() -> None:
    layer = Layer(
        name="fc", kind="linear", forward_flops=2.0 * 300 * 20, parameters=6020, output_elements=20,
        saved_elements=300, split=Split(channels=20),
    )  # fmt: skip
    network = make_network(Model(name="m", layers=(layer,), input_elements=300))
    loops = network.layers[0].geometry
    assert loops is not None
    assert (loops.inputs, loops.outputs, loops.taps, loops.pixels) == (300, 20, 1, 1)


def test_a_kernel_that_is_not_square_is_told_by_its_flops() -> None:
    layer = Layer(
        name="c", kind="conv", forward_flops=2.0 * 4 * 8 * 7 * 100, parameters=224, output_elements=800,
        saved_elements=400, conv=(4, 8, 7, 10, 10),
    )  # fmt: skip
    loops = make_network(Model(name="m", layers=(layer,), input_elements=400)).layers[0].geometry
    assert loops is not None
    assert loops.taps == 7


def test_more_channels_than_any_layer_has_are_refused() -> None:
    """To list the ways to unroll 1.6e9 channels would take half a minute, and 1.8e13 all memory."""
    layer = Layer(
        name="fc", kind="linear", forward_flops=2.0 * 256 * 1_638_400_000, parameters=1, output_elements=256,
        saved_elements=1, split=Split(channels=256),
    )  # fmt: skip
    with pytest.raises(BaPipeError, match=r"layer 'fc' has 1,638,400,000 input channels, .* too many.*correct"):
        make_network(Model(name="m", layers=(layer,), input_elements=1))


def test_what_has_no_modules_is_refused() -> None:
    model = builtin_model("gnmt-8")
    with pytest.raises(BaPipeError, match=r"'encoder-1' is of kind lstm.*supports conv, linear and pool"):
        make_network(Model(name="m", layers=model.layers[1:], input_elements=1))
    with pytest.raises(BaPipeError, match=r"'layer1.0' has no convolution dimensions.*allocation=fluid"):
        make_network(builtin_model("resnet50"))
    assert make_network(builtin_model("resnet50"), allocation="fluid").weights == 25_557_032
    pool = Layer(name="p", kind="pool", forward_flops=0, parameters=0, output_elements=1, saved_elements=1)
    with pytest.raises(BaPipeError, match="no convolution or linear layer"):
        make_network(Model(name="m", layers=(pool,), input_elements=1))
