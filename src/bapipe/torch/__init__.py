"""Running a plan with PyTorch. Only this package imports torch; `launch` and `support` do without.

    import bapipe.torch as bp

    pipe = bp.Pipeline(build_model, plan="plan.json", loss_fn=loss_fn)

Every rank makes one.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapipe.torch.checkpoint import Checkpoints
    from bapipe.torch.pipedream import PipeDream
    from bapipe.torch.pipeline import Pipeline

__all__ = ["Checkpoints", "PipeDream", "Pipeline"]


def __getattr__(name: str) -> Any:
    """Import torch only when something of it is asked for."""
    if name == "Pipeline":
        from bapipe.torch.pipeline import Pipeline

        return Pipeline
    if name == "Checkpoints":
        from bapipe.torch.checkpoint import Checkpoints

        return Checkpoints
    if name == "PipeDream":
        from bapipe.torch.pipedream import PipeDream

        return PipeDream
    raise AttributeError(f"module 'bapipe.torch' has no attribute '{name}'")
