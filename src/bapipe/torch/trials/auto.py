"""From a model to a plan that was measured, without a manual step.

    detect the machine → time the layers → run three plans to correct layers and links → plan → race → plan.json

Every file goes to one folder, in the formats of the single commands, and `commands.sh` there repeats each step by
itself. What a folder has already is not measured again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bapipe.analysis.calibrate import Calibrated, write_calibrated
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.costs.profile_ways import Compiling, has_both_ways, way_words
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import parse_cluster, read_cluster
from bapipe.io.files import content_hash, dump_json, read_versioned, write_text
from bapipe.models.model_spec import model_ref
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.profiler import MeasureSettings, profile_model
from bapipe.torch.profiler.detect_machine import AcceleratorGroup, Machine, cluster_text, detect
from bapipe.torch.profiler.profile_module import quiet
from bapipe.torch.trials.auto_options import AutoOptions
from bapipe.torch.trials.plan_race import RaceResult, race_found, with_measured_time
from bapipe.torch.trials.probe import probe, probe_plans
from bapipe.torch.trials.run_trials import estimated_seconds
from bapipe.units import format_seconds

__all__ = ["AutoResult", "auto"]

_PER_RANK = {"cpu": 16, "gpu": 64}
"""samples of a global batch per rank where none is given"""
_SIZES = 4
"""micro-batch sizes that are measured where none are given"""
_MADE = "bapipe.calibrated/1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoResult:
    """What was found."""

    plan: Plan
    """also in plan.json"""
    predicted: Plan
    """what was chosen before the race"""
    raced: RaceResult | None
    """None: there was nothing to race"""
    calibrated: Calibrated
    exploration: Exploration
    folder: Path


Say = Callable[[str], None]
Progress = Callable[[str, float], None]


def auto(
    model: str, options: AutoOptions | None = None, *, say: Say = print, progress: Progress | None = None
) -> AutoResult:
    """Find the fastest plan for a model on this machine, by measuring.

    `model` is package.module:function or a name that `bapipe profile` knows. `say` gets a line for each step,
    `progress` what is being timed and the share that is done.
    """
    options = options or AutoOptions()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    steps = _Steps(folder, say)

    machine, cluster = _detect(options, steps)
    count = len(cluster)
    if count < 2:
        raise BaPipeError(
            f"this machine has {count} accelerator, and a plan spreads training over several; give --ranks, or "
            "describe the cluster and use bapipe plan"
        )
    batch = options.global_batch or _PER_RANK[machine.kind] * count
    sizes = options.micro_batches or _sizes(batch, count)
    profile = _profile(model, machine, sizes, options, steps, progress)
    request = Request(global_batch=batch, optimizer=options.optimizer, engines=False)
    run = RunOptions(timeout=options.timeout, device="cuda" if machine.kind == "gpu" else "cpu")

    in_run, links = folder / "profile-in-run.json", folder / "cluster-in-run.toml"
    calibrated = _calibrate(profile, cluster, request, run, options, steps)
    for line in calibrated.changes:
        say(f"  {line}")
    of_batch = ("--global-batch", str(batch))
    inputs = (str(folder / "profile.json"), "--cluster", str(folder / "cluster.toml"))
    steps.command("calibrate", *inputs, *of_batch, "-o", str(in_run), "--out-cluster", str(links))

    steps.begin("planning", None)
    found = explore(calibrated.profile, calibrated.cluster, request)
    predicted = make_plan(found)
    label, seconds = found.best.candidate.label, predicted.prediction.time
    if options.compiled == "auto":
        label = f"{label}, {way_words(compiled=predicted.compiled)}"
    say(f"  {label}: {format_seconds(seconds)} per global batch predicted")
    plan = predicted
    raced = race_found(found, run, limit=options.racing, code=Path.cwd(), report=say)
    if raced is not None:
        plan = with_measured_time(raced.best, calibrated.profile)
    out = folder / "plan.json"
    write_plan(plan, out)
    racing = ("--race", str(options.racing)) if options.racing > 1 else ()
    steps.command("plan", str(in_run), "--cluster", str(links), *of_batch, *racing, "--out", str(out))
    steps.end(time.monotonic() - begun)
    return AutoResult(
        plan=plan, predicted=predicted, raced=raced, calibrated=calibrated, exploration=found, folder=folder
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CalibratedFrom:
    """What corrected costs were made from."""

    schema: str = _MADE
    key: str
    """hash of the profile, the cluster and the global batch"""


class _Steps:
    """What is being done, and the commands that do the same."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.say = say
        self._file = folder / "commands.sh"
        self._commands: list[str] = []

    def begin(self, what: str, seconds: float | None) -> None:
        self.say(what if seconds is None else f"{what}, about {seconds:.0f} s")

    def command(self, *words: str) -> None:
        self._commands.append(shlex.join(("bapipe", *words)))
        write_text(self._file, "\n".join(self._commands) + "\n")

    def end(self, seconds: float) -> None:
        self.say(f"done in {seconds:.0f} s; {self._file} has the single commands")


def _detect(options: AutoOptions, steps: _Steps) -> tuple[Machine, Cluster]:
    path = options.folder / "cluster.toml"
    steps.begin("looking at this machine", 2)
    machine = detect(ranks=options.ranks)
    if options.device == "cpu" and machine.kind == "gpu":
        machine = detect(ranks=options.ranks, device="cpu")
    if machine.cut and len(machine.types) > 1:
        raise BaPipeError(
            f"the GPU is cut into {machine}, and auto does not measure unequal slices; profile one of each "
            "(bapipe profile --slice N), join these (bapipe merge) and use bapipe plan, or cut the GPU evenly"
        )
    text = cluster_text(machine)
    if options.fresh or not path.exists() or len(read_cluster(str(path))) != machine.count:
        write_text(path, text)
    steps.command(
        "cluster", "detect", *(["--ranks", str(options.ranks)] if options.ranks else []), "-o", str(path)
    )
    return machine, parse_cluster(path.read_text(encoding="utf-8"), where=str(path))


def _profile(
    model: str,
    machine: Machine,
    sizes: tuple[int, ...],
    options: AutoOptions,
    steps: _Steps,
    progress: Progress | None,
) -> Profile:
    """The layers' costs on an accelerator of each type."""
    out, firsts = options.folder / "profile.json", {group.type: group for group in reversed(machine.groups)}
    if len(firsts) == 1:
        return _measured(model, machine.groups[0], sizes, options, steps, progress, out)
    paths = {name: options.folder / f"profile-{name}.json" for name in machine.types}
    found = [_measured(model, firsts[name], sizes, options, steps, progress, path) for name, path in paths.items()]
    merged = merge_profiles(found)
    write_profile(merged, out)
    steps.command("merge", *map(str, paths.values()), "-o", str(out))
    return merged


def _measured(
    model: str,
    group: AcceleratorGroup,
    sizes: tuple[int, ...],
    options: AutoOptions,
    steps: _Steps,
    progress: Progress | None,
    path: Path,
) -> Profile:
    """On the first accelerator of one type, unless the file has it already."""
    listed = ",".join(map(str, sizes))
    words = ["profile", model, "--micro-batch", listed, "--optimizer", options.optimizer]
    words += ["--precision", options.precision]
    words += [f"--arg={key}={value}" for key, value in options.args.items()]
    words += {False: [], True: ["--compile"], "auto": ["--compile", "auto"]}[options.compiled]
    steps.command(*words, "--device", group.device, "--type", group.type, "-o", str(path))
    if path.exists() and not options.fresh:
        known = read_profile(path)
        wanted = model_ref(model, options.args)
        same = (known.model.ref, dict(known.model.args), known.dtype, _ways(known), *known.accelerators) == (
            wanted.ref,
            dict(wanted.args),
            options.precision,
            options.compiled,
            group.type,
        )
        table = next(iter(known.accelerators.values()))
        if same and table.optimizer == options.optimizer and {*sizes} <= {*table.microbatches, *table.not_fitting}:
            steps.begin(f"{path} has the layers' costs already (--fresh measures them again)", None)
            return known
    steps.begin(f"timing the layers on {group.type} at micro-batches of {listed}", None)
    found = profile_model(
        model,
        settings=MeasureSettings(microbatches=sizes, fresh=options.fresh),
        device=group.device,
        precision=options.precision,
        args=options.args,
        optimizer=options.optimizer,
        accelerator=group.type,
        compile_=options.compiled,
        threads=1 if group.device == "cpu" else None,
        report=progress or quiet,
        to_train=True,
    )
    if not found.complete:
        raise KeyboardInterrupt
    for line in found.notes:
        steps.say(line)
    write_profile(found.profile, path)
    return found.profile


def _ways(profile: Profile) -> Compiling:
    """How the layers were measured."""
    return "auto" if has_both_ways(profile) else profile.compiled


def _calibrate(
    profile: Profile, cluster: Cluster, request: Request, run: RunOptions, options: AutoOptions, steps: _Steps
) -> Calibrated:
    """By short runs, unless the folder has what came of them already."""
    in_run, links, made = (
        options.folder / name for name in ("profile-in-run.json", "cluster-in-run.toml", "calibrated.json")
    )
    key = content_hash([profile.hash, cluster, request.global_batch])
    if made.exists() and not options.fresh and read_versioned(_CalibratedFrom, made, schema=_MADE).key == key:
        steps.begin(f"{in_run} has the corrected costs already (--fresh measures them again)", None)
        return Calibrated(profile=read_profile(in_run), cluster=read_cluster(str(links)), changes=())
    assert request.global_batch is not None
    plans = probe_plans(profile, cluster, request, request.global_batch)
    steps.begin(f"correcting layers and links by {len(plans)} short runs", estimated_seconds(plans))
    found, _ = probe(profile, cluster, plans, run, code=Path.cwd())
    write_calibrated(found, in_run, links)
    write_text(made, dump_json(_CalibratedFrom(key=key)))
    return found


def _sizes(batch: int, ranks: int) -> tuple[int, ...]:
    """Powers of two that leave every rank a micro-batch, the largest ones."""
    most = max(1, batch // ranks)
    powers = [
        2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most and batch % 2**exponent == 0
    ]
    return tuple(powers[-_SIZES:])
