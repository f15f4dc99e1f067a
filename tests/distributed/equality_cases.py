"""Which cases are trained: every pair of choices in `scripts/test`, all of them in `scripts/test --full`."""

from __future__ import annotations

import itertools
from dataclasses import replace

from equality_models import SUBJECTS
from equality_plans import Case, Pair, Row, all_pairs, falling_caps

__all__ = [
    "CHECKPOINTED",
    "DIGITS",
    "FACTORS",
    "LONG",
    "NEVER",
    "OTHERS",
    "PAIRS",
    "ROWS",
    "TORCH",
    "UPDATED",
    "full_product",
]

MODELS = ("vgg", "resnet", "gnmt", "gpt2", "llama", "unet")
SCHEDULES = ("gpipe", "1f1b-sno", "1f1b-so", "1f1b", "data-parallel")
FACTORS: dict[str, tuple[object, ...]] = {
    "model": MODELS,
    "schedule": SCHEDULES,
    "stages": (1, 2, 3, 4),
    "microbatches": (1, 2, 5, 8),
    "recompute": ("none", "even", "odd"),
    "numbers": ("float64", "float32", "dropout"),
    "cut": ("even", "early", "late", "scattered"),
    "short": (False, True),
    "data": ("everywhere", "needed"),
}
CAPTURED = {
    "vgg": ("float64", "dropout"),
    "resnet": ("float64", "float32"),
    "gnmt": ("float64",),
    "gpt2": ("float64", "dropout"),
    "llama": ("float64", "float32"),
    "unet": ("float64", "float32"),
}
"""what of each model the pairs have: a capture takes seconds, and GNMT's most of all"""
NEVER: set[Pair] = {
    (("model", model), ("numbers", numbers))
    for model, some in CAPTURED.items()
    for numbers in FACTORS["numbers"]
    if numbers not in some
}


def _case(row: Row) -> Case:
    stages = 1 if row["schedule"] == "data-parallel" else int(str(row["stages"]))
    again = {"none": (), "even": range(0, stages, 2), "odd": range(1, stages, 2)}[str(row["recompute"])]
    caps = falling_caps(stages, int(str(row["microbatches"])), seed=row) if row["schedule"] == "1f1b" else None
    return Case(**{**row, "recompute": tuple(again), "caps": caps})  # type: ignore[arg-type]


ROWS = all_pairs(FACTORS, never=NEVER)
PAIRS = tuple(_case(row) for row in ROWS)


def full_product() -> tuple[Case, ...]:
    """Schedules with and without recomputation, models, N, M and numbers; cuts and the rest take turns."""
    turns = itertools.count()
    found = []
    for model, schedule, stages, microbatches, recompute, numbers in itertools.product(
        MODELS, SCHEDULES, (1, 2, 3, 4), (1, 2, 5, 8), ("none", "even"), ("float64", "float32", "dropout")
    ):
        if numbers == "dropout" and not SUBJECTS[model].dropout:
            continue
        turn = next(turns)
        row: Row = {
            "model": model,
            "schedule": schedule,
            "stages": stages,
            "microbatches": microbatches,
            "recompute": recompute if recompute == "none" or turn % 3 else "odd",
            "numbers": numbers,
            "cut": FACTORS["cut"][turn % 4],
            "short": bool(turn // 4 % 2),
            "data": FACTORS["data"][turn // 8 % 2],
        }
        found.append(_case(row))
    return tuple(dict.fromkeys(found))


HYBRIDS = (
    Case(model="gpt2", schedule="1f1b-so", stages=2, microbatches=5, replicas=(2, 1), short=True),
    Case(model="resnet", schedule="gpipe", stages=2, microbatches=8, replicas=(3, 1), data="needed"),
    Case(model="gnmt", schedule="1f1b-sno", stages=3, microbatches=5, replicas=(1, 2, 1), short=True),
    Case(model="unet", schedule="1f1b-sno", stages=2, microbatches=5, replicas=(2, 2), recompute=(1,)),
    Case(model="llama", schedule="1f1b", stages=1, microbatches=5, caps=(2,), replicas=(2,), short=True),
    Case(model="gpt2", schedule="1f1b-sno", stages=2, microbatches=2, replicas=(1, 3), numbers="dropout"),
    Case(model="gpt2", schedule="interleaved", stages=2, microbatches=4, replicas=(2, 2)),
    Case(model="gnmt", schedule="zb-v", stages=2, microbatches=5, replicas=(2, 2), short=True),
    Case(model="unet", schedule="v-half", stages=2, microbatches=4, replicas=(2, 2), layers="odd"),
)
"""replicas of stages that are no whole share each, some of them without a micro-batch"""
DEALT = (
    Case(
        model="gpt2", schedule="1f1b", stages=1, microbatches=4, caps=(1,), replicas=(2,),
        dealing=((0, 0, 1, 0),), evaluate=True,
    ),
    Case(
        model="resnet", schedule="1f1b", stages=2, microbatches=4, caps=(4, 1), replicas=(2, 1),
        dealing=((0, 0, 1, 0), ()), short=True,
    ),
    Case(
        model="gpt2", schedule="1f1b-so", stages=2, microbatches=8, replicas=(2, 2), numbers="dropout",
        dealing=((0, 0, 1), (0, 1, 1)), short=True, data="needed",
    ),
    Case(
        model="unet", schedule="1f1b", stages=3, microbatches=5, caps=(3, 2, 1), replicas=(1, 2, 1),
        dealing=((), (1, 0, 1), ()), recompute=(1,),
    ),
    Case(
        model="gnmt", schedule="zb-h1", stages=2, microbatches=8, replicas=(2, 2), dealing=((0, 0, 1, 0),) * 2,
        training="adamw", steps=3,
    ),
)  # fmt: skip
"""replicas that take unequal numbers of micro-batches: all of a model, of a stage, of neighbours dealt otherwise,
of whole pipelines"""
INTERLEAVED = (
    Case(model="gpt2", schedule="interleaved", stages=2, microbatches=5, recompute=(1, 2)),
    Case(model="unet", schedule="interleaved", stages=2, microbatches=4, short=True, data="needed"),
    Case(model="whole", schedule="interleaved", stages=2, microbatches=2, cut="late"),
    Case(model="gpt2", schedule="interleaved", stages=2, microbatches=5, virtual=(2, 1), evaluate=True),
    Case(model="vgg", schedule="interleaved", stages=3, microbatches=4, virtual=(3, 2, 1), short=True),
)
ZERO_BUBBLE = (
    Case(model="vgg", numbers="dropout", schedule="zb-h1", stages=3, microbatches=5),
    Case(model="resnet", schedule="zb-h2", stages=2, microbatches=5, short=True),
    Case(model="gnmt", schedule="zb-h1", stages=4, microbatches=8),
    Case(model="gpt2", schedule="zb-h2", stages=3, microbatches=8, recompute=(1,)),
    Case(model="gpt2", schedule="zb", stages=3, microbatches=8, caps=(6, 4, 2)),
    Case(model="llama", schedule="zb-h1", stages=2, microbatches=2),
    Case(model="unet", schedule="zb-h1", stages=3, microbatches=8, short=True, recompute=(0, 2)),
    Case(model="whole", schedule="zb-h1", stages=3, microbatches=5),
)
V_SHAPED = (
    Case(model="vgg", numbers="dropout", schedule="zb-v", stages=2, microbatches=5),
    Case(model="unet", schedule="zb-v", stages=2, microbatches=8, short=True, recompute=(1, 2), data="needed"),
    Case(model="gpt2", schedule="v-half", stages=3, microbatches=5),
    Case(model="llama", schedule="v-min", stages=2, microbatches=2, evaluate=True),
    Case(model="resnet", schedule="dualpipe-v", stages=2, microbatches=5, short=True),
    Case(model="whole", schedule="dualpipe-v", stages=2, microbatches=5),
)
"""two stages a rank, of which one hands to the other at the turn"""
CHECKPOINTED = (
    Case(model="gpt2", numbers="dropout", schedule="1f1b-so", stages=2, microbatches=5, layers="all", short=True),
    Case(model="resnet", schedule="1f1b", stages=2, microbatches=5, caps=(3, 2), layers="odd", evaluate=True),
    Case(model="vgg", numbers="dropout", schedule="gpipe", stages=3, microbatches=2, layers="pairs"),
    Case(model="llama", schedule="data-parallel", stages=2, microbatches=2, layers="all"),
    Case(model="gpt2", schedule="1f1b-sno", stages=2, microbatches=4, replicas=(2, 1), layers="odd"),
    Case(model="unet", schedule="interleaved", stages=2, microbatches=4, layers="pairs", data="needed"),
    Case(model="gpt2", numbers="dropout", schedule="zb-h1", stages=3, microbatches=5, layers="all"),
    Case(model="gnmt", schedule="zb-h2", stages=3, microbatches=5, layers="odd", short=True),
    Case(model="resnet", schedule="zb-h1", stages=2, microbatches=5, layers="pairs"),
    Case(model="unet", schedule="zb-v", stages=2, microbatches=5, layers="odd"),
    Case(model="whole", schedule="zb-h1", stages=2, microbatches=3, layers="all"),
    Case(model="gpt2", schedule="1f1b-so", stages=3, microbatches=5, training="adamw", steps=3, layers="pairs"),
)
"""layers that recompute, under every kind of schedule"""
WHOLE = (
    Case(model="whole", numbers="dropout", schedule="1f1b-so", stages=3, microbatches=5, recompute=(1,)),
    Case(model="whole", schedule="data-parallel", stages=2, microbatches=2),
)
"""modules that a capture keeps whole"""
DRIFTING = (
    Case(model="drifting", schedule="1f1b-so", stages=2, microbatches=5, recompute=(0, 1)),
    Case(model="drifting", schedule="gpipe", stages=2, microbatches=5, evaluate=True),
)
EVALUATED = (
    Case(model="whole", schedule="1f1b-sno", stages=2, microbatches=2, short=True, evaluate=True),
    Case(model="resnet", schedule="1f1b-so", stages=3, microbatches=5, short=True, evaluate=True),
    Case(model="vgg", numbers="dropout", schedule="gpipe", stages=2, microbatches=2, evaluate=True),
    Case(model="gnmt", schedule="1f1b-sno", stages=2, microbatches=5, evaluate=True, recompute=(0, 1)),
)
UPDATED = (
    Case(model="gpt2", schedule="1f1b-sno", stages=3, microbatches=5, training="adamw", steps=3),
    Case(model="resnet", schedule="1f1b-so", stages=2, microbatches=5, training="adamw", steps=3, recompute=(1,)),
    Case(model="gnmt", schedule="gpipe", stages=4, microbatches=2, training="adamw", steps=3, short=True),
    Case(model="gpt2", schedule="data-parallel", stages=3, microbatches=2, training="adamw", steps=3),
)
DIGITS = (Case(model="digits", schedule="1f1b-so", stages=2, microbatches=4, size=8, training="sgd", steps=200),)
LONG = tuple(
    Case(model=model, schedule="1f1b", stages=3, microbatches=microbatches, caps=caps, steps=1)
    for model, caps in (("resnet", (3, 2, 1)), ("unet", (5, 3, 2)))
    for microbatches in (10, 30)
)
"""the same caps over few and many micro-batches"""
TORCH = tuple(
    replace(case, engine="torch")
    for case in (
        Case(model="vgg", numbers="dropout", schedule="gpipe", stages=2, microbatches=2, evaluate=True),
        Case(model="resnet", schedule="1f1b-sno", stages=3, microbatches=5, evaluate=True),
        Case(model="gnmt", schedule="1f1b-so", stages=4, microbatches=8),
        Case(model="gpt2", schedule="1f1b", stages=3, microbatches=5, caps=(4, 2, 1), data="needed"),
        Case(model="unet", schedule="1f1b-so", stages=3, microbatches=5, data="needed", evaluate=True),
        Case(model="gpt2", schedule="1f1b-sno", stages=3, microbatches=5, training="adamw", steps=3),
        Case(model="llama", schedule="gpipe", stages=1, microbatches=2),
        Case(model="gpt2", schedule="interleaved", stages=2, microbatches=5, evaluate=True),
        Case(model="vgg", numbers="dropout", schedule="zb-h1", stages=3, microbatches=5),
        Case(model="gnmt", schedule="zb-h1", stages=4, microbatches=8),
        Case(model="gpt2", schedule="zb-h2", stages=3, microbatches=8),
        Case(model="gpt2", schedule="zb", stages=3, microbatches=8, caps=(6, 4, 2)),
        Case(model="unet", schedule="zb-h1", stages=3, microbatches=8, evaluate=True),
        Case(model="whole", schedule="zb-h1", stages=3, microbatches=5),
        Case(model="unet", schedule="zb-v", stages=2, microbatches=8, data="needed"),
        Case(model="gpt2", schedule="v-half", stages=3, microbatches=5),
        Case(model="llama", schedule="v-min", stages=2, microbatches=2, evaluate=True),
        Case(model="resnet", schedule="dualpipe-v", stages=2, microbatches=5, evaluate=True),
    )
)
"""by torch's engine: every schedule that it runs"""
OTHERS = (
    *HYBRIDS,
    *DEALT,
    *INTERLEAVED,
    *ZERO_BUBBLE,
    *V_SHAPED,
    *CHECKPOINTED,
    *WHOLE,
    *DRIFTING,
    *EVALUATED,
    *UPDATED,
    *DIGITS,
    *LONG,
)
