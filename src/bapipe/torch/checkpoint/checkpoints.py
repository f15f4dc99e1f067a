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

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.records.training_record import OptimizerRecord, Setting, TrainingRecord, dump_training
from bapipe.torch.checkpoint.checkpoint_checks import require_writable
from bapipe.torch.checkpoint.checkpoint_files import write_hashed
from bapipe.torch.checkpoint.checkpoint_folder import (
    begin_checkpoint,
    candidates,
    commit_checkpoint,
    discard,
    disk_problem,
    is_checkpoint,
    keep_last,
    latest,
    reason,
    refuse_unread,
    set_aside,
)
from bapipe.torch.checkpoint.checkpoint_loading import Here, Loaded, Loading, Stateful
from bapipe.torch.checkpoint.checkpoint_lock import FolderLock
from bapipe.torch.checkpoint.checkpoint_manifest import (
    METADATA,
    SMALL_STATE,
    TRAINING,
    CheckpointError,
    Manifest,
    SavedFile,
    fingerprint_of,
)
from bapipe.torch.checkpoint.checkpoint_metadata import parse_metadata
from bapipe.torch.checkpoint.checkpoint_options import check_accepted
from bapipe.torch.checkpoint.checkpoint_reader import described_tensors
from bapipe.torch.checkpoint.rank_consensus import RankConsensus
from bapipe.torch.checkpoint.tensor_pieces import Piece, PieceFiles, Pieces, PieceWriter, model_name
from bapipe.torch.checkpoint.training_changes import checked_settings
from bapipe.torch.checkpoint.training_state import (
    joined_records,
    model_pieces,
    optimizer_groups,
    optimizer_pieces,
    optimizer_record,
    random_state,
    write_small,
)
from bapipe.torch.comm import guarded
from bapipe.torch.comm.gloo_groups import gloo_group

if TYPE_CHECKING:
    from bapipe.torch.runtime.pipeline import Pipeline

__all__ = ["Checkpoints", "Loaded", "Stateful"]

_logger = logging.getLogger(__name__)
_warn = functools.partial(_logger.warning, "%s")


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
        read_only: bool = False,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        """`keep` is how many complete checkpoints stay; with `asynchronous` files are written while training goes
        on, from a copy in host memory. Where a checkpoint could not be written `say` is called on rank 0, with one
        line; by default it is logged as a warning. BaPipeError, on all ranks, where `folder` cannot be written,
        unless it is to be `read_only`: then checkpoints are loaded from it and none is saved. `settings` are what
        else this training goes by, such as a seed of the data: a load says which of them differ. The optimizer's
        options are recorded as they are now.
        """
        if keep < 1:
            raise BaPipeError(f"at least 1 checkpoint must be kept, got {keep}; raise keep")
        self.folder = Path(folder)
        self.failed: str | None = None
        """why the last save failed; None: it did not"""
        self._pipe = pipe
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._keep, self._asynchronous = keep, asynchronous
        self._say = say or _warn
        self._settings = checked_settings(settings or {})
        self._goes_by = optimizer_record(optimizer)
        """class and first options of this rank's optimizer"""
        self._writing: threading.Thread | None = None
        self._outcome: str | BaseException | None = None
        """of the write that the thread has finished: None, why it failed, or what it raised"""
        self._lock: FolderLock | None = None
        self._damaged: set[Path] = set()
        """checkpoints that a load passed over"""
        with pipe.watch.guard():
            # Its own, so that what is written beside the training does not meet the training's own messages.
            group = gloo_group(timeout=pipe.timeout)
            self._ranks = RankConsensus(group, self.folder)
            if not read_only:
                self._ranks.decided(lambda: require_writable(self.folder))

    def lock(self) -> None:
        """Keep other runs from writing into the folder until `close`; BaPipeError if one does.

        All ranks call it. `load` and `save` do it too; called before the first step it refuses at once.
        """
        with self._pipe.watch.guard():
            self._ranks.decided(self._take_lock)

    def _take_lock(self) -> None:
        """Rank 0. Where the disk does not let it there is no lock: a save will say why, if it fails too."""
        if self._lock is None:
            with contextlib.suppress(OSError):
                self._lock = FolderLock(self.folder)

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
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self.failed is not None:
            raise CheckpointError(self.failed)

    def load(self, checkpoint: str | Path | None = None, *, accept_changes: Collection[str] = ()) -> Loaded | None:
        """Go on from a checkpoint, by default the folder's last complete one; None if the folder has none.

        All ranks call it, before their first step. The plan may be any plan of the same model. Sets parameters,
        buffers, optimizer, scheduler, scaler, `pipe.steps` (from which dropout is seeded) and random generators:
        each rank its own if there are as many as at the save, else all of them rank 0's.

        No value is used before all ranks have verified the files that they read. Of a folder, a damaged checkpoint
        is passed over, on all ranks, for the one before; `say` is called with a line for each. CheckpointError if
        none is left, or if there is one of an unknown schema.

        BaPipeError if the model computes something else than at the save, the optimizer is of another class, or
        the precision another, unless `accept_changes` has `structure`, `optimizer` (which then begins anew) or
        `precision` (weights are converted). The optimizer's options are those of the save; with `learning-rate`
        the rates here stay. `say` is called with a line that names the settings that differ.
        """
        check_accepted(accept_changes)
        pipe = self._pipe
        with pipe.watch.guard():
            pipe.watch.progress.note("loading a checkpoint")
            source = self.folder if checkpoint is None else Path(checkpoint)
            alone = self._ranks.decided(lambda: checkpoint is not None and is_checkpoint(source))
            if checkpoint is None:
                self._ranks.decided(self._take_lock)
            left = iter([source]) if alone else candidates(source, self._say)
            here = self._here()
            problem = ""
            while (path := self._ranks.decided(lambda: next(left, None))) is not None:
                loading = Loading(pipe, path, here, self._optimizer, self._scheduler, self._scaler, accept_changes)
                problem = self._ranks.attempted(loading.verify) or self._ranks.attempted(loading.fill)
                if not problem:
                    self._goes_by = None if self._goes_by is None else loading.optimizer
                    for line in loading.lines if pipe.rank == 0 else ():
                        self._say(line)
                    return loading.loaded
                if alone:
                    raise CheckpointError(problem)
                self._damaged.add(path)
                if pipe.rank == 0:
                    self._say(f"skipped a checkpoint: {reason(CheckpointError(problem))}")
            self._ranks.decided(lambda: refuse_unread(source, required=checkpoint is not None))
            return None

    def _here(self) -> Here:
        """The whole model's tensors, of which every rank has some, and what this training is."""
        own = [
            (name, piece.whole, str(piece.tensor.dtype))
            for key, several in model_pieces(self._pipe).items()
            for piece in several
            if (name := model_name(key)) is not None
        ]
        everywhere = self._ranks.from_all((own, self._goes_by))
        return Here(
            tensors=frozenset(
                (name, tuple(shape), dtype) for some, _ in everywhere for name, shape, dtype in some
            ),
            training=self._training([record for _, record in everywhere]),
        )

    def _training(self, optimizers: Sequence[OptimizerRecord | None]) -> TrainingRecord:
        """What this training is; of the optimizer each rank says its own part."""
        pipe = self._pipe
        return TrainingRecord(
            structure=pipe.structure,
            precision=pipe.precision,
            optimizer=joined_records(optimizers),
            settings={**pipe.settings, **self._settings},
        )

    def _small(self, data: Any) -> dict[str, Any]:
        """What this rank has to say beside its tensors."""
        return {
            "groups": optimizer_groups(self._pipe, self._optimizer),
            "random": random_state(self._pipe.device),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "data": data,
            "optimizer": self._goes_by,
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
        last = latest(self.folder, besides=self._damaged)
        left = "there is no complete checkpoint yet" if last is None else f"the last complete checkpoint is {last}"
        self.failed = f"the checkpoint after {step} steps was not written to {self.folder}: {problem}; {left}"
        if self._pipe.rank == 0:
            self._say(self.failed)

    def _write(self, pieces: Pieces, small: dict[str, Any], step: int) -> str | None:
        """Write and complete the checkpoint, all ranks together; returns why it failed, the same on all ranks."""
        everywhere = self._ranks.on_first(small)
        try:
            partial = self._ranks.decided(lambda: self._begin(everywhere or [], step))
        except CheckpointError as error:
            return str(error)
        problem = None
        writer = PieceFiles(partial)
        try:
            with guarded(None):
                save(dict(pieces), storage_writer=writer, planner=PieceWriter(), process_group=self._ranks.group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            problem = f"rank {rank}: {disk_problem(cause, self.folder)}"
        written = self._ranks.on_first(writer.written)
        files = {name: file for some in written or () for name, file in some.items()}
        try:
            return self._ranks.decided(lambda: self._complete(partial, everywhere or [], step, files, problem))
        except CheckpointError as error:
            return str(error)

    def _begin(self, everywhere: list[dict[str, Any]], step: int) -> Path:
        """Rank 0: the folder to write into, with what is small."""
        self._take_lock()
        partial = begin_checkpoint(self.folder, step, besides=self._damaged)
        shared = {name: everywhere[0][name] for name in ("scheduler", "scaler", "data")}
        groups = [group for rank in everywhere for group in rank["groups"]]
        generators = [rank["random"] for rank in everywhere]
        values = {**shared, "groups": groups, "random": generators, "step": step}
        training = dump_training(self._training([rank["optimizer"] for rank in everywhere]))
        try:
            size, sha256 = write_hashed(partial / TRAINING, training.encode())
            self._small_files = {
                SMALL_STATE: write_small(values, partial / SMALL_STATE),
                TRAINING: SavedFile(size=size, sha256=sha256),
            }
        except BaseException:
            discard(partial)
            raise
        return partial

    def _complete(
        self,
        partial: Path,
        everywhere: list[dict[str, Any]],
        step: int,
        files: dict[str, SavedFile],
        problem: str | None,
    ) -> str | None:
        """Rank 0: give the checkpoint its name, or remove it if a rank had a problem, which is returned."""
        if problem is not None:
            discard(partial)
            return problem
        try:
            files |= self._small_files
            for name, file in files.items():
                path = partial / name
                if not path.is_file():
                    raise CheckpointError(
                        f"{name} was written elsewhere; give a folder on a disk that all nodes see"
                    )
                found = path.stat().st_size
                if found != file.size:
                    raise CheckpointError(f"{name} has {found} bytes, {file.size} were written; check the disk")
            try:
                metadata = parse_metadata((partial / METADATA).read_bytes(), files, verified=True)
            except ValueError as error:
                raise CheckpointError(f"{METADATA} {error}; check the disk") from None
            plan, first = self._pipe.plan, everywhere[0]
            saved = [name for name in ("scheduler", "scaler", "data") if first[name] is not None]
            if any(rank["optimizer"] is not None for rank in everywhere):
                saved = ["optimizer", *saved]
            manifest = Manifest(
                step=step,
                model=plan.model,
                saved_under=_summary(plan),
                global_batch=plan.global_batch,
                microbatch_size=plan.microbatch_size,
                saved=tuple(saved),
                aliases=self._pipe.aliases,
                tensors=fingerprint_of(described_tensors(metadata)),
                files=dict(sorted(files.items())),
                torch=torch.__version__,
            )
            aside = set_aside(self.folder, step, besides=self._damaged)
            if aside is not None:
                self._say(f"a damaged checkpoint of step {step} was in the way; it is {aside} now")
            commit_checkpoint(partial, manifest)
        except BaseException:
            discard(partial)
            raise
        self._damaged.discard(self.folder / f"step-{step:08d}")
        keep_last(self.folder, self._keep, besides=self._damaged)
        return None


def _copied(piece: Piece) -> Piece:
    return Piece(tensor=piece.tensor.to("cpu", copy=True), start=piece.start, whole=piece.whole)


def _summary(plan: Plan) -> str:
    counts = "-".join(str(len(stage.accelerators)) for stage in plan.stages)
    return f"{plan.kind}, {plan.schedule.name}, {len(plan.stages)} stages on {counts} accelerators"
