"""The accuracy tables of measured models, as Markdown: `python tables.py details.json …`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bapipe.torch.profiler import Measurement, agreement, predicted_peak, read_measurement
from bapipe.torch.profiler.assemble_profile import spread
from bapipe.torch.profiler.layer_times import parts

__all__ = ["accuracy_tables", "time_rows"]


def accuracy_tables(measured: Sequence[Measurement]) -> str:
    """Sum of layers against the whole step, what it is made of (GPU), and predicted against allocated memory."""
    lines = ["Environment: " + "; ".join(dict.fromkeys(str(item.environment) for item in measured)), ""]
    lines += ["Sum of layers, before any calibration, against the whole step (forward and backward, median).", ""]
    lines += _table(
        ("model", "dtype", "device", "micro-batch", "sum of layers, ms", "eager step, ms", "residual",
         "as one stage, ms", "residual", "rounds differ"),
        (row for item in measured for row in _times(item)),
    )  # fmt: skip
    made = [row for item in measured for row in _parts(item)]
    if made:
        lines += [
            "",
            "What the sum is made of: the device's time and the host's to issue, as a share of the eager step.",
        ]
        lines += [
            "`limited by` is the larger one. Last: the residual had each layer been issued alone after a pause.",
            "",
        ]
        lines += _table(
            ("model", "dtype", "device", "micro-batch", "device", "issued in a step", "issued alone", "limited by",
             "residual", "residual, alone"),
            made,
        )  # fmt: skip
    memory = [row for item in measured for row in _memory(item)]
    if memory:
        lines += [
            "",
            "Peak memory of one step: predicted from the layers against torch.cuda.max_memory_allocated.",
            "",
        ]
        lines += _table(
            ("model", "dtype", "device", "micro-batch", "predicted, MB", "allocated, MB", "off by"), memory
        )
    return "\n".join(lines) + "\n"


def time_rows(measured: Sequence[Measurement]) -> list[dict[str, str]]:
    """The first table, for a result file."""
    keys = ("model", "dtype", "device", "microbatch", "layers_ms", "step_ms", "residual", "stage_ms",
            "stage_residual", "rounds_differ")  # fmt: skip
    return [dict(zip(keys, row, strict=True)) for item in measured for row in _times(item)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _name(item: Measurement) -> tuple[str, str, str]:
    return item.model, item.dtype, item.environment.slice.split(" of ")[0] or item.environment.device


def _times(item: Measurement) -> Iterable[tuple[str, ...]]:
    for size in item.sizes():
        found = agreement(item, size)
        if found is None:
            yield (*_name(item), str(size), "", "does not fit", "", "", "", "")
            continue
        yield (
            *_name(item),
            str(size),
            f"{found.layers * 1e3:.2f}",
            f"{found.eager * 1e3:.2f}",
            f"{found.residual:+.1%}",
            f"{found.chain * 1e3:.2f}",
            f"{found.chain_residual:+.1%}",
            f"{spread(item, size)[0]:.1%}",
        )


def _parts(item: Measurement) -> Iterable[tuple[str, ...]]:
    for size in item.sizes():
        found, own = agreement(item, size), parts(item, size)
        if found is None or own is None:
            continue
        host = own.alone if own.issue is None else own.issue
        yield (
            *_name(item),
            str(size),
            f"{own.device / found.eager:.0%}",
            "" if own.issue is None else f"{own.issue / found.eager:.0%}",
            f"{own.alone / found.eager:.0%}",
            "host" if host > own.device else "device",
            f"{found.residual:+.1%}",
            f"{own.layers_alone / found.eager - 1:+.1%}",
        )


def _memory(item: Measurement) -> Iterable[tuple[str, ...]]:
    for size in item.sizes():
        predicted = predicted_peak(item, size)
        peak = max((step.peak or 0.0 for step in item.whole if step.microbatch == size), default=0.0)
        if predicted is not None and peak:
            yield (
                *_name(item),
                str(size),
                f"{predicted / 1e6:.1f}",
                f"{peak / 1e6:.1f}",
                f"{predicted / peak - 1:+.1%}",
            )


if __name__ == "__main__":
    sys.stdout.write(accuracy_tables([read_measurement(Path(path)) for path in sys.argv[1:]]))
