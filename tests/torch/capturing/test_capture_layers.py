"""Layers that a person recognises, and what the planner is told of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import capture_models as models
from bapipe.models.layers import Split
from bapipe.torch.capturing import capture, run_eager, run_stages
from bapipe.torch.zoo import build_gnmt, build_gpt, build_resnet50, build_unet, build_vgg16


def names(captured) -> list[str]:
    return [layer.name for layer in captured.layers]


def test_vgg_is_its_convolutions_and_linear_layers() -> None:
    captured = capture(*build_vgg16(width=8, hidden=32, image=32, classes=10))
    convolutions = [f"features.{index}" for index in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)]
    assert names(captured) == [*convolutions, "classifier.0", "classifier.3", "classifier.6"]
    assert [layer.split for layer in captured.layers[:2]] == [Split(channels=8)] * 2
    assert captured.layers[2].conv == (8, 16, 3, 16, 16)
    assert captured.layers[0].forward_flops == 2 * 32 * 32 * 8 * 27
    assert all(len(layer.sent) == 1 for layer in captured.layers[:-1])
    # the first pool belongs to the second convolution: 8 channels of 16 x 16 cross
    assert captured.layers[1].sent[0].shape(7) == (7, 8, 16, 16)


def test_resnet_is_its_blocks() -> None:
    captured = capture(*build_resnet50(width=4, image=32, classes=10, with_loss=True))
    blocks = [f"layer{i}.{j}" for i, count in enumerate((3, 4, 6, 3), 1) for j in range(count)]
    assert names(captured) == ["conv1", *blocks, "fc"]
    assert captured.layers[0].split == Split(channels=4)
    assert captured.layers[1].split is None
    assert captured.layers[-1].split == Split(channels=10, by="vocabulary")
    assert captured.layers[1].buffers[:3] == (
        "layer1.0.bn1.num_batches_tracked",
        "layer1.0.bn1.running_mean",
        "layer1.0.bn1.running_var",
    )


def test_gnmt_splits_by_direction_time_and_vocabulary() -> None:
    captured = capture(*build_gnmt(layers=8, hidden=8, sequence=5, vocabulary=30, with_loss=True))
    assert names(captured) == [
        "source_embedding", "encoder.0", "encoder.1", "encoder.2", "encoder.3", "target_embedding",
        "decoder.0", "attention", "decoder.1", "decoder.2", "decoder.3", "classifier",
    ]  # fmt: skip
    splits = {layer.name: layer.split for layer in captured.layers}
    assert splits["source_embedding"] == Split(channels=8)
    assert splits["encoder.0"] == Split(channels=2, by="directions")
    assert splits["encoder.1"] == Split(channels=5, by="time steps")
    assert splits["classifier"] == Split(channels=30, by="vocabulary")
    assert captured.layers[1].forward_flops == 2 * 5 * 2 * 4 * 8 * (8 + 8)


def test_gpt_has_two_layers_a_block_and_tied_weights() -> None:
    module, args, kwargs = build_gpt(blocks=3, width=16, vocabulary=30, sequence=6, with_loss=True)
    captured = capture(module, args, kwargs)
    blocks = [f"blocks.{index}.{part}" for index in range(3) for part in ("attention", "mlp")]
    assert names(captured) == ["tokens", *blocks, "head"]
    assert captured.layers[0].shared == captured.layers[-1].shared == ("tokens.weight",)
    model = captured.to_model("gpt")
    assert model.layers[-1].shares_weights_with == "tokens"
    assert model.layers[-1].split == Split(channels=30, by="vocabulary")
    assert model.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert model.layers[0].output_elements == 6 * 16
    assert model.layers[1].kind == "attention"


def test_unet_passes_skip_values_along() -> None:
    module, args, kwargs = build_unet(levels=3, width=4)
    captured = capture(module, args, kwargs)
    crossing = [len(layer.sent) for layer in captured.layers]
    assert max(crossing) == 4
    middle = captured.layers[crossing.index(4)].name
    assert middle.startswith("down.3")
    stage = captured.stage(2, 2)
    received = {value.name for value in stage.stage_spec.received}
    assert received & {value.name for value in stage.stage_spec.sent}, "a value passes through unused"


def test_masks_positions_and_rotary_factors_are_recomputed_not_sent() -> None:
    tokens = torch.randint(0, 20, (3, 6))
    captured = capture(models.Rotary(), (tokens,))
    assert [len(layer.sent) for layer in captured.layers] == [1, 1, 1, 0]
    last = captured.stage(3, 3).stage_spec
    assert [root.name for root in last.roots] == ["tokens"]
    assert len(last.recomputed) >= 8
    assert captured.layers[3].buffers == ("frequencies",)


def test_an_image_is_not_sent_for_its_size_alone() -> None:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = models.linear(), nn.Linear(2, 3)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(value).view(value.shape[0] * 4, 2)).view(value.shape[0], -1)

    captured = capture(Reshaped().double(), (models.sample(),))
    assert captured.stage(1, 1).stage_spec.roots == ()
    assert captured.crossing(0)[0].shape(5) in ((20, 2), (5, 8))


def test_stages_have_the_models_own_names_and_parameters() -> None:
    module, args, kwargs = build_resnet50(width=4, image=32, classes=10)
    captured = capture(module, args, kwargs)
    whole = module.state_dict()
    found: set[str] = set()
    for first, last in ((0, 3), (4, 9), (10, 17)):
        stage = captured.stage(first, last)
        state = stage.state_dict()
        assert state.keys() <= whole.keys()
        assert not found & state.keys()
        found |= state.keys()
        for name, parameter in stage.named_parameters():
            assert parameter is module.get_parameter(name)
        assert {name for layer in captured.layers[first : last + 1] for name in layer.parameters} == {
            name for name, _ in stage.named_parameters()
        }
    assert found == whole.keys()


def test_fingerprint_depends_on_names_and_shapes_only() -> None:
    def fingerprint(width: int = 16, float64: bool = False, batch: int = 2) -> str:
        built = build_gpt(blocks=1, width=width, vocabulary=30, sequence=6, float64=float64, batch=batch)
        return capture(*built, check=False).fingerprint

    assert fingerprint() == fingerprint(float64=True) == fingerprint(batch=3)
    assert fingerprint() != fingerprint(width=32)


def test_a_module_in_eval_mode_is_captured_in_training_mode_and_left_as_it_was() -> None:
    module = models.Around(models.Residual()).eval()
    captured = capture(module, (models.sample().float(),))
    assert len(captured.program.random) == 2
    assert not any(item.training for item in module.modules())


def test_keyword_arguments_may_come_in_any_order() -> None:
    module, (ids,), kwargs = build_gpt(blocks=1, width=16, vocabulary=30, sequence=6, with_loss=True, float64=True)
    captured = capture(module, (), {"target": kwargs["target"], "ids": ids})
    expected = run_eager(module, (), {"ids": ids, **kwargs})
    found = run_stages(captured, [1], (), {"ids": ids, **kwargs})
    assert torch.equal(found.loss, expected.loss)


def test_a_model_that_fixes_its_batch_is_captured_again_for_another() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = models.linear(), models.linear()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(value) * torch.eye(int(value.shape[0])).sum()).pow(2).mean()

    module = Fixed().double()
    captured = capture(module, (models.sample(4),), dynamic_batch=False)
    assert not captured.dynamic
    assert captured.crossing(0)[0].bytes_per_sample == 8 * models.WIDTH
    other = captured.at(3)
    assert other.batch == 3
    assert captured.at(4) is captured
    args = (models.sample(3),)
    assert torch.equal(run_stages(other, [1], args).loss, run_eager(module, args).loss)


def test_a_mask_as_large_as_the_batch_does_not_fix_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = models.linear(), models.linear()

        def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.first(value)
            scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
            return self.second(scores @ hidden).pow(2).mean()

    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    captured = capture(Masked().double(), (models.sample(4, 4, models.WIDTH), mask))
    assert captured.dynamic
    other = (models.sample(7, 4, models.WIDTH), mask)
    assert torch.equal(run_stages(captured, [1], other).loss, run_eager(captured.module, other).loss)


@pytest.mark.parametrize("cuts", [[0], [2, 2], [3, 1], [99]])
def test_cuts_must_increase(cuts: list[int]) -> None:
    captured = capture(*build_vgg16(width=8, hidden=32, image=32, classes=10), check=False)
    with pytest.raises(Exception, match="cuts must increase"):
        run_stages(captured, cuts, *build_vgg16(width=8, hidden=32, image=32, classes=10)[1:])
