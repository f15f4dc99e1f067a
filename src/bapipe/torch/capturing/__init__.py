"""Capture: any nn.Module as consecutive layers, checked against eager."""

from bapipe.torch.capturing.captured import Captured, capture
from bapipe.torch.capturing.crossing_values import Value
from bapipe.torch.capturing.describe import CapturedLayer
from bapipe.torch.capturing.isolated_run import Result, largest_difference, run_eager, run_stages
from bapipe.torch.capturing.module_state import empty_parameters
from bapipe.torch.capturing.seeded_rng import seed_rng
from bapipe.torch.capturing.stage_module import Root, Stage, StageSpec, fill_stage
from bapipe.torch.capturing.trace_hazards import Finding

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
