"""Profiles of the zoo on one GPU, whole and in slices, with the accuracy tables.

    PYTHONPATH=src python3 benchmarks/profile/h200.py --out DIR --budget-seconds 500 \
        [--only fp32,bf16,slice50,slice25,slice12.5] [--models vgg16,resnet50,gnmt-8,gpt] [--sizes 8,16,64]
        [--with-loss] [--parts] [--resume DIR/h200.tar.gz]

Each model and configuration is a process of its own, on a slice with the other slices loaded by the same model.
When the budget is spent it stops and keeps what it has: DIR/h200.tar.gz holds measurements and merged profiles,
for --resume in the next call, and DIR/tables.md the tables. Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tables import accuracy_tables

from bapipe.costs.profile import read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.errors import BaPipeError
from bapipe.io.files import dump_json, write_text
from bapipe.torch import slices
from bapipe.torch.profiler import MeasureSettings, profile_model, read_measurement
from bapipe.torch.profiler.background_load import Load, loaded

MODELS: dict[str, dict[str, int | float | str | bool]] = {
    "vgg16": {},
    "resnet50": {},
    "gnmt-8": {},
    "gpt": {"blocks": 8, "width": 512, "heads": 8, "sequence": 256},
}
CONFIGURATIONS = {
    "fp32": ("fp32", (100.0,)),
    "bf16": ("bf16", (100.0,)),
    "slice50": ("fp32", (50.0, 25.0, 12.5, 12.5)),
    "slice25": ("fp32", slices.even_slices(4)),
    "slice12.5": ("fp32", slices.even_slices(8)),
}
"""name -> (dtype, slices in %, of which the first is profiled)"""
DEFAULT = "fp32,bf16,slice25,slice12.5"
SLICE_MEMORY = 16e9
SIZES = (1, 2, 4, 8, 16, 32, 64)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--work", type=Path, default=Path("/tmp/bapipe-h200"), help="kept between calls")
    made.add_argument("--resume", type=Path, help="h200.tar.gz of an earlier call on another machine")
    made.add_argument("--budget-seconds", type=float, default=500.0)
    made.add_argument("--only", default=DEFAULT)
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--sizes", default=",".join(str(size) for size in SIZES))
    made.add_argument("--seconds", type=float, default=0.05, help="per layer, size and round")
    made.add_argument("--with-loss", action="store_true", help="the loss is a part of the last layer")
    made.add_argument("--parts", action="store_true", help="time each layer in two parts too")
    made.add_argument("--load-size", type=int, default=16, help="micro-batch that the other slices train")
    made.add_argument("--device", default="cuda")
    made.add_argument("--job", help=argparse.SUPPRESS)
    return made


def main() -> None:
    options = parser().parse_args()
    begun = time.monotonic()
    if options.job:
        run_job(options, begun + options.budget_seconds)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.resume and options.resume.is_file():
        with tarfile.open(options.resume) as archive:
            archive.extractall(options.work, filter="data")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what there is is packed all the same
    try:
        for configuration in options.only.split(","):
            for model in options.models.split(","):
                left = options.budget_seconds - (time.monotonic() - begun) - 15
                if left < 30:
                    print("budget spent; call again with --resume", flush=True)
                    return
                spawn(options, f"{configuration}/{model}", left)
    finally:
        with contextlib.suppress(BaPipeError):
            slices.stop()
        finish(options)


def spawn(options: argparse.Namespace, job: str, left: float) -> None:
    """Run one job in a process of its own, which has CUDA from its first moment on the right slice."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--job", job, "--out", str(options.out), "--work", str(options.work)]
    command += ["--budget-seconds", str(left), "--sizes", options.sizes, "--seconds", str(options.seconds)]
    command += ["--device", options.device, *(["--with-loss"] if options.with_loss else [])]
    command += ["--load-size", str(options.load_size), *(["--parts"] if options.parts else [])]
    try:
        code = subprocess.run(command, check=False, timeout=left + 60).returncode
    except subprocess.TimeoutExpired:
        code = -1
    print(f"{job}: exit {code} after {time.monotonic() - start:.0f} s", flush=True)


def run_job(options: argparse.Namespace, deadline: float) -> None:
    configuration, _, model = options.job.partition("/")
    dtype, shares = CONFIGURATIONS[configuration]
    sizes = tuple(int(size) for size in options.sizes.split(","))
    settings = MeasureSettings(
        microbatches=sizes,
        folder=options.work / "cache",
        seconds=options.seconds,
        deadline=deadline,
        parts=options.parts,
    )
    labels: list[str] = []

    def report(label: str, share: float) -> None:
        size = label.partition(":")[0]
        if not labels or labels[-1] != size:
            labels.append(size)
            left = deadline - time.monotonic()
            print(f"  {options.job} {label} {share:.0%}, {left:.0f} s left", file=sys.stderr, flush=True)

    with on_slice(shares, model, dtype, options.load_size) as load:
        found = profile_model(
            model,
            settings=settings,
            device=options.device,
            precision=dtype,
            args={**MODELS[model], **({"with_loss": True} if options.with_loss else {})},
            slice_=load.name if load else "",
            report=report,
            before=load.wait if load else None,
        )
    write_profile(found.profile, options.work / f"{configuration}-{model}.profile.json")
    write_text(options.work / f"{configuration}-{model}.details.json", dump_json(found.measured))
    if not found.complete:
        print(f"{options.job} is not complete yet", flush=True)


@contextlib.contextmanager
def on_slice(shares: tuple[float, ...], model: str, dtype: str, load_size: int) -> Iterator[Load | None]:
    """The whole GPU, or the first of its slices with the others loaded."""
    if len(shares) == 1:
        yield None
        return
    cut = slices.start(shares, memory=SLICE_MEMORY)
    os.environ.update(slices.slice_environment(cut, 0))
    with loaded(cut, 0, model, MODELS[model], precision=dtype, microbatch=load_size) as load:
        yield load


def finish(options: argparse.Namespace) -> None:
    """Merge, pack, and print the tables."""
    details = sorted(options.work.glob("*.details.json"), key=lambda path: _rank(path.name))
    text = accuracy_tables([read_measurement(path) for path in details]) if details else "nothing is complete yet"
    write_text(options.work / "tables.md", text)
    write_text(options.out / "tables.md", text)
    merged = options.work / "profiles"
    merged.mkdir(exist_ok=True)
    groups: dict[tuple[str, str], list[Path]] = {}
    for path in options.work.glob("*.profile.json"):
        configuration, _, rest = path.name.partition("-")
        groups.setdefault((rest.removesuffix(".profile.json"), CONFIGURATIONS[configuration][0]), []).append(path)
    for (model, dtype), paths in groups.items():
        ordered = sorted(paths, key=lambda path: _rank(path.name))
        whole = merge_profiles([read_profile(path) for path in ordered])
        write_profile(whole, merged / f"{model}-{dtype}.json")
    with tarfile.open(options.out / "h200.tar.gz", "w:gz") as archive:
        archive.add(options.work, arcname=".")
    print(text, flush=True)


def _rank(name: str) -> tuple[int, int]:
    configuration, _, rest = name.partition("-")
    return list(CONFIGURATIONS).index(configuration), list(MODELS).index(rest.split(".")[0])


if __name__ == "__main__":
    main()
