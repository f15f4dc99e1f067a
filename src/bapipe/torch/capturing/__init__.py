"""Capture: any nn.Module as consecutive layers, checked against eager."""

from bapipe.torch.capturing.captured import Captured, capture
from bapipe.torch.capturing.cuts import Value
from bapipe.torch.capturing.describe import CapturedLayer
from bapipe.torch.capturing.rng import seed_rng
from bapipe.torch.capturing.run import Result, largest_difference, run_eager, run_stages
from bapipe.torch.capturing.stages import Root, Stage, StageSpec, fill_stage
from bapipe.torch.capturing.state import empty_parameters
from bapipe.torch.capturing.watch import Finding

__all__ = [
    "Captured",
    "CapturedLayer",
    "Finding",
    "Result",
    "Root",
    "Stage",
    "StageSpec",
    "Value",
    "capture",
    "empty_parameters",
    "fill_stage",
    "largest_difference",
    "run_eager",
    "run_stages",
    "seed_rng",
]
