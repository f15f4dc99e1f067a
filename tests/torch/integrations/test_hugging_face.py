"""Models of transformers by name: configs, tasks, batches, weights of a folder. Nothing is fetched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapipe.errors import BaPipeError
from bapipe.models.model_spec import model_ref, parse_model_spec
from bapipe.torch.capturing import capture
from bapipe.torch.inputs.build_model import BuiltModel, build_model
from bapipe.torch.integrations import hugging_face
from bapipe.torch.integrations.lora_adapters import add_lora, name_without_lora
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import Training
from bapipe.torch.runtime.materialise import fill
from bapipe.torch.runtime.plan_checks import trusted_plan
from one_rank_plan import one_rank

pytest.importorskip("transformers")
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 40}
BERT = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
VIT = {**BERT, "image_size": 16, "patch_size": 8, "num_labels": 5}
del VIT["vocab_size"]
T5 = {"num_layers": 1, "d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "vocab_size": 64}
DEIT = {key: value for key, value in VIT.items() if key != "num_labels"}
WHISPER = {
    "encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64,
    "max_source_positions": 20, "max_target_positions": 16, "num_mel_bins": 8,
}  # fmt: skip
SEGFORMER = {
    "task": "semantic-segmentation", "image_size": 32, "hidden_sizes": "8,16,40,64", "depths": "1,1,1,1",
    "num_labels": 3,
}  # fmt: skip


def _built(model: str, args: dict[str, Any], **options: Any) -> BuiltModel:
    return build_model(model_ref(f"hf:{model}", args), **options)


@pytest.mark.parametrize(
    "model, args, kind, shapes",
    [
        ("gpt2", GPT2, "GPT2LMHeadModel", {"input_ids": (3, 38), "labels": (3, 38)}),
        ("gpt2", {**GPT2, "sequence": 7}, "GPT2LMHeadModel", {"input_ids": (3, 7), "labels": (3, 7)}),
        ("bert", BERT, "BertForMaskedLM", {"input_ids": (3, 128), "labels": (3, 128)}),
        (
            "bert",
            {**BERT, "task": "sequence-classification", "num_labels": 4},
            "BertForSequenceClassification",
            {"input_ids": (3, 128), "labels": (3,)},
        ),
        ("t5", {**T5, "sequence": 9}, "T5ForConditionalGeneration", {"input_ids": (3, 9), "labels": (3, 9)}),
        ("vit", VIT, "ViTForImageClassification", {"pixel_values": (3, 3, 16, 16), "labels": (3,)}),
        # A type of several classes, and one whose tokens of padding and start lie beyond a smaller vocabulary.
        ("deit", DEIT, "DeiTForImageClassification", {"pixel_values": (3, 3, 16, 16), "labels": (3,)}),
        (
            "whisper",
            WHISPER,
            "WhisperForConditionalGeneration",
            {"input_features": (3, 8, 40), "labels": (3, 16)},
        ),
        (
            "segformer",
            SEGFORMER,
            "SegformerForSemanticSegmentation",
            {"pixel_values": (3, 3, 32, 32), "labels": (3, 32, 32)},
        ),
    ],
)
def test_a_model_type_is_built_by_its_config_and_returns_its_loss(
    model: str, args: dict[str, Any], kind: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    built = _built(model, args)
    assert type(built.module).__name__ == kind
    assert built.make_batch is not None
    batch = built.make_batch(5, 3)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    again = built.make_batch(5, 3)
    assert all(torch.equal(tensor, again[name]) for name, tensor in batch.items())
    assert torch.isfinite(built.module(**batch).loss)
    assert built.kwargs.keys() == batch.keys()


@pytest.mark.parametrize(
    "model, args, follows",
    [
        ("llama", {"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16, "num_key_value_heads": 4}),
        ("phi", {"hidden_size": 64, "num_attention_heads": 4}, {"num_key_value_heads": 4}),
        ("t5", {"num_layers": 2}, {"num_decoder_layers": 2}),
        ("gpt2", {"num_hidden_layers": 3}, {"n_layer": 3}),
        ("swin", {"embed_dim": 16, "depths": "1,1", "num_heads": "2,2"}, {"hidden_size": 32, "num_layers": 2}),
        ("bert", {"vocab_size": 50, "pad_token_id": 7}, {"pad_token_id": 7}),
        ("phi3", {"vocab_size": 50}, {"pad_token_id": 49}),
    ],
)
def test_what_follows_from_an_argument_follows(model: str, args: dict[str, Any], follows: dict[str, int]) -> None:
    config = hugging_face._config(model, tuple(sorted(args.items())))
    assert {name: getattr(config, name) for name in follows} == follows


def test_every_sample_of_a_masked_language_model_has_a_token_to_find() -> None:
    labels = _built("bert", {**BERT, "sequence": 4}).make_batch(0, 200)["labels"]  # type: ignore[misc]
    assert ((labels >= 0).sum(dim=1) > 0).all()
    assert (labels < 0).any()


def test_names_are_taken_apart_by_their_form_alone() -> None:
    assert parse_model_spec("hf:gpt2").kind == parse_model_spec("hf:some/folder.json").kind == "code"
    found = model_ref("hf:some/folder/", {"n_layer": 4})
    assert (found.name, found.args) == ("folder", {"model": "some/folder/", "n_layer": 4})
    for text in ("hf:", "hf: "):
        with pytest.raises(BaPipeError, match="followed by a model type"):
            model_ref(text)


@pytest.mark.parametrize(
    "model, args, words",
    [
        ("gptt2", {}, r"no model type .*did you mean 'gpt2'"),
        ("gpt2", {"n_layers": 4}, r"has no 'n_layers' \(did you mean 'n_layer'\?\); correct --arg"),
        ("gpt2", {"task": "causal"}, r"not trained for task 'causal' \(did you mean 'causal-lm'\?\)"),
        ("gpt2", {**GPT2, "sequence": 41}, r"takes 1 to 40 tokens, got sequence=41"),
        ("timesfm", {}, r"trained for none of .*give package.module:function"),
        ("segformer", {"hidden_sizes": "8,x"}, r"hidden_sizes of segformer cannot be '8,x'.*correct --arg"),
        (
            "llama",
            {"hidden_size": "wide"},
            r"the config of llama refuses hidden_size=wide: .*expected int.*correct --arg",
        ),
        ("moonshine", {}, r"moonshine takes other sound than mel spectra .*give package.module:function"),
        ("someone/never-downloaded", {}, r"not in the local Hugging Face cache; download it with 'hf download"),
        ("gpt2", {**GPT2, "lora": "rank=8"}, r"'rank' is unknown"),
        ("gpt2", {**GPT2, "lora": "r=0"}, r"rank of at least 1, got r=0"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(model: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(BaPipeError, match=words) as caught:
        _built(model, args)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpt2")
    _built("gpt2", {**GPT2, "attn_pdrop": 0.25}, seed=3).module.save_pretrained(found)  # type: ignore[operator]
    return found


def test_a_folder_has_its_own_config_and_weights(folder: Path) -> None:
    saved = _built("gpt2", {**GPT2, "attn_pdrop": 0.25}, seed=3).module.state_dict()
    found = _built(str(folder), {})
    assert found.weights is None
    assert found.module.config.attn_pdrop == 0.25  # type: ignore[union-attr]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.module.state_dict().items())


def test_a_hollow_model_reads_every_parameter_from_its_folder(folder: Path) -> None:
    whole, hollow = _built(str(folder), {}), _built(str(folder), {}, hollow=True)
    assert hollow.weights is not None
    large = {name for name, item in hollow.module.named_parameters() if item.is_meta}
    assert "transformer.wte.weight" in large
    fill(hollow.module, {name for name, _ in hollow.module.named_parameters()}, hollow.weights)
    found = dict(hollow.module.named_parameters())
    assert all(torch.equal(item, found[name]) for name, item in whole.module.named_parameters())
    assert hollow.module.lm_head.weight is hollow.module.transformer.wte.weight  # type: ignore[union-attr]


def test_files_of_a_model_without_a_head_serve_by_the_names_of_the_part(folder: Path, tmp_path: Path) -> None:
    whole = _built(str(folder), {}).module
    whole.transformer.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    hollow = _built(str(tmp_path), {"task": "causal-lm"}, hollow=True)
    assert hollow.weights is not None
    assert torch.equal(hollow.weights["transformer.wte.weight"], whole.get_parameter("transformer.wte.weight"))


@pytest.mark.parametrize("model, args", [("gpt2", GPT2), ("folder", {"task": "sequence-classification"})])
def test_weights_that_no_file_has_are_not_left_out(folder: Path, model: str, args: dict[str, Any]) -> None:
    found = _built(str(folder) if model == "folder" else model, args, hollow=True)
    assert found.weights is None
    assert not any(item.is_meta for item in found.module.parameters())


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaPipeError, match=r"has no config.json"):
        _built(str(tmp_path), {})
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(BaPipeError, match=r"cannot be read as a transformers config"):
        _built(str(tmp_path), {})


def test_a_run_reads_the_weights_of_its_stages_from_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _built(str(folder), {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
    names = tuple(layer.name for layer in capture(whole.module, whole.args, whole.kwargs, check=False).layers)
    plan = one_rank()
    stage = replace(plan.stages[0], last_layer=len(names) - 1, layers=names)
    plan = replace(plan, model=whole.model, dtype="fp32", stages=(stage,))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the whole model is loaded")

    monkeypatch.setattr(hugging_face, "_with_weights", refuse)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        training = Training(trusted_plan(plan), RunOptions(steps=1))
        inputs, _ = training.batches(0)
        loss, _ = training.step((inputs, None))
        training.close()
    finally:
        torch.distributed.destroy_process_group()
    assert loss == pytest.approx(whole.module.train()(**inputs).loss.item(), rel=1e-5)


def test_names_of_wrapped_parameters_are_those_of_the_model() -> None:
    wrapped = "base_model.model.transformer.h.0.attn.c_attn.base_layer.weight"
    assert name_without_lora(wrapped) == "transformer.h.0.attn.c_attn.weight"
    assert name_without_lora("lm_head.weight") == "lm_head.weight"


def test_adapters_do_not_depend_on_what_was_drawn_before(folder: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed; pip install peft")
    whole = _built(str(folder), {"lora": "r=2"}, seed=4)
    hollow = _built(str(folder), {"lora": "r=2"}, seed=4, hollow=True)
    trained = {name for name, item in whole.module.named_parameters() if item.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert hollow.weights is not None
    fill(hollow.module, {name for name, _ in hollow.module.named_parameters()}, hollow.weights)
    found = dict(hollow.module.named_parameters())
    assert all(torch.equal(item, found[name]) for name, item in whole.module.named_parameters())


def test_adapters_need_peft_or_say_so() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        with pytest.raises(BaPipeError, match="needs peft, which is missing; pip install peft"):
            add_lora(torch.nn.Linear(2, 2), "r=2")
    else:
        with pytest.raises(BaPipeError, match="cannot put LoRA on Linear"):
            add_lora(torch.nn.Linear(2, 2), "r=2")
