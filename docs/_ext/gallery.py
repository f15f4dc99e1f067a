"""The gallery of schedules: each by `bapipe simulate`, with its picture and what it costs.

`docs/guide/gallery.md` has `overview` and `sections` in blocks of figures; `scripts/pictures` writes the pictures.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from bapipe.cli import cli

__all__ = ["SHOWN", "command", "overview", "picture", "sections"]

_TIMES = "--forward 10 --backward 20 --transfer 2"
SHOWN: dict[str, tuple[str, str]] = {
    "gpipe": (
        "",
        "All forwards, then all backwards. The simplest order, and the one that holds most: every micro-"
        "batch of the global batch at once, on every rank.",
    ),
    "1f1b-sno": (
        "",
        "One forward, one backward in turn. As much bubble as GPipe and far less memory: rank *i* of N "
        "holds N − i micro-batches. Every transfer stands in the way of the next action.",
    ),
    "1f1b-so": (
        "",
        "The same with twice as many micro-batches in flight, so that transfers run beside the compute: the"
        " choice on slow links with memory to spare.",
    ),
    "1f1b": (
        "--in-flight 5,4,3,1",
        "The same with a cap for each rank: what the planner uses to spend exactly as much memory as hides "
        "the transfers.",
    ),
    "interleaved": (
        "",
        "Two stages on each rank, far apart in the model: the pipeline fills twice as fast, for twice the "
        "messages and more micro-batches in flight.",
    ),
    "zb-h1": (
        "",
        "The backward in two parts, the input's gradient (I) and the weights' (W). Only I is waited for, so"
        " W fills the bubble. In-flight micro-batches as 1F1B, but what W needs is held for longer.",
    ),
    "zb-h2": (
        "",
        "The same with nearly twice the micro-batches in flight: the bubble at the start is filled, too.",
    ),
    "zb": (
        "--in-flight 6,5,4,3",
        "The same with a cap for each rank and W deferred as far as memory allows, in an order made for the"
        " times.",
    ),
    "zb-v": (
        "",
        "Split backwards and two stages on each rank, placed in a V: the first rank has the first and the "
        "last stage. No more in flight than 1F1B holds on its first rank, on any rank.",
    ),
    "v-half": (
        "",
        "The same placement with half of that memory, for more bubble.",
    ),
    "v-min": (
        "",
        "And with a third of it.",
    ),
    "dualpipe-v": (
        "",
        "The same placement with forwards of one half beside backwards of the other. Made for accelerators "
        "that run both at once; BaPipe runs them one after the other, and plans it only when asked.",
    ),
    "pipedream": (
        "",
        "Never flushes, so there is no bubble after the start; in exchange each stage keeps several "
        "versions of its weights, and gradients are computed from older ones. The time is that of the "
        "global batch shown.",
    ),
    "1f1b-as": (
        "",
        "1F1B for accelerators that send while they compute (FPGAs): the paper's Table I.",
    ),
    "fbp-as": (
        "",
        "The same, with the forward of one and the backward of another micro-batch at once.",
    ),
}
"""schedule -> further options, and what it is"""
_RANKS, _MICROBATCHES = 4, 8


def command(name: str) -> str:
    """The command that a section shows."""
    more = f" {SHOWN[name][0]}" if SHOWN[name][0] else ""
    return f"bapipe simulate {name} --stages {_RANKS} --micro-batches {_MICROBATCHES} {_TIMES}{more}"


@cache
def _simulated(name: str) -> tuple[dict[str, Any], str]:
    """(what `--json` prints, what `--svg` writes) of a section's command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.svg"
        words = [*shlex.split(command(name))[1:], "--json", "--svg", str(file)]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary, file.read_text(encoding="utf-8")


def picture(name: str) -> str:
    """The timeline as SVG."""
    return _simulated(name)[1]


def overview() -> str:
    """All of them in one table, by bubble."""
    lines = [
        "| schedule | time | bubble | in flight, fullest rank | in flight, all ranks | weight versions, most |",
        "|---|---|---|---|---|---|",
    ]
    found = {name: _simulated(name)[0] for name in SHOWN}
    for name, one in sorted(found.items(), key=lambda item: item[1]["bubble"]):
        flying = one["peak_activations"]
        lines.append(
            f"| [`{name}`](#{name}) | {one['time']:g} | {100 * one['bubble']:.1f} % | {max(flying):g} | "
            f"{sum(flying):g} | {max(one['weights_memory']) - 1:g} |"
        )
    return "\n".join(lines)


def sections() -> str:
    """A section for each."""
    parts = []
    for name, (_, words) in SHOWN.items():
        one, _ = _simulated(name)
        flying = " ".join(f"{value:g}" for value in one["peak_activations"])
        parts.append(
            f"## {name}\n\n{words}\n\n![the timeline of {name}](../images/gallery-{name}.svg)\n\n"
            f"Time {one['time']:g}, bubble {100 * one['bubble']:.1f} %, in flight {flying} micro-batches.\n\n"
            f"```console\n$ {command(name)}\n```"
        )
    return "\n\n".join(parts)
