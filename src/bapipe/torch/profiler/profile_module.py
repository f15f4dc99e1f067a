"""From a module to its profile on one device: capture, measure, assemble."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.costs.optimizers import parse_optimizer
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import Compiling, join_ways
from bapipe.errors import BaPipeError
from bapipe.hardware.precision import DEFAULT_PRECISION, Precision, find_precision
from bapipe.models.builtin import Argument
from bapipe.models.layers import ModelRef
from bapipe.models.model_spec import model_ref
from bapipe.torch.capturing.torch_internals import load_tracer
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.device.allocator import keep_in_pages
from bapipe.torch.device.cpu_heap import keep_heap
from bapipe.torch.device.dtypes import weights_dtype
from bapipe.torch.device.precision_modes import set_precision
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.make_optimizer import require_optimizer
from bapipe.torch.inputs.training_data import require_targets
from bapipe.torch.profiler.assemble_profile import to_profile
from bapipe.torch.profiler.environment import accelerator_name, environment_of, find_device
from bapipe.torch.profiler.layer_memory import is_out_of_memory
from bapipe.torch.profiler.layer_runner import LayerSequence, chain_of, compile_layers
from bapipe.torch.profiler.measure_loop import Report, measure
from bapipe.torch.profiler.measure_settings import MeasureSettings
from bapipe.torch.profiler.measurement import Measurement
from bapipe.torch.profiler.phase_times import PhaseTimes

__all__ = ["Profiled", "profile_model", "profile_module", "quiet"]


def quiet(label: str, share: float) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What `profile_model` returns."""

    profile: Profile
    """of the sizes that are complete"""
    measured: Measurement
    complete: bool
    """False: interrupted; the same call goes on where it stopped"""
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    """what took how long"""
    measured_compiled: Measurement | None = None
    """of the layers compiled, where `measured` is of the layers as captured and both were wanted"""
    notes: tuple[str, ...] = ()
    """what was wanted and not done, and why"""


class _NotCompiledError(BaPipeError):
    """The machine, or the model, cannot be compiled."""


def profile_model(
    spec: str,
    *,
    settings: MeasureSettings,
    device: str = "cpu",
    precision: str = DEFAULT_PRECISION,
    args: Mapping[str, Argument] | None = None,
    optimizer: str = "sgd",
    accelerator: str | None = None,
    calibrate: bool = False,
    compile_: Compiling = False,
    threads: int | None = None,
    slice_: str = "",
    report: Report = quiet,
    before: Callable[[], None] | None = None,
    to_train: bool = False,
) -> Profiled:
    """Profile what `spec` names (see `model_ref`) on a device of this machine.

    `accelerator` is the type to file the costs under, by default the catalogue's name of the device. Device and
    precision are looked at before the model is built. `before` is called when it is captured and compiled and
    nothing measured yet. `compile_` is as in `profile_module`. With `to_train` a model that `bapipe run` could not
    train, for lack of a loss or of targets for it, is refused before anything is measured.
    """
    set_precision(_trained_in(precision), find_device(device))
    if ":" not in spec:
        load_tracer()  # while the weights of a model of the zoo are drawn
    phases = PhaseTimes()
    with phases.phase("build"):
        source = build_model(model_ref(spec, args))
        if to_train:
            require_targets(source)
    return profile_module(
        source.module,
        source.args,
        source.kwargs,
        model=source.model,
        settings=settings,
        device=device,
        precision=precision,
        optimizer=optimizer,
        accelerator=accelerator,
        calibrate=calibrate,
        compile_=compile_,
        threads=threads,
        slice_=slice_,
        report=report,
        before=before,
        needs_loss=to_train and source.loss is None,
        phases=phases,
    )


def profile_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    model: ModelRef,
    settings: MeasureSettings,
    device: str = "cpu",
    precision: str = DEFAULT_PRECISION,
    optimizer: str = "sgd",
    accelerator: str | None = None,
    calibrate: bool = False,
    compile_: Compiling = False,
    threads: int | None = None,
    slice_: str = "",
    report: Report = quiet,
    before: Callable[[], None] | None = None,
    needs_loss: bool = False,
    phases: PhaseTimes | None = None,
) -> Profiled:
    """Profile a module with an example of its inputs. The module is moved to the device and put in training mode.

    With `compile_` auto the layers are measured as captured and then compiled, for a profile with both; where
    nothing can be compiled, the profile has the layers as captured and `notes` the reason. `phases` has what came
    before, and `needs_loss` says that the module must return its loss. Raises BaPipeError where no size was
    measured completely; what was measured is in the cache all the same.
    """
    phases = PhaseTimes() if phases is None else phases
    own: dict[str, Any] = {
        "model": model,
        "settings": settings,
        "device": device,
        "precision": precision,
        "optimizer": optimizer,
        "accelerator": accelerator,
        "calibrate": calibrate,
        "threads": threads,
        "slice_": slice_,
        "report": report,
        "needs_loss": needs_loss,
        "phases": phases,
    }
    example = args, kwargs or {}
    if compile_ != "auto":
        return _profile_way(module, *example, compile_=compile_, before=before, **own)
    captured = _profile_way(module, *example, compile_=False, before=before, **own)
    if not captured.complete:
        return captured
    module.to("cpu").zero_grad(set_to_none=True)  # where it was before
    gc.collect()  # the layers as captured, which hold each other, leave the device before others come
    try:
        compiled = _profile_way(module, *example, compile_=True, before=None, must_compile=True, **own)
    except _NotCompiledError as error:
        return replace(captured, notes=(f"layers are measured as captured alone: {error}",))
    return replace(
        captured,
        profile=join_ways(captured.profile, compiled.profile),
        measured_compiled=compiled.measured,
        complete=compiled.complete,
    )


def _profile_way(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    model: ModelRef,
    settings: MeasureSettings,
    device: str,
    precision: str,
    optimizer: str,
    accelerator: str | None,
    calibrate: bool,
    compile_: bool,
    threads: int | None,
    slice_: str,
    report: Report,
    before: Callable[[], None] | None,
    needs_loss: bool,
    phases: PhaseTimes,
    must_compile: bool = False,
) -> Profiled:
    """Profile a module one way; with `must_compile`, raise _NotCompiledError where no layer can be compiled."""
    where, kind = find_device(device), _trained_in(precision)
    set_precision(kind, where)
    require_optimizer(optimizer)
    parse_optimizer(optimizer).require_for(kind)
    if threads is not None:
        if threads < 1:
            raise BaPipeError(f"a CPU needs at least 1 thread, got {threads}; raise --threads")
        torch.set_num_threads(threads)
    if where.type != "cuda":
        keep_heap()  # as a rank of a run does
    keep_in_pages(where)
    programs = _programs(where, report, must_compile=must_compile) if compile_ else None
    try:
        with phases.phase("capture"):
            chain = chain_of(
                module,
                args,
                kwargs,
                device=where,
                precision=kind,
                programs=programs,
                needs_loss=needs_loss,
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise BaPipeError(
                f"the weights of {model.name} do not fit on {device}; profile it where they do"
            ) from error
        raise
    if programs is not None and (before is not None or must_compile):
        with phases.phase("compile"):
            compile_layers(chain, settings.microbatches)
        if must_compile and not programs.compiled:
            raise _NotCompiledError(next(iter(programs.failed.values()), "no layer can be compiled"))
    if before is not None:
        with phases.phase("wait for what trains beside"):
            before()
    mixed = contextlib.nullcontext() if chain.mixed is None else chain.mixed.region.batch()
    with phases.phase("measure"), mixed:
        measured, complete = measure(
            chain, _empty(chain, model.name, precision, optimizer, slice_), settings, report=report
        )
    profile = to_profile(
        measured,
        accelerator=accelerator or accelerator_name(measured.environment),
        model=model,
        calibrate=calibrate,
    )
    return Profiled(profile=profile, measured=measured, complete=complete, phases=phases)


def _programs(device: torch.device, report: Report, *, must_compile: bool) -> CompiledPrograms:
    """What compiles the layers; a machine without a compiler is refused."""
    try:
        return CompiledPrograms(device, split=True, say=lambda line: report(line, 0.0))
    except BaPipeError as error:
        if must_compile:
            raise _NotCompiledError(str(error)) from error
        raise


def _trained_in(precision: str) -> Precision:
    """The precision of that word, if torch trains in it."""
    found = find_precision(precision)
    weights_dtype(found)
    return found


def _empty(chain: LayerSequence, name: str, precision: str, optimizer: str, slice_: str) -> Measurement:
    leaves, _ = chain.inputs(1)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return Measurement(
        model=name,
        fingerprint=chain.fingerprint,
        shapes=tuple(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in tensors),
        dtype=precision,
        optimizer=optimizer,
        environment=replace(environment_of(chain.device, slice_=slice_), compiled=chain.programs is not None),
        layers=chain.layers,
        repeats=chain.repeats,
        input_bytes=float(sum(leaf.nbytes for leaf in tensors)),
        state_bytes=float(sum(item.nbytes for item in chain.state())),
        gradient_bytes=float(sum(item.nbytes for item in chain.module.parameters() if item.requires_grad)),
        notes=chain.notes,
    )
