"""MODEL of the command line -> Profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bapipe.costs.pipedream_graph import read_pipedream_graph, scaled_profile
from bapipe.costs.profile import Profile, read_profile
from bapipe.costs.roofline import analytic_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import AcceleratorType
from bapipe.hardware.precision import DEFAULT_PRECISION, find_precision
from bapipe.models.builtin import Argument, builtin_model
from bapipe.models.layer_table import read_layer_table
from bapipe.models.model_spec import parse_model_spec

__all__ = ["load_profile", "of_precision"]


def load_profile(
    spec: str,
    *,
    types: Sequence[AcceleratorType],
    precision: str | None = None,
    microbatches: Iterable[int],
    args: Mapping[str, Argument] | None = None,
    batch: int | None = None,
    pipeline: tuple[int, float] | None = None,
) -> Profile:
    """The profile of what `spec` names.

    - a built-in name (`args`: its options) or a layer table (`*.toml`): computed for `types` at `microbatches`, in
      that `precision` (None: fp32);
    - profile.json: as it is, whatever `types` and `microbatches`; another `precision` than its own is refused;
    - `*.graph.txt`: PipeDream's, measured at `batch` (None: inferred, or 128) and scaled to `microbatches` where
      they differ; `pipeline` as in `read_pipedream_graph`;
    - package.module:function: refused here, as it must be profiled first.
    """
    found = parse_model_spec(spec)
    text, options = found.text, dict(args or {})
    if precision is not None:
        find_precision(precision)
    if found.kind != "builtin" and options:
        raise BaPipeError(
            f"options such as {next(iter(options))} are for built-in models, got '{text[:60]}'; remove them"
        )
    if found.kind != "graph" and batch is not None:
        raise BaPipeError(f"a batch is given for *.graph.txt only, got '{text[:60]}'; leave it out")
    if found.kind == "profile":
        return of_precision(read_profile(text), precision)
    if found.kind == "layer table":
        model = read_layer_table(text)
        return analytic_profile(model, types, precision=precision or DEFAULT_PRECISION, microbatches=microbatches)
    if found.kind == "graph":
        profile = of_precision(read_pipedream_graph(text, batch=batch, pipeline=pipeline), precision)
        sizes = tuple(sorted(set(microbatches)))
        measured = all(table.microbatches == sizes for table in profile.accelerators.values())
        return profile if measured else scaled_profile(profile, sizes)
    if found.kind == "code":
        raise BaPipeError(
            f"'{text[:100]}' is code, whose costs are not known yet; run `bapipe profile {text[:100]}` first "
            "and give the profile.json that it writes"
        )
    profile = analytic_profile(
        builtin_model(text, **options), types, precision=precision or DEFAULT_PRECISION, microbatches=microbatches
    )
    return replace(profile, model=replace(profile.model, args=options))


def of_precision(profile: Profile, precision: str | None) -> Profile:
    """The profile, if it is of that precision or none is asked for."""
    if precision is not None and find_precision(precision).word != profile.dtype:
        raise BaPipeError(
            f"the profile of {profile.model.name} is of {profile.dtype}, asked for {precision}; profile the model "
            f"with --precision {precision}, or leave --precision out"
        )
    return profile
