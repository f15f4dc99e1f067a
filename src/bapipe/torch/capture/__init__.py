"""Capture: any nn.Module as consecutive layers, checked against eager."""

from bapipe.torch.capture.captured import Captured, capture
from bapipe.torch.capture.cuts import Value
from bapipe.torch.capture.describe import CapturedLayer
from bapipe.torch.capture.rng import seed_rng
from bapipe.torch.capture.run import Result, largest_difference, run_eager, run_stages
from bapipe.torch.capture.stages import Root, Stage, StageSpec, fill_stage
from bapipe.torch.capture.state import empty_parameters
from bapipe.torch.capture.watch import Finding

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
