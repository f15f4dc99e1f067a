"""Profile a model of the benchmark as `bapipe profile` does, on a slice with the others loaded, when it is its
turn: `python measure_model.py WORDS`, as run.py writes them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from turns import Turn

from bapipe.costs.profile import write_profile
from bapipe.models.model_spec import parse_arguments
from bapipe.torch import slices
from bapipe.torch.profiler import MeasureSettings, profile_model
from bapipe.torch.profiler.background_load import Load, beside_ranks, loaded

SLICE = 0
"""the slice that is measured"""


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    arguments = parse_arguments(asked["arguments"])
    turn = Turn(asked["turn"])
    with _beside(asked, arguments) as load:

        def begin() -> None:
            turn.take()
            load.wait()

        found = profile_model(
            asked["spec"],
            settings=MeasureSettings(microbatches=(asked["size"],)),
            device=asked["device"],
            precision=asked["precision"],
            args=arguments,
            optimizer=asked["optimizer"],
            compile_=asked["compiled"],
            threads=1 if asked["device"] == "cpu" else None,
            slice_=load.name,
            before=begin,
        )
    turn.leave()
    write_profile(found.profile, asked["out"])
    print(f"took: {found.phases}", flush=True)
    sys.stdout.flush()
    os._exit(0 if found.complete else 1)  # the interpreter takes seconds to take apart what the capture made


def _beside(asked: dict[str, Any], arguments: dict[str, Any]) -> contextlib.AbstractContextManager[Load]:
    """The other slices, or ranks, that train meanwhile; this process on its slice."""
    own: dict[str, Any] = {
        "precision": asked["precision"],
        "microbatch": asked["size"],
        "compiled": asked["compiled"],
    }
    if asked["device"] == "cpu":
        return beside_ranks(2, asked["spec"], arguments, **own)
    cut = slices.status(0)
    assert cut is not None, "start the slices first"
    os.environ.update(slices.slice_environment(cut, SLICE))
    return loaded(cut, SLICE, asked["spec"], arguments, **own)


if __name__ == "__main__":
    main()
