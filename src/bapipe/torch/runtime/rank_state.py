"""What one rank keeps of a model: its parameters and buffers under the model's own names, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.runtime.build_stages import other_names, unused_state
from bapipe.torch.stage.runner import StageRunner

__all__ = ["RankState"]


class RankState:
    """Parameters and buffers of all stages of a rank."""

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        rank: int,
        runners: Mapping[int, StageRunner],
        users: Mapping[str, tuple[int, ...]],
    ) -> None:
        """`runners` are those of the rank's stages, `users` the stages that hold each parameter."""
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for runner in runners.values() for name, parameter in runner.module.named_parameters()
        }
        """by the model's own name; of tied ones the first"""
        self.aliases = other_names(captured.module)
        """other names in the model's state_dict -> the first name of the same tensor"""
        self._unused = unused_state(captured) if rank == 0 else {}
        self._schedule = schedule
        self._rank = rank
        self._runners = runners
        first = [ranks[0] for ranks in schedule.placement]
        self._owner = {name: first[stages[0]] for name, stages in users.items()}
        """parameter, or slice of one -> the first rank that holds it"""
        for stage, runner in runners.items():
            self._owner |= dict.fromkeys(runner.module.stage_slices, first[stage])

    def owned(self) -> Iterator[nn.Parameter]:
        """Parameters of which this is the first rank that holds them: over all ranks each is there once."""
        for name, parameter in self.parameters.items():
            if self._owner[name] == self._rank:
                yield parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that the model's state_dict has."""
        for runner in self._runners.values():
            saved = runner.module.state_dict(keep_vars=True)
            for name, buffer in runner.module.named_buffers():
                if name in saved:
                    yield name, buffer

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and saved buffers, under the model's own names."""
        return {
            **{name: parameter.detach() for name, parameter in self.parameters.items()},
            **dict(self.named_buffers()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part out of the state of the whole model."""
        own = list(self.held())
        missing = sorted({name for name, _, _ in own if name not in state})
        if missing:
            raise BaPipeError(
                f"the state lacks '{missing[0]}' and {len(missing) - 1} more of this stage's entries; "
                "give the whole model's state_dict"
            )
        with torch.no_grad():
            for name, tensor, part in own:
                whole = [part.of if part and part.dim == dim else size for dim, size in enumerate(tensor.shape)]
                if whole != list(state[name].shape):
                    raise BaPipeError(
                        f"'{name}' has shape {tuple(whole)}, the state has {tuple(state[name].shape)}; "
                        "give the state of this model"
                    )
                tensor.copy_(state[name].narrow(part.dim, part.start, part.size) if part else state[name])

    def held(self, *, buffers_once: bool = False) -> Iterator[tuple[str, Tensor, Slice | None]]:
        """All that this rank keeps of the model's state: the first name of each tensor, and which part it is.

        A part of None is all of it. Rank 0 also has what no stage uses. With `buffers_once` only the first replica
        of a stage has its buffers: running statistics differ between replicas, each of which saw other samples.
        """
        for index, runner in self._runners.items():
            stage = runner.module
            saved = stage.state_dict(keep_vars=True)
            is_first = self._schedule.placement[index][0] == self._rank
            buffers = stage.named_buffers() if is_first or not buffers_once else ()
            for name, tensor in (*stage.named_parameters(), *buffers):
                if name in saved:
                    yield self.aliases.get(name, name), tensor, stage.stage_slices.get(name)
        for name, tensor in self._unused.items():
            yield name, tensor, None
