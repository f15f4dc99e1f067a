"""Ways to train in which batches are short, come from a loader, and are evaluated for their outputs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from equality_plans import Case

__all__ = ["BATCH_CASES", "BatchCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCase:
    """One way to train one model of `token_mean_worker.SUBJECTS`."""

    model: str
    schedule: str = "1f1b-so"
    replicas: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    """of sequences, beside the example's 6"""
    data: str = "everywhere"
    """who is given batches that come from no loader: all ranks, or those that need it"""

    @property
    def plain(self) -> Case:
        parallel = self.schedule == "data-parallel"
        return Case(
            model=self.model,
            schedule=self.schedule,
            stages=2,
            microbatches=2 if parallel else 4,
            replicas=self.replicas,
            size=2,
        )

    @property
    def ranks(self) -> int:
        return sum(self.replicas) if self.replicas else 2

    @property
    def name(self) -> str:
        extra = f"-r{'.'.join(map(str, self.replicas))}" if self.replicas else ""
        extra += f"-l{'.'.join(map(str, self.lengths))}" if self.lengths else ""
        return f"{self.model}-{self.schedule}{extra}{'' if self.data == 'everywhere' else f'-{self.data}'}"


BATCH_CASES = (
    BatchCase(model="words"),
    BatchCase(model="words", data="needed"),
    BatchCase(model="words", schedule="gpipe"),
    BatchCase(model="words", schedule="zb-h1"),
    BatchCase(model="words", schedule="data-parallel"),
    BatchCase(model="words", replicas=(1, 2)),
    BatchCase(model="words", replicas=(2, 1)),
    BatchCase(model="words-sum-and-count"),
    BatchCase(model="words", lengths=(4, 9)),
    BatchCase(model="words", data="needed", schedule="zb-h1", lengths=(9,)),
    BatchCase(model="gpt2", lengths=(3,)),
    BatchCase(model="gpt2", schedule="data-parallel", lengths=(4,)),
    BatchCase(model="gpt2"),
)
