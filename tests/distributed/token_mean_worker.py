"""Ranks that train with token means, each of which compares with the whole global batch in one process.

Usage: token_mean_worker.py FOLDER [full]. The reference is the module itself in eager: one forward of all samples,
one loss, one backward; nothing of BaPipe is in it. Every rank leaves result-<case>-<rank>.json.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from equality_plans import make_plan
from forked_ranks import run_cases
from token_mean_cases import CASES, FULL, TokenCase
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bapipe.schedule.generators import pipedream
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.pipedream.async_pipeline import PipeDream
from bapipe.torch.runtime.pipeline import Pipeline

VOCABULARY, SEQUENCE = 30, 6
IGNORED, PADDING = -100, 0
LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its batches, and its loss; None: the model returns it."""

    module: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any] | None
    whole: Callable[[Any, Any], Tensor] | None = None
    """the loss of the whole global batch, where `loss` does not return it"""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded(seed: int, size: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels. Samples 2 and 3, a micro-batch of their own, have no label at all; others one to all."""
    text = torch.randint(3, VOCABULARY, (size, SEQUENCE), generator=_generator(seed))
    labels = text.clone()
    for sample in range(size):
        length = 0 if sample in (2, 3) else 2 + (3 * sample + seed) % (SEQUENCE - 1)
        labels[sample, length:] = ignored
    return text, labels


def _gpt2() -> nn.Module:
    import transformers as hf

    config = hf.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return hf.GPT2LMHeadModel(config)


def _gpt2_batch(seed: int, size: int) -> tuple[Any, Any]:
    text, labels = padded(seed, size, IGNORED)
    return {"input_ids": text, "labels": labels}, None


def _gpt2_items(seed: int, size: int) -> tuple[Any, Any]:
    inputs, _ = _gpt2_batch(seed, size)
    return {**inputs, "num_items_in_batch": (inputs["labels"][:, 1:] != IGNORED).sum()}, None


def _t5(*, tied: bool = True) -> nn.Module:
    import transformers as hf

    config = hf.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        tie_word_embeddings=tied,
    )
    module = hf.T5ForConditionalGeneration(config)
    if not tied:
        module.decoder.embed_tokens = copy.deepcopy(module.decoder.embed_tokens)
        module.encoder.embed_tokens = copy.deepcopy(module.encoder.embed_tokens)
    return module


def _t5_batch(seed: int, size: int) -> tuple[Any, Any]:
    text, labels = padded(seed, size, IGNORED)
    return {"input_ids": text, "decoder_input_ids": text.flip(1), "labels": labels}, None


class Words(nn.Module):
    """A language model of independent tokens, which may return the mean of its own loss over a mask."""

    def __init__(self, *, own_loss: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.own_loss = own_loss

    def forward(self, text: Tensor, target: Tensor | None = None) -> Tensor:
        output = self.head(torch.tanh(self.second(torch.tanh(self.first(self.embedding(text))))))
        if not self.own_loss:
            return output
        assert target is not None
        mask = (target != PADDING).to(output.dtype)
        each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
        return (each * mask).sum() / mask.sum()


def _words(seed: int, size: int) -> tuple[Any, Any]:
    return padded(seed, size, PADDING)


def _own_words(seed: int, size: int) -> tuple[Any, Any]:
    text, target = padded(seed, size, PADDING)
    return (text, {"target": target}), None


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def _weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=output.dtype)
    function = nn.CrossEntropyLoss(weight=weight, ignore_index=PADDING, label_smoothing=0.1)
    return 0.5 * function(output.transpose(1, 2), target)


def _masked(output: Tensor, target: Tensor) -> Tensor:
    """Written out: a sum over a mask, divided by how much of it there is."""
    mask = (target != PADDING).to(output.dtype)
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def _summed(output: Tensor, target: Tensor) -> Tensor:
    return 0.01 * functional.cross_entropy(output.transpose(1, 2), target, ignore_index=PADDING, reduction="sum")


def _sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(output.transpose(1, 2), target, ignore_index=PADDING, reduction="sum")
    return total, (target != PADDING).sum()


def _unrecognised(output: Tensor, target: Tensor) -> Tensor:
    """A mean over tokens out of steps that say nothing of it."""
    mask = (target != PADDING).to(output.dtype)
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return torch.exp(torch.log((each * mask).sum() + 1e-30) - torch.log(mask.sum().clamp(min=1)))


def _token_mean(output: Tensor, target: Tensor) -> Any:
    from bapipe.torch import token_mean

    return token_mean(_unrecognised, count=lambda _, target: (target != PADDING).sum())(output, target)


SUBJECTS = {
    "gpt2": Subject(module=_gpt2, batch=_gpt2_batch, loss=None),
    "gpt2-items": Subject(module=_gpt2, batch=_gpt2_items, loss=None),
    "t5": Subject(module=_t5, batch=_t5_batch, loss=None),
    "t5-untied": Subject(module=lambda: _t5(tied=False), batch=_t5_batch, loss=None),
    "words": Subject(module=Words, batch=_words, loss=_mean),
    "words-weighted": Subject(module=Words, batch=_words, loss=_weighted),
    "words-masked": Subject(module=Words, batch=_words, loss=_masked),
    "words-summed": Subject(module=Words, batch=_words, loss=_summed),
    "words-sum-and-count": Subject(module=Words, batch=_words, loss=_sum_and_count, whole=_mean),
    "words-token-mean": Subject(module=Words, batch=_words, loss=_token_mean, whole=_unrecognised),
    "words-own-masked": Subject(module=lambda: Words(own_loss=True), batch=_own_words, loss=None),
}


class InDouble(TorchFunctionMode):
    """Keeps code that computes in float32, as transformers does here and there, from it in a float64 model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def numbers_of(case_numbers: str) -> contextlib.AbstractContextManager[Any]:
    return InDouble() if case_numbers == "float64" else contextlib.nullcontext()


def build(model: str, numbers: str) -> nn.Module:
    torch.manual_seed(1)
    module = SUBJECTS[model].module()
    return module if numbers == "float32" else module.double()


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs[:-1], inputs[-1]) if isinstance(inputs, tuple) else ((inputs,), {})


def main(folder: Path, cases: tuple[TokenCase, ...]) -> int:
    torch.set_num_threads(1)
    captures = {}
    for model, numbers in sorted({(case.model, case.numbers) for case in cases}):
        args, kwargs = as_call(SUBJECTS[model].batch(0, 2)[0])
        with numbers_of(numbers):
            captures[model, numbers] = capture(build(model, numbers), args, kwargs, check=False)
    return run_cases(
        folder,
        [case.ranks for case in cases],
        lambda index: run_case(cases[index], captures[cases[index].model, cases[index].numbers]),
    )


def run_case(case: TokenCase, captured: Captured) -> dict[str, Any]:
    """Two global batches whose gradients add up, each also evaluated; or a few updates of PipeDream."""
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    plan = make_plan(case.plain, [layer.name for layer in own.layers], fingerprint=own.fingerprint)
    subject = SUBJECTS[case.model]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if case.schedule == "pipedream":
            plan = replace(plan, schedule=ScheduleFile.of(pipedream(2, plan.microbatches)))
            found = _run_pipedream(case, PipeDream(own, plan, subject.loss), plan.global_batch)
        else:
            found = _run_pipeline(case, Pipeline(own, plan, subject.loss), plan.global_batch)
    return {**found, "warnings": [str(item.message) for item in said]}


def _run_pipeline(case: TokenCase, pipe: Pipeline, samples: int) -> dict[str, Any]:
    module = build(case.model, case.numbers)
    losses, evaluated = [], []
    for step in range(2):
        batch = SUBJECTS[case.model].batch(step, samples)
        evaluated.append((pipe.evaluate(*batch), whole_loss(case, module, batch).item()))
        loss = whole_loss(case, module, batch)
        loss.backward()
        losses.append((pipe.step(*batch), loss.item()))
    difference = _difference(dict(pipe.named_parameters()), dict(module.named_parameters()))
    norms = pipe.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(module.parameters(), 1e9).item()
    pipe.close()
    return {"losses": losses, "evaluated": evaluated, "difference": difference, "norms": norms}


def _run_pipedream(case: TokenCase, pipe: PipeDream, samples: int) -> dict[str, Any]:
    """The first update is that of the first micro-batch's mean. Steps are reported as means over all tokens."""
    reported: list[float] = []
    first: dict[str, float] = {}
    module = build(case.model, case.numbers)
    batch = SUBJECTS[case.model].batch(0, samples)

    def on_update(number: int) -> None:
        if number == 0:
            first["difference"] = _difference(dict(pipe.named_parameters()), dict(module.named_parameters()))

    inputs, target = batch
    small, small_target = _some(inputs, 2), None if target is None else target[:2]
    whole_loss(case, module, (small, small_target)).backward()
    # No update changes a weight, so that the losses are those of one module.
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    trace = pipe.train(
        iter([batch]),
        optimizer,
        steps=1,
        on_update=on_update,
        on_step=lambda step, loss, seconds, bubble: reported.append(loss),  # noqa: ARG005
    )
    expected = whole_loss(case, module, batch).item()
    evaluated = [(pipe.evaluate(*batch), expected)]
    finite = all(bool(torch.isfinite(item).all()) for item in pipe.parameters())
    pipe.close()
    return {
        "losses": [(loss, expected) for loss in reported],
        "each": trace.losses,
        "evaluated": evaluated,
        "difference": first["difference"],
        "finite": finite,
        "norms": (1.0, 1.0),
    }


def _some(inputs: Any, count: int) -> Any:
    if isinstance(inputs, dict):
        return {key: _some(item, count) for key, item in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_some(item, count) for item in inputs)
    return inputs[:count]


def whole_loss(case: TokenCase, module: nn.Module, batch: tuple[Any, Any]) -> Tensor:
    """Of all samples at once."""
    args, kwargs = as_call(batch[0])
    with numbers_of(case.numbers):
        output = module(*args, **kwargs)
    loss = SUBJECTS[case.model].whole or SUBJECTS[case.model].loss
    if loss is not None:
        return loss(output, batch[1])
    return output if isinstance(output, Tensor) else output.loss


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest norm of a gradient's difference, relative to its norm, or to a hundredth of the largest."""
    norms = {name: float(item.grad.norm()) for name, item in wanted.items() if item.grad is not None}
    floor = max(norms.values()) / 100
    worst = 0.0
    for name, item in found.items():
        expected = torch.zeros_like(item) if wanted[name].grad is None else wanted[name].grad
        gradient = torch.zeros_like(item) if item.grad is None else item.grad
        gap = float((gradient - expected).norm())
        worst = max(worst, gap / max(norms.get(name, 0.0), floor) if math.isfinite(gap) else math.inf)
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), FULL if len(sys.argv) > 2 else CASES))
