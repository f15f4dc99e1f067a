"""A loader of one rank: what it refuses, and that a resumed training goes on as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pipelines need torch: pip install bapipe[torch]")

from torch import nn  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.torch import Checkpoints, Pipeline, RankBatch  # noqa: E402
from one_rank_plan import build, one_rank  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


class Noisy(torch.utils.data.Dataset[Any]):
    """21 samples with noise that is drawn anew each time: two global batches of 8, and one of 5."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs = torch.full((6,), index / 21, dtype=torch.float64) + 0.1 * torch.rand(6, dtype=torch.float64)
        return inputs, inputs[:4].sin()


def dropping() -> tuple[nn.Module, tuple[Any], dict[str, object]]:
    layers = (nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    return nn.Sequential(*layers).double(), (torch.rand(4, 6).double(),), {}


def trained(folder: Path, *, until: int) -> list[float]:
    """The losses of a training of so many steps, from where the last one in the folder stopped."""
    torch.manual_seed(len(list(folder.glob("*"))))  # whatever a script has drawn before must not matter
    losses = []
    with Pipeline(dropping, one_rank(), nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        loader = pipe.data_loader(Noisy(), shuffle=True, seed=5)
        checkpoints = Checkpoints(pipe, folder, optimizer=optimizer)
        loaded = checkpoints.load()
        if loaded is not None:
            loader.load_state_dict(loaded.data)
        while pipe.steps < until:
            for batch in loader:
                losses.append(pipe.step(batch))
                optimizer.step()
                optimizer.zero_grad()
                if pipe.steps == until:
                    break
        checkpoints.save(data=loader.state_dict())
        checkpoints.close()
    return losses


def test_a_resumed_training_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    """With dropout, a dataset that draws, a shuffled order, short batches; stopped in an epoch and at its end."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = trained(tmp_path / "whole", until=8)
    parts = [loss for until in (2, 6, 8) for loss in trained(tmp_path / "parts", until=until)]
    assert len(whole) == 8
    assert parts == whole


def test_what_a_loader_cannot_take_is_one_line() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with Pipeline(build, one_rank(), nn.functional.mse_loss) as pipe:
        for make, message in (
            (lambda: pipe.data_loader(Stream()), "takes a dataset with a length, got Stream; give every rank"),
            (lambda: pipe.data_loader(Noisy(), batch_size=4), "batch_size is the plan's, got it for data_loader"),
            (
                lambda: pipe.data_loader([(0, 0)] * 3, drop_last=True),
                "has 3 samples, fewer than a global batch of 8",
            ),
            (lambda: pipe.data_loader(Noisy(), lengths=[1] * 20), "lengths without collate_fn; give collate_fn"),
            (
                lambda: pipe.data_loader(Noisy(), lengths=[6] * 20, collate_fn=list),
                "the dataset has 21 samples, lengths are of 20; give one of each",
            ),
            (
                lambda: pipe.data_loader(Noisy(), lengths=[7] * 21, collate_fn=list),
                "the longest sequence has 7 positions, the pipeline was made for 6; make it with a longer one",
            ),
            (
                lambda: next(iter(pipe.data_loader(Noisy(), collate_fn=lambda samples: samples[:1]))),
                r"a batch is \(inputs, targets\), got list of 1; return both",
            ),
            (
                lambda: pipe.step(RankBatch(samples=8, parts={})),
                "needs the inputs of micro-batch 0, the batch has none",
            ),
            (
                lambda: pipe.step(RankBatch(samples=8, parts={}), torch.ones(8)),
                "has its targets in it, got targets",
            ),
            (lambda: pipe.evaluate(torch.rand(8, 6), outputs=1), 'outputs is "all" or a rank from 0 to 0, got 1'),
        ):
            with pytest.raises(BaPipeError, match=message):
                make()


def test_a_model_that_fixes_its_batch_takes_whole_micro_batches() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, inputs: Any) -> Any:
            return self.second(self.first(inputs.reshape(4, 6)).tanh())

    plan = one_rank()
    (stage,) = plan.stages
    plan = replace(plan, stages=(replace(stage, layers=("first", "second")),))
    with Pipeline(
        lambda: (Fixed().double(), (torch.rand(4, 6).double(),), {}), plan, nn.functional.mse_loss
    ) as pipe:
        inputs, targets = torch.rand(8, 6).double(), torch.rand(8, 4).double()
        pipe.step(inputs[:4], targets[:4])
        with pytest.raises(BaPipeError, match=r"a micro-batch of 2 samples is left of 6; leave short batches out"):
            pipe.step(inputs[:6], targets[:6])
