"""Models whose loss is a mean over tokens of which every micro-batch has another number, and how they are trained.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from equality_plans import Case

__all__ = ["CASES", "FULL", "MICROBATCH", "TokenCase"]

MICROBATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCase:
    """One way to train one model."""

    model: str
    """of `token_mean_worker.SUBJECTS`"""
    numbers: str = "float64"
    schedule: str = "1f1b-so"
    replicas: tuple[int, ...] | None = None

    @property
    def plain(self) -> Case:
        stages = 1 if self.schedule == "data-parallel" else 2
        return Case(
            model=self.model,
            numbers=self.numbers,
            schedule="1f1b-so" if self.schedule == "pipedream" else self.schedule,
            stages=2 if self.schedule == "data-parallel" else stages,
            microbatches=2 if self.schedule == "data-parallel" else 4,
            replicas=self.replicas,
            size=MICROBATCH,
        )

    @property
    def ranks(self) -> int:
        return sum(self.replicas) if self.replicas else 2

    @property
    def name(self) -> str:
        extra = f"-r{'.'.join(map(str, self.replicas))}" if self.replicas else ""
        return f"{self.model}-{self.numbers}-{self.schedule}{extra}"


CASES = (
    TokenCase(model="gpt2"),
    TokenCase(model="gpt2", numbers="float32"),
    TokenCase(model="t5"),
    TokenCase(model="t5", numbers="float32"),
    TokenCase(model="words"),
    TokenCase(model="words", numbers="float32"),
    TokenCase(model="words-weighted"),
    TokenCase(model="words-masked"),
    TokenCase(model="words-sum-and-count"),
    TokenCase(model="words-token-mean"),
    TokenCase(model="words-summed"),
    TokenCase(model="words-own-masked"),
    TokenCase(model="gpt2-items"),
    TokenCase(model="gpt2", schedule="data-parallel"),
    TokenCase(model="words", schedule="data-parallel"),
    TokenCase(model="gpt2", replicas=(1, 2)),
    TokenCase(model="words", replicas=(2, 1)),
    TokenCase(model="t5-untied", schedule="pipedream"),
    TokenCase(model="words", schedule="pipedream"),
    TokenCase(model="words-sum-and-count", schedule="pipedream"),
)
FULL = tuple(
    TokenCase(model=model, numbers=numbers, schedule=schedule, replicas=replicas)
    for model in ("gpt2", "t5", "words", "words-weighted", "words-masked", "words-token-mean", "gpt2-items")
    for numbers in ("float64", "float32")
    for schedule, replicas in (
        ("gpipe", None),
        ("1f1b-sno", None),
        ("zb-h1", None),
        ("data-parallel", None),
        ("1f1b-so", (2, 1)),
        ("1f1b-so", (1, 2)),
        ("1f1b-so", (2, 2)),
    )
)
