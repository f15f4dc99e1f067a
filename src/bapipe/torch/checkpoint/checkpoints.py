"""Checkpoints that do not depend on the plan: saved under one, loaded under any other, to train on exactly.

checkpoints = Checkpoints(pipe, "checkpoints", optimizer=optimizer, scheduler=scheduler)
found = checkpoints.load()
for step in range(pipe.steps, steps):
    ...
    if (step + 1) % 100 == 0:
        checkpoints.save()
checkpoints.close()
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.checkpoint.checkpoint_folder import (
    SMALL_STATE,
    CheckpointError,
    Manifest,
    begin_checkpoint,
    commit_checkpoint,
    discard,
    disk_problem,
    find_checkpoint,
    keep_last,
    latest,
    read_manifest,
)
from bapipe.torch.checkpoint.tensor_pieces import (
    Piece,
    Pieces,
    PieceWriter,
    file_writer,
    read_metadata,
    read_pieces,
)
from bapipe.torch.checkpoint.training_state import (
    fill_optimizer,
    model_pieces,
    optimizer_groups,
    optimizer_pieces,
    random_state,
    read_small,
    set_random_state,
    write_small,
)
from bapipe.torch.comm import guarded

if TYPE_CHECKING:
    from bapipe.torch.runtime.pipeline import Pipeline

__all__ = ["Checkpoints", "Loaded", "Stateful"]

T = TypeVar("T")


class Stateful(Protocol):
    """What has a state to save: a learning-rate scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The checkpoint that training goes on from."""

    path: Path
    step: int
    """mini-batches trained; also in `pipe.steps`"""
    data: Any
    """what `save` was given as the position in the data"""


class Checkpoints:
    """A folder into which this training is saved; every rank makes one, with its own optimizer.

    On several nodes the folder must be on a disk that all of them see. A checkpoint appears in it complete or not
    at all: a kill at any time, a full disk or a folder that cannot be written leave the last one as it was.
    """

    def __init__(
        self,
        pipe: Pipeline,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        keep: int = 2,
        asynchronous: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`keep` is how many complete checkpoints stay; with `asynchronous` files are written while training goes
        on, from a copy in host memory. Where a checkpoint could not be written `say` is called on rank 0, with one
        line; by default it goes to standard error.
        """
        if keep < 1:
            raise BaPipeError(f"at least 1 checkpoint must be kept, got {keep}; raise keep")
        self.folder = Path(folder)
        self.failed: str | None = None
        """why the last save failed; None: it did not"""
        self._pipe = pipe
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._keep, self._asynchronous = keep, asynchronous
        self._say = say or _to_standard_error
        self._writing: threading.Thread | None = None
        self._outcome: str | BaseException | None = None
        """of the write that the thread has finished: None, why it failed, or what it raised"""
        with pipe.watch.guard(), guarded(None):
            # Its own, so that what is written beside the training does not meet the training's own messages.
            self._group = dist.new_group(backend="gloo", timeout=pipe.timeout)

    def save(self, *, data: Any = None) -> None:
        """Save the training as it is now; all ranks call it after the same step.

        `data` says where in the data training stands: plain values, or tensors; `load` gives it back. If a write
        fails, now or since the last save, that is said on one line, `failed` is set, and training may go on.
        Raises BaPipeError for what cannot be saved at all, and RunError if a rank is lost.
        """
        pipe = self._pipe
        with pipe.watch.guard():
            self._finish()
            pipe.watch.progress.note(f"saving a checkpoint after {pipe.steps} steps")
            pieces = {**model_pieces(pipe, buffers_once=True), **optimizer_pieces(pipe, self._optimizer)}
            small = self._small(data)
            step = pipe.steps
            if not self._asynchronous:
                self._report(self._write(pieces, small, step), step)
                return
            copied = {key: [_copied(piece) for piece in several] for key, several in pieces.items()}
            self._writing = threading.Thread(
                target=self._write_aside, args=(copied, small, step), name="bapipe checkpoint", daemon=True
            )
            self._step_written = step
            self._writing.start()

    def close(self) -> None:
        """Wait for what is still being written. Raises CheckpointError if the last save has failed."""
        with self._pipe.watch.guard():
            self._finish()
        if self.failed is not None:
            raise CheckpointError(self.failed)

    def load(self, checkpoint: str | Path | None = None) -> Loaded | None:
        """Go on from a checkpoint, by default the folder's last complete one; None if the folder has none.

        All ranks call it, before their first step. The plan may be any plan of the same model. Sets parameters,
        buffers, optimizer, scheduler, scaler, `pipe.steps` (from which dropout is seeded) and random generators:
        each rank its own if there are as many as at the save, else all of them rank 0's.
        """
        pipe = self._pipe
        with pipe.watch.guard():
            pipe.watch.progress.note("loading a checkpoint")
            path = self._agreed(lambda: latest(self.folder) if checkpoint is None else find_checkpoint(checkpoint))
            if path is None:
                return None
            problem, loaded = "", None
            try:
                loaded = self._load(path)
            except BaPipeError as error:
                problem = str(error)
            problems: list[str] = [""] * dist.get_world_size()
            with guarded(None):
                dist.all_gather_object(problems, problem, group=self._group)
            for found in filter(None, problems):
                raise BaPipeError(found)
            return loaded

    def _load(self, path: Path) -> Loaded:
        pipe, manifest, metadata = self._pipe, read_manifest(path), read_metadata(path)
        small = read_small(path / SMALL_STATE)
        for name, target in (
            ("optimizer", self._optimizer),
            ("scheduler", self._scheduler),
            ("scaler", self._scaler),
        ):
            if target is not None and name not in manifest.saved:
                raise BaPipeError(f"{path} was saved without {name}; save with it, or load without")
        read_pieces(path, metadata, model_pieces(pipe))
        if self._optimizer is not None:
            fill_optimizer(pipe, self._optimizer, path, metadata, small["groups"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(small["scheduler"])
        if self._scaler is not None:
            self._scaler.load_state_dict(small["scaler"])
        pipe.steps = manifest.step
        states = small["random"]
        set_random_state(states[pipe.rank if len(states) == dist.get_world_size() else 0], pipe.device)
        return Loaded(path=path, step=manifest.step, data=small["data"])

    def _small(self, data: Any) -> dict[str, Any]:
        """What this rank has to say beside its tensors."""
        return {
            "groups": optimizer_groups(self._pipe, self._optimizer),
            "random": random_state(self._pipe.device),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "data": data,
            "optimizer": self._optimizer is not None,
        }

    def _write_aside(self, pieces: Pieces, small: dict[str, Any], step: int) -> None:
        try:
            self._outcome = self._write(pieces, small, step)
        except BaseException as error:
            self._outcome = error

    def _finish(self) -> None:
        """Wait for the thread, and report or raise what came of it."""
        if self._writing is None:
            return
        self._pipe.watch.progress.note(f"waiting for the checkpoint of {self._step_written} steps")
        self._writing.join()
        self._writing, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        self._report(outcome, self._step_written)

    def _report(self, problem: str | None, step: int) -> None:
        self.failed = None
        if problem is None:
            return
        last = latest(self.folder)
        left = "there is no complete checkpoint yet" if last is None else f"the last complete checkpoint is {last}"
        self.failed = f"the checkpoint after {step} steps was not written to {self.folder}: {problem}; {left}"
        if self._pipe.rank == 0:
            self._say(self.failed)

    def _write(self, pieces: Pieces, small: dict[str, Any], step: int) -> str | None:
        """Write and complete the checkpoint, all ranks together; returns why it failed, the same on all ranks."""
        everywhere = [small] * dist.get_world_size() if self._pipe.rank == 0 else None
        with guarded(None):
            dist.gather_object(small, everywhere, group=self._group)
        try:
            partial = self._agreed(lambda: self._begin(everywhere or [], step))
        except CheckpointError as error:
            return str(error)
        problem = None
        writer = file_writer(partial)
        try:
            with guarded(None):
                save(dict(pieces), storage_writer=writer, planner=PieceWriter(), process_group=self._group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            problem = f"rank {rank}: {disk_problem(cause, self.folder)}"
        try:
            return self._agreed(lambda: self._complete(partial, everywhere or [], step, problem))
        except CheckpointError as error:
            return str(error)

    def _begin(self, everywhere: list[dict[str, Any]], step: int) -> Path:
        """Rank 0: the folder to write into, with what is small."""
        partial = begin_checkpoint(self.folder, step)
        shared = {name: everywhere[0][name] for name in ("scheduler", "scaler", "data")}
        groups = [group for rank in everywhere for group in rank["groups"]]
        generators = [rank["random"] for rank in everywhere]
        try:
            write_small({**shared, "groups": groups, "random": generators}, partial / SMALL_STATE)
        except BaseException:
            discard(partial)
            raise
        return partial

    def _complete(
        self, partial: Path, everywhere: list[dict[str, Any]], step: int, problem: str | None
    ) -> str | None:
        """Rank 0: give the checkpoint its name, or remove it if a rank had a problem, which is returned."""
        if problem is not None:
            discard(partial)
            return problem
        try:
            metadata = read_metadata(partial)
            written = {place.relative_path for place in metadata.storage_data.values()}
            missing = sorted(name for name in written if not (partial / name).is_file())
            if missing:
                raise CheckpointError(
                    f"{missing[0]} was written elsewhere; give a folder on a disk that all nodes see"
                )
            plan, first = self._pipe.plan, everywhere[0]
            saved = [name for name in ("scheduler", "scaler", "data") if first[name] is not None]
            if any(rank["optimizer"] for rank in everywhere):
                saved = ["optimizer", *saved]
            manifest = Manifest(
                step=step,
                model=plan.model,
                saved_under=_summary(plan),
                minibatch=plan.minibatch,
                microbatch_size=plan.microbatch_size,
                saved=tuple(saved),
                aliases=self._pipe.aliases,
                files={path.name: path.stat().st_size for path in sorted(partial.iterdir())},
                torch=torch.__version__,
            )
            commit_checkpoint(partial, manifest)
        except BaseException:
            discard(partial)
            raise
        keep_last(self.folder, self._keep)
        return None

    def _agreed(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on all ranks; a CheckpointError where the disk does not let it."""
        found: list[Any] = [None, None]
        if self._pipe.rank == 0:
            try:
                found[0] = decide()
            except CheckpointError as error:
                found[1] = error
            except BaPipeError as error:
                found[1] = BaPipeError(str(error))
            except OSError as error:
                found[1] = CheckpointError(disk_problem(error, self.folder))
        with guarded(None):
            dist.broadcast_object_list(found, src=0, group=self._group)
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result


def _copied(piece: Piece) -> Piece:
    return Piece(tensor=piece.tensor.to("cpu", copy=True), start=piece.start, whole=piece.whole)


def _summary(plan: Plan) -> str:
    counts = "-".join(str(len(stage.accelerators)) for stage in plan.stages)
    return f"{plan.kind}, {plan.schedule.name}, {len(plan.stages)} stages on {counts} accelerators"


def _to_standard_error(text: str) -> None:
    sys.stderr.write(f"bapipe: {text}\n")
    sys.stderr.flush()
