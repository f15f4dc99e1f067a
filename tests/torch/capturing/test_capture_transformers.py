"""Models of the transformers library, as they are, in training mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed; it is part of the test extra")

import transformers as hf

import transformers_models
from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture, empty_parameters, fill_stage, largest_difference, run_eager, run_stages

LAYERS = {
    "gpt2": ["transformer.wte", "transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.1.attn",
             "transformer.h.1.mlp", "lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0.attention", "bert.encoder.layer.0.intermediate",
             "bert.encoder.layer.1.attention", "bert.encoder.layer.1.intermediate", "cls.predictions.transform",
             "cls.predictions.decoder"],
    "llama": ["model.embed_tokens", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn",
              "model.layers.1.mlp", "lm_head"],
    "mixtral": ["model.embed_tokens", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn",
                "model.layers.1.mlp", "lm_head"],
}  # fmt: skip
QUICK = ("gpt2", "bert", "llama", "mixtral", "t5", "whisper", "swin", "clip")


@pytest.fixture(autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in transformers_models.MODELS],
)
def test_exact_at_any_cut(name: str) -> None:
    torch.manual_seed(0)
    module, args, kwargs = transformers_models.MODELS[name]()
    module = module.double().train()
    kwargs = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in kwargs.items()
    }
    captured = capture(module, args, kwargs)
    assert captured.dynamic == (name != "clip")
    assert not captured.opaque
    expected = run_eager(module, args, kwargs)
    for cut in range(1, len(captured.layers)):
        found = run_stages(captured, [cut], args, kwargs, isolate=True)
        difference, what = largest_difference(found, expected)
        assert difference <= 1e-12, f"{what} at {captured.layers[cut].name}"
    if captured.dynamic:
        others = captured.examples.resized(3).tree()
        found = run_stages(captured, range(1, len(captured.layers)), *others)
        difference, what = largest_difference(found, run_eager(module, *others))
        assert difference <= 1e-12, what
    if name in LAYERS:
        assert [layer.name for layer in captured.layers] == LAYERS[name]
    count = sum(parameter.numel() for parameter in module.parameters())
    used = set(captured.unused)
    unused = sum(parameter.numel() for path, parameter in module.named_parameters() if path in used)
    assert captured.to_model().parameters == count - unused


def test_a_cache_is_left_out_of_the_output() -> None:
    module, args, kwargs = transformers_models.MODELS["llama"]()
    captured = capture(module.train(), args, kwargs)
    assert "left out of the output: DynamicCache" in captured.notes


def test_constants_through_kwargs_leave_the_batch_free() -> None:
    """`return_dict` is no parameter of Llama's forward: it arrives through **kwargs."""
    module, args, kwargs = transformers_models.MODELS["llama"]()
    captured = capture(module.train(), args, {**kwargs, "return_dict": True, "use_cache": False})
    assert captured.dynamic
    assert captured.notes == ()


def test_what_branches_on_a_number_read_from_a_tensor_is_kept_whole() -> None:
    """Longformer's encoder asks a tensor whether any attention is global, and hands the answer to its layers."""
    config = hf.LongformerConfig(
        **{**transformers_models.SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        attention_window=4,
        max_position_embeddings=40,
    )
    module, args, kwargs = transformers_models.language(hf.LongformerForMaskedLM, config)
    captured = capture(module.double().train(), args, kwargs)
    assert [(item.path, item.reason) for item in captured.opaque] == [
        ("longformer.encoder", "a number read from a tensor decides what is computed")
    ]
    assert captured.checked <= 1e-12


def test_gradient_checkpointing_is_kept_in_whole_blocks() -> None:
    module, args, kwargs = transformers_models.MODELS["llama"]()
    module.double().train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    captured = capture(module, args, kwargs)
    assert [finding.path for finding in captured.opaque] == ["model.layers.0", "model.layers.1"]
    assert [layer.name for layer in captured.layers] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"
    ]  # fmt: skip
    assert captured.checked <= 1e-12


def test_a_stage_without_memory_is_filled_from_the_state_of_the_model() -> None:
    torch.manual_seed(0)
    module, args, kwargs = transformers_models.MODELS["llama"]()
    with empty_parameters():
        empty, _, _ = transformers_models.MODELS["llama"]()
    assert all(parameter.is_meta for name, parameter in empty.named_parameters() if "norm" not in name)
    captured = capture(empty.train(), args, kwargs)
    assert captured.fingerprint == capture(module.train(), args, kwargs).fingerprint
    expected = module(**kwargs).loss
    values: tuple[torch.Tensor, ...] = ()
    for first, last in ((0, 2), (3, 5)):
        stage = fill_stage(captured.stage(first, last), module.state_dict())
        values = stage(
            *values, *(captured.input_leaves(args, kwargs)[root.index] for root in stage.stage_spec.roots)
        )
    assert torch.equal(captured.output(values)["loss"], expected)
    assert empty.lm_head.weight.is_meta
    with pytest.raises(BaPipeError, match=r"nothing to fill 'model.embed_tokens.weight' with"):
        fill_stage(captured.stage(0, 0), {})


def test_routing_by_data_names_operation_and_module() -> None:
    module, args, kwargs = transformers_models.MODELS["mixtral"]()
    module.train().set_experts_implementation("eager")
    captured = capture(module, args, kwargs)
    assert [finding.path for finding in captured.opaque] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    wav2vec = hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
            conv_dim=(16,), conv_stride=(5,), conv_kernel=(10,), num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, num_feat_extract_layers=1,
        )
    )  # fmt: skip
    sound = {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 64, (2, 4))}
    with pytest.raises(
        BaPipeError, match=r"Wav2Vec2ForCTC cannot be traced: .* `if labels is not None and labels.max"
    ):
        capture(wav2vec, (), sound)


def _given_masks(captured: Any) -> list[bool]:
    """Of every attention, whether it is given a mask tensor."""
    nodes = [node for node in captured.program.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    return [
        (*node.args, *(None,) * 4)[3] is not None or node.kwargs.get("attn_mask") is not None for node in nodes
    ]


def test_attention_without_a_mask_is_captured_without_one() -> None:
    """As in eager mode, where a tensor of its own would cost a slower kernel; one that is given stays."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
    model = hf.LlamaForCausalLM(config)
    words = torch.randint(0, 32, (2, 6))
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    assert _given_masks(capture(model, (words,), {"use_cache": False})) == [False, False]
    for name, value in (("attention_mask", torch.ones_like(words)), ("position_ids", packed)):
        assert _given_masks(capture(model, (words,), {"use_cache": False, name: value})) == [True, True]

    class Within(nn.Module):
        """A model of the user's, which gives positions to the one in it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, words: Tensor, positions: Tensor) -> Tensor:
            found: Tensor = self.inner(words, position_ids=positions, use_cache=False).logits
            return found

    assert _given_masks(capture(Within(), (words, packed), {})) == [True, True]
