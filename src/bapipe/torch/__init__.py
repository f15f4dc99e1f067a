"""Running a plan with PyTorch. Only this package imports torch; `launch` and `support` do without.

    import bapipe.torch as bp

    pipe = bp.Pipeline(build_model, plan="plan.json", loss_fn=loss_fn)

Every rank makes one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapipe.torch.capturing import capture
    from bapipe.torch.checkpoint.checkpoints import Checkpoints
    from bapipe.torch.pipedream.async_pipeline import PipeDream
    from bapipe.torch.runtime.evaluation_outputs import Evaluated
    from bapipe.torch.runtime.pipeline import Pipeline
    from bapipe.torch.runtime.pipeline_options import PipelineOptions
    from bapipe.torch.runtime.rank_batches import RankBatch
    from bapipe.torch.runtime.rank_loader import RankLoader
    from bapipe.torch.stage.loss_weighing import token_mean
    from bapipe.torch.trials.auto import auto
    from bapipe.torch.trials.auto_options import AutoOptions

__all__ = [
    "AutoOptions",
    "Checkpoints",
    "Evaluated",
    "PipeDream",
    "Pipeline",
    "PipelineOptions",
    "RankBatch",
    "RankLoader",
    "auto",
    "capture",
    "token_mean",
]

_MODULES = {
    "AutoOptions": "trials.auto_options",
    "Checkpoints": "checkpoint.checkpoints",
    "Evaluated": "runtime.evaluation_outputs",
    "PipeDream": "pipedream.async_pipeline",
    "Pipeline": "runtime.pipeline",
    "PipelineOptions": "runtime.pipeline_options",
    "RankBatch": "runtime.rank_batches",
    "RankLoader": "runtime.rank_loader",
    "auto": "trials.auto",
    "capture": "capturing",
    "token_mean": "stage.loss_weighing",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something of it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'bapipe.torch' has no attribute '{name}'")
    return getattr(importlib.import_module(f"bapipe.torch.{_MODULES[name]}"), name)
