"""The norm of a rank's gradients, and of all ranks'; which layer has most of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from bapipe.torch.comm import guarded
from bapipe.torch.comm.rank_agreement import sum_over_ranks
from bapipe.torch.health.divergence import Diverging
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.nonfinite import LayerWeights

__all__ = ["GradientNorms"]


class GradientNorms:
    """Each method is called by all ranks in the same order."""

    def __init__(self, rank: int, watch: Watch, weights: LayerWeights, modules: Mapping[int, nn.Module]) -> None:
        """`modules` are this rank's stages."""
        self._rank, self._watch, self._weights, self._modules = rank, watch, weights, modules

    def joint(self) -> float:
        """The norm of all gradients. Replicas count each, so that it is for comparing steps alone."""
        gradients = [
            parameter.grad
            for module in self._modules.values()
            for parameter in module.parameters()
            if parameter.grad is not None
        ]
        own = float(get_total_norm(gradients)) ** 2 if gradients else 0.0
        with self._watch.meeting("looking at gradients"), guarded(None):
            return float(sum_over_ranks(own) ** 0.5)

    def diverging(self, step: int, *, norm: float, usual: float, scale: float) -> Diverging:
        """What is to be said of gradients whose norm is `scale` times `norm`: the layer that has most of it."""
        own = max(self._layers(), key=lambda item: item[0], default=None)
        everywhere: list[tuple[float, int, str] | None] = [None] * dist.get_world_size()
        with self._watch.meeting("looking at gradients"), guarded(None):
            dist.all_gather_object(everywhere, own)
        largest, rank = max((item, rank) for rank, item in enumerate(everywhere) if item is not None)
        own_norm, stage, layer = largest
        return Diverging(
            step=step, norm=norm, usual=usual, rank=rank, stage=stage, layer=layer, share=own_norm / scale / norm
        )

    def _layers(self) -> list[tuple[float, int, str]]:
        """Norm, stage and name of every layer of this rank that has gradients."""
        found = []
        for stage, layers in self._weights.items():
            own = dict(self._modules[stage].named_parameters())
            for layer, names in layers:
                gradients: list[Tensor] = [
                    gradient for name in names if name in own and (gradient := own[name].grad) is not None
                ]
                if gradients:
                    found.append((float(get_total_norm(gradients)), stage, layer))
        return found
