"""Ranks that train on short batches and on a loader's, and evaluate for outputs; each compares with one process.

Usage: batch_worker.py FOLDER. The reference is the module itself in eager, on the whole batch. Every rank leaves
result-<case>-<rank>.json.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
from batch_cases import BATCH_CASES, BatchCase
from equality_plans import make_plan
from forked_ranks import run_cases
from token_mean_worker import SUBJECTS, as_call, build, numbers_of, whole_loss
from torch import Tensor, nn

from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.runtime.pipeline import Pipeline

SHORT = (5, 8, 1, 4)
"""samples of the steps, of 8 planned in four micro-batches of two"""


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    captures = {}
    for model in sorted({case.model for case in BATCH_CASES}):
        args, kwargs = as_call(SUBJECTS[model].batch(0, 2)[0])
        with numbers_of("float64"):
            captures[model] = capture(build(model, "float64"), args, kwargs, check=False)
    worlds = [case.ranks for case in BATCH_CASES]
    return run_cases(folder, worlds, lambda index: run_case(BATCH_CASES[index], captures))


def run_case(case: BatchCase, captures: dict[str, Captured]) -> dict[str, Any]:
    captured = captures[case.model]
    own = dataclasses.replace(captured, module=copy.deepcopy(captured.module))
    plan = make_plan(case.plain, [layer.name for layer in own.layers], fingerprint=own.fingerprint)
    with numbers_of("float64"):  # sequences of other lengths are captured here
        pipe = Pipeline(own, plan, SUBJECTS[case.model].loss, lengths=case.lengths)
    with pipe:
        if case.lengths:
            return {"buckets": bucket_steps(case, pipe), "mixed": bucketed_loader(case, pipe)}
        return {
            "short": short_steps(case, pipe),
            "outputs": outputs(case, pipe),
            "loader": loaded_steps(case, pipe),
            "draws": drawn_samples(pipe),
        }


def given(case: BatchCase, pipe: Pipeline, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """The batch as this rank is given it."""
    if case.data == "everywhere":
        return batch
    needs = pipe.engine.needs
    return batch[0] if needs.inputs else None, batch[1] if needs.targets is not None else None


def reset(pipe: Pipeline, module: nn.Module) -> None:
    for parameter in (*pipe.parameters(), *module.parameters()):
        parameter.grad = None


def short_steps(case: BatchCase, pipe: Pipeline) -> dict[str, Any]:
    """Gradients of each step alone, and of all accumulated to a mean."""
    module = build(case.model, "float64")
    losses, differences = [], []
    for number, samples in enumerate(SHORT):
        batch = SUBJECTS[case.model].batch(number, samples)
        reset(pipe, module)
        expected = whole_loss(case_of(case), module, batch)
        expected.backward()
        losses.append((pipe.step(*given(case, pipe, batch)), expected.item()))
        differences.append(difference(pipe, module))
    reset(pipe, module)
    for number, samples in enumerate(SHORT):
        batch = SUBJECTS[case.model].batch(number, samples)
        (whole_loss(case_of(case), module, batch) / len(SHORT)).backward()
        pipe.step(*given(case, pipe, batch), weight=1 / len(SHORT))
    differences.append(difference(pipe, module))
    return {"losses": losses, "differences": differences}


def outputs(case: BatchCase, pipe: Pipeline) -> dict[str, Any]:
    """Outputs on all ranks, on the last one, as they come, and without targets."""
    module = build(case.model, "float64")
    found: list[float] = []
    places = []
    for number, samples in enumerate(SHORT):
        batch = SUBJECTS[case.model].batch(number, samples)
        with torch.no_grad():
            whole = whole_output(module, batch)
            loss = whole_loss(case_of(case), module, batch).item()
        everywhere = pipe.evaluate(*given(case, pipe, batch), outputs="all")
        assert everywhere.loss is not None
        found.append(abs(everywhere.loss - loss) / loss)
        found.append(gap(everywhere.outputs, whole))
        last = case.ranks - 1
        there = pipe.evaluate(*given(case, pipe, batch), outputs=last)
        places.append((there.outputs is not None) == (pipe.rank == last))
        if there.outputs is not None:
            found.append(gap(there.outputs, whole))
        streamed: dict[int, Any] = {}
        found.append(abs(pipe.evaluate(*given(case, pipe, batch), on_output=streamed.__setitem__) - loss) / loss)
        for microbatch, output in streamed.items():
            part = slice(2 * microbatch, min(2 * microbatch + 2, samples))
            found.append(gap(last_leaf(output), last_leaf(whole)[part]))
        places.append(bool(streamed) <= (pipe.engine.is_last))
        if batch[1] is not None:
            untargeted = pipe.evaluate(given(case, pipe, batch)[0], outputs="all")
            places.append(untargeted.loss is None)
            found.append(gap(untargeted.outputs, whole))
    return {"gaps": found, "places": places, "is_last": pipe.engine.is_last, "streamed": len(streamed)}


def last_leaf(output: Any) -> Tensor:
    return flatten(output)[0][-1]


def whole_output(module: nn.Module, batch: tuple[Any, Any]) -> Any:
    args, kwargs = as_call(batch[0])
    with numbers_of("float64"):
        return module(*args, **kwargs)


def gap(found: Any, wanted: Any) -> float:
    mine, other = leaves_of(found), leaves_of(wanted)
    assert len(mine) == len(other), (len(mine), len(other))
    assert all(one.shape == two.shape for one, two in zip(mine, other, strict=True))
    return max(float((one - two).abs().max()) for one, two in zip(mine, other, strict=True))


def leaves_of(output: Any) -> list[Tensor]:
    if hasattr(output, "logits"):
        return [output.loss, output.logits]
    return [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


class Counted(torch.utils.data.Dataset[Any]):
    """19 samples of a subject; notes which are loaded."""

    def __init__(self, model: str) -> None:
        self.inputs, self.targets = SUBJECTS[model].batch(3, len(self))
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        if self.targets is None:
            return {key: value[index] for key, value in self.inputs.items()}
        return self.inputs[index], self.targets[index]


def loaded_steps(case: BatchCase, pipe: Pipeline) -> dict[str, Any]:
    """Two epochs of a shuffled loader beside one process, the second in a loader that goes on from the first."""
    module = build(case.model, "float64")
    dataset = Counted(case.model)
    loader = pipe.data_loader(dataset, shuffle=True, seed=7)
    losses, differences, samples, positions = [], [], [], []
    for epoch in range(2):
        order = torch.randperm(19, generator=torch.Generator().manual_seed(7 + epoch))
        if epoch:
            state = loader.state_dict()
            loader = pipe.data_loader(dataset, shuffle=True, seed=7, num_workers=2)
            loader.load_state_dict(state)
        for number, batch in enumerate(loader):
            positions.append(tuple(loader.state_dict().values()))
            reset(pipe, module)
            chosen = order[8 * number : 8 * number + 8]
            expected = whole_loss(case_of(case), module, picked(dataset, chosen))
            expected.backward()
            losses.append((pipe.step(batch), expected.item()))
            differences.append(difference(pipe, module))
            samples.append(len(batch))
    return {
        "losses": losses,
        "differences": differences,
        "samples": samples,
        "positions": positions,
        "loaded": len(dataset.loaded),
        "needs_data": bool(pipe.engine.needs.inputs) or pipe.engine.needs.targets is not None,
    }


def of_length(batch: tuple[Any, Any], length: int) -> tuple[Any, Any]:
    """The same with sequences of so many positions: the first ones, or all over again."""

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return value if value is None else value[:, torch.arange(length) % value.shape[1]]

    return change(batch[0]), change(batch[1])


def bucket_steps(case: BatchCase, pipe: Pipeline) -> dict[str, Any]:
    """Steps and evaluations of batches of every length, one after the other, short ones among them."""
    module = build(case.model, "float64")
    losses, differences = [], []
    for number, length in enumerate((6, *case.lengths) * 2):
        batch = of_length(SUBJECTS[case.model].batch(number, 8 - number), length)
        reset(pipe, module)
        expected = whole_loss(case_of(case), module, batch)
        expected.backward()
        losses.append((pipe.step(*given(case, pipe, batch)), expected.item()))
        differences.append(difference(pipe, module))
        found = pipe.evaluate(*given(case, pipe, batch), outputs="all")
        with torch.no_grad():
            differences.append(gap(found.outputs, whole_output(module, batch)))
    return {"losses": losses, "differences": differences}


class Mixed(torch.utils.data.Dataset[Any]):
    """22 sequences of 2 to the pipeline's longest."""

    def __init__(self, model: str, longest: int) -> None:
        self.inputs, self.targets = of_length(SUBJECTS[model].batch(5, 22), longest)
        self.lengths = [2 + (3 * number) % (longest - 1) for number in range(22)]

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        length = self.lengths[index]
        if self.targets is None:
            return {key: value[index, :length] for key, value in self.inputs.items()}, None
        return self.inputs[index, :length], self.targets[index, :length]


def padded_batch(samples: list[tuple[Any, Any]], length: int) -> Any:
    """Texts are padded with 0; labels with -100 where they are inputs, else with 0, which the loss ignores."""

    def pad(items: list[Tensor], value: int) -> Tensor:
        return torch.stack([nn.functional.pad(item, (0, length - len(item)), value=value) for item in items])

    first = samples[0][0]
    if isinstance(first, dict):
        fill = {"labels": -100}
        return {key: pad([item[key] for item, _ in samples], fill.get(key, 0)) for key in first}
    return pad([text for text, _ in samples], 0), pad([label for _, label in samples], 0)


def bucketed_loader(case: BatchCase, pipe: Pipeline) -> dict[str, Any]:
    """An epoch of mixed lengths beside one process that pads the same samples alike."""
    module = build(case.model, "float64")
    lengths = sorted((6, *case.lengths))
    dataset = Mixed(case.model, lengths[-1])
    loader = pipe.data_loader(dataset, shuffle=True, seed=2, collate_fn=padded_batch, lengths=dataset.lengths)
    reference = one_rank_batches(dataset, lengths)
    losses, differences, samples, kinds = [], [], [], set()
    for batch, (indices, length) in zip(loader, reference, strict=True):
        whole = padded_batch([dataset[index] for index in indices], length)
        reset(pipe, module)
        expected = whole_loss(case_of(case), module, (whole, None) if isinstance(whole, dict) else whole)
        expected.backward()
        losses.append((pipe.step(batch), expected.item()))
        differences.append(difference(pipe, module))
        samples.append(len(batch))
        kinds.add(length)
    return {"losses": losses, "differences": differences, "samples": sum(samples), "lengths": sorted(kinds)}


def one_rank_batches(dataset: Mixed, lengths: list[int]) -> list[tuple[list[int], int]]:
    """As the guide says: samples by bucket in the epoch's order, and batches in an order of their own."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(22, generator=generator).tolist()
    batches = []
    for low, length in zip([0, *lengths], lengths, strict=False):
        own = [index for index in order if low < dataset.lengths[index] <= length]
        batches += [(own[start : start + 8], length) for start in range(0, len(own), 8)]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def picked(dataset: Counted, chosen: Tensor) -> tuple[Any, Any]:
    if dataset.targets is None:
        return {key: value[chosen] for key, value in dataset.inputs.items()}, None
    return dataset.inputs[chosen], dataset.targets[chosen]


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples that are drawn anew every time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[float, float]:
        return torch.rand(()).item() + index, random.random() + index


def drawn_samples(pipe: Pipeline) -> dict[str, Any]:
    """What a rank loads of a dataset that draws random numbers: by micro-batch, so that ranks can be compared."""

    def collated(samples: list[Any]) -> Any:
        noise = torch.rand(()).item()
        pair = [[one, noise] for one, _ in samples], [[two, noise] for _, two in samples]
        return pair if pipe.engine.takes_targets else (pair[0],)

    state = torch.random.get_rng_state()
    runs = []
    for workers in (0, 2):
        loader = pipe.data_loader(Drawn(), seed=3, collate_fn=collated, num_workers=workers)
        runs.append(
            [{f"{batch}.{key}": part for key, part in found.parts.items()} for batch, found in enumerate(loader)]
        )
    assert torch.equal(state, torch.random.get_rng_state())
    assert runs[0] == runs[1], "workers draw other numbers"
    return {key: part for found in runs[0] for key, part in found.items()}


@dataclasses.dataclass(frozen=True)
class _Numbers:
    model: str
    numbers: str = "float64"


def case_of(case: BatchCase) -> Any:
    return _Numbers(case.model)


def difference(pipe: Pipeline, module: nn.Module) -> float:
    """The largest difference of a gradient, relative to the largest gradient."""
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    largest = max(float(item.abs().max()) for item in wanted.values() if item is not None)
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other = wanted[name]
        worst = max(worst, float((mine - (torch.zeros_like(mine) if other is None else other)).abs().max()))
    return worst / largest


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
