"""PipeDream's loss beside the synchronous pipeline's, on scikit-learn's handwritten digits:

torchrun --nproc-per-node 4 examples/digits_pipedream.py --out out/digits-pipedream.svg

Four ways to train the same model on the same digits in the same order and with the same learning rate: 1F1B with
an optimizer step per global batch of 64; 1F1B with one per 8, for which the pipeline must drain every time;
PipeDream with one per 8, each from weights that are up to N − 1 steps old; and PipeDream with vertical sync.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapipe.costs.profile import read_profile
from bapipe.hardware.cluster import Accelerator
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import WIDTH, Chart, Scale, label, x_axis, y_axis
from bapipe.torch import PipeDream, Pipeline
from bapipe.torch.inputs.build_model import BuiltModel, build_model
from bapipe.torch.inputs.training_data import batches_for

HERE = Path(__file__).resolve().parent
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000")


def plan_for(schedule: str, stages: int, *, global_batch: int = 64) -> Plan:
    """A plan of examples/tiny_model.py for so many CPU ranks, cut where PipeDream's planner cuts."""
    cluster = read_cluster(str(HERE / "cluster-two-cpus.toml"))
    kind = cluster.accelerators[0].type
    names = [f"localhost/{rank}" for rank in range(stages)]
    ranks = tuple(Accelerator(name=name, type=kind, node="localhost") for name in names)
    request = Request(
        global_batch=global_batch, microbatch=8, schedule=schedule, strategy="pipedream", stages=stages
    )
    profile = read_profile(HERE / "tiny-profile.json")
    return make_plan(explore(profile, replace(cluster, accelerators=ranks), request))


def synchronous(built: BuiltModel, plan: Plan, batches: Sequence[Any], rate: float) -> list[float]:
    """The loss of every global batch, with an optimizer step after each."""
    pipe = Pipeline(lambda: (built.module, built.args, built.kwargs), plan, built.loss, seed=None)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
    losses = []
    for inputs, targets in batches:
        losses.append(pipe.step(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return losses


def pipedream(
    built: BuiltModel, plan: Plan, batches: Sequence[Any], rate: float, *, vertical_sync: bool
) -> tuple[list[float], int]:
    """The mean loss of every global batch, a step after each of its micro-batches; and this rank's versions."""
    pipe = PipeDream(
        lambda: (built.module, built.args, built.kwargs), plan, built.loss, seed=None, vertical_sync=vertical_sync
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
    trace = pipe.train(batches, optimizer, steps=len(batches))
    pipe.close()
    count = plan.microbatches
    return means(trace.losses, count), trace.weight_versions


def means(losses: Sequence[float], count: int) -> list[float]:
    """The mean of every `count` losses."""
    return [sum(losses[at : at + count]) / count for at in range(0, len(losses), count)]


def smooth(curve: Sequence[float], at: int) -> float:
    """The mean of the last ten losses."""
    last = curve[max(0, at - 9) : at + 1]
    return sum(last) / len(last)


def draw(curves: dict[str, list[float]], samples: int) -> Chart:
    """Loss against samples seen, each the mean of the last ten global batches."""
    count = max(len(curve) for curve in curves.values())
    across = Scale(low=0, high=count * samples, start=46, end=WIDTH - 20)
    # A curve that leaves the first loss behind upwards has diverged; it is cut off at the top.
    up = Scale(low=0, high=1.2 * max(curve[0] for curve in curves.values()), start=250, end=24)
    body = x_axis(across, top=24, bottom=250, words=lambda value: f"{value:g}")
    body += y_axis(up, left=46, right=WIDTH - 20, words=lambda value: f"{value:g}")
    body += label(WIDTH - 20, 280, "digits seen", "soft", "end")
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(
            f"{across((at + 1) * samples):.1f},{up(min(up.high, smooth(curve, at))):.1f}" for at in range(count)
        )
        line = f'fill="none" stroke="{COLOURS[number]}" stroke-width="1.8"'
        body += f'<polyline {line} points="{points}"/>'
        x, y = 46 + 300 * (number % 2), 300 + 18 * (number // 2)
        body += f'<path {line} d="M{x},{y - 4}h20"/>{label(x + 26, y, name)}'
    return Chart(name="digits-pipedream", title="Loss on handwritten digits", height=330, body=body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=112, help="global batches of 64; 28 are an epoch")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--out", type=Path, help="write the curves as an SVG, and their figures as JSON beside it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages, rank = dist.get_world_size(), dist.get_rank()
    plain, endless = plan_for("1f1b-sno", stages), plan_for("pipedream", stages)
    small = plan_for("1f1b-sno", stages, global_batch=endless.microbatch_size)

    def fresh() -> BuiltModel:
        return build_model(plain.model, folders=(HERE.parent,), seed=0)

    make = batches_for(fresh(), "digits", global_batch=plain.global_batch, seed=0)
    batches = [make(step) for step in range(options.steps)]
    rate = options.learning_rate
    pieces = [
        piece
        for inputs, targets in batches
        for piece in zip(inputs.split(small.global_batch), targets.split(small.global_batch), strict=True)
    ]
    curves = {
        f"1f1b, a step per {plain.global_batch}": synchronous(fresh(), plain, batches, rate),
        f"1f1b, a step per {small.global_batch}": means(
            synchronous(fresh(), small, pieces, rate), plain.global_batch // small.global_batch
        ),
    }
    held: dict[str, list[int]] = {}
    for vertical_sync, words in ((False, ""), (True, ", vertical sync")):
        name = f"PipeDream, a step per {endless.microbatch_size}{words}"
        curve, versions = pipedream(fresh(), endless, batches, rate, vertical_sync=vertical_sync)
        curves[name] = curve
        everywhere: list[Any] = [None] * stages
        dist.all_gather_object(everywhere, versions)
        held[name] = everywhere
    if rank == 0:
        report(curves, held, plain.global_batch, options.out)
    dist.destroy_process_group()


def report(curves: dict[str, list[float]], held: dict[str, list[int]], samples: int, out: Path | None) -> None:
    count = len(next(iter(curves.values())))
    places = sorted({round((count - 1) * part / 6) for part in range(7)})
    print(f"{'digits seen':44}" + "".join(f"{(place + 1) * samples:8}" for place in places))
    for name, curve in curves.items():
        print(f"{name:44}" + "".join(f"{smooth(curve, at):8.3f}" for at in places))
    for name, versions in held.items():
        print(
            f"{name}: {', '.join(map(str, versions))} versions of the weights on stages 0 to {len(versions) - 1}"
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(draw(curves, samples).standalone(), encoding="utf-8")
        shown = {name: [round(smooth(curve, at), 3) for at in places] for name, curve in curves.items()}
        seen = [(place + 1) * samples for place in places]
        figures = {"digits_seen": seen, "losses": shown, "weight_versions": held}
        out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(main())
