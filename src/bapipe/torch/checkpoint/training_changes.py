"""What differs between the training that a checkpoint is of and the one that goes on from it. Imports no torch.

What would train something else in silence is refused unless it is accepted: another structure of the model,
another class of optimizer, another precision. What only changes how training goes on is said: the optimizer's
options, the seed, the data, sizes of batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from bapipe.errors import BaPipeError
from bapipe.records.training_record import ConstantTensor, OptimizerRecord, Setting, Structure, TrainingRecord
from bapipe.torch.checkpoint.checkpoint_options import CHANGES

__all__ = [
    "Difference",
    "TrainingChanges",
    "checked_settings",
    "compare_trainings",
    "continued",
    "structure_difference",
]

_SAME, _ROUNDED = 1e-5, 1e-2
"""relative difference of sums up to which constants count as equal: other machines round otherwise; and so do
other dtypes, which are the precision's to tell"""
_RATE = "lr"
_SHOWN = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was."""

    kind: str
    """a word of `CHANGES` that accepts it; empty: it needs no word"""
    text: str
    """what it was, and what it is"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChanges:
    """All that is not as it was at the save, and which of it was accepted."""

    differences: tuple[Difference, ...]
    accepted: frozenset[str]
    recorded: bool = True
    """whether the checkpoint has a record to compare with"""

    def takes(self, kind: str) -> bool:
        """Whether this differs, and what is here is to be used."""
        return kind in self.accepted and any(item.kind == kind for item in self.differences)

    def refuse(self, checkpoint: object) -> None:
        """BaPipeError, in one line, if something differs that must be accepted and was not."""
        refused = [item for item in self.differences if item.kind not in ("", "learning-rate", *self.accepted)]
        if not refused:
            return
        words = ",".join(sorted({item.kind for item in refused} | self.accepted, key=CHANGES.index))
        raise BaPipeError(
            f"{checkpoint} is of another training: {'; '.join(item.text for item in refused)}; give "
            f"--accept-changes {words} to go on all the same (in Python: load(accept_changes=…)), or another "
            "checkpoint"
        )

    def lines(self, checkpoint: object) -> list[str]:
        """What is to be said of what is not refused, a line each."""
        said = [item.text for item in self.differences if item.kind in ("", "learning-rate")]
        taken = [item.text for item in self.differences if item.kind not in ("", "learning-rate")]
        found = []
        if not self.recorded:
            found.append(
                f"{checkpoint} was saved before checkpoints recorded structure, optimizer, precision and seed: "
                "they are not compared; the next save has them"
            )
        if taken:
            found.append(f"{checkpoint} is of another training, as accepted: {'; '.join(taken)}")
        if said:
            found.append(f"{checkpoint} goes on with other settings: {'; '.join(said)}")
        return found


def checked_settings(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of a user's, refused unless a record can hold them."""
    for name, value in settings.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(name, str) or not isinstance(value, (str, int, float, bool, type(None))) or not finite:
            raise BaPipeError(
                f"settings are texts, finite numbers, true, false or None by name, got {str(value)[:60]!r} for "
                f"{name!r}; leave it out, or give its text"
            )
    return dict(settings)


def compare_trainings(
    saved: TrainingRecord | None,
    here: TrainingRecord,
    *,
    settings: Mapping[str, Setting],
    here_settings: Mapping[str, Setting],
    accepted: Collection[str] = (),
    scheduled: bool = False,
) -> TrainingChanges:
    """What differs of what both know. `settings` are those that a checkpoint without a record has too.

    With `scheduled` the learning rate is a scheduler's to decide.
    """
    found: list[Difference] = []
    taken = frozenset(accepted)
    if saved is not None:
        what = structure_difference(saved.structure, here.structure)
        if what is not None:
            found.append(Difference(kind="structure", text=f"structure: {what}"))
        if saved.precision != here.precision:
            found.append(
                Difference(kind="precision", text=f"precision: it was {saved.precision} and is {here.precision}")
            )
        found += _optimizers(saved.optimizer, here.optimizer, taken, scheduled)
        settings, here_settings = {**settings, **saved.settings}, {**here_settings, **here.settings}
    for name, was in settings.items():
        if name in here_settings and was != here_settings[name]:
            text = f"{name} was {_cut(str(was))} and is {_cut(str(here_settings[name]))}"
            found.append(Difference(kind="", text=text))
    return TrainingChanges(differences=tuple(found), accepted=taken, recorded=saved is not None)


def _optimizers(
    saved: OptimizerRecord | None, here: OptimizerRecord | None, accepted: frozenset[str], scheduled: bool
) -> list[Difference]:
    if saved is None or here is None:
        return []
    if saved.name != here.name:
        text = f"optimizer: it was {saved.name} and is {here.name}"
        if "optimizer" in accepted:
            text += ", whose state begins anew"
        return [Difference(kind="optimizer", text=text)]
    found = []
    for name in sorted(saved.options.keys() & here.options.keys(), key=lambda name: (name != _RATE, name)):
        was, given = (", ".join(options[name]) for options in (saved.options, here.options))
        if was == given:
            continue
        if name != _RATE:
            found.append(Difference(kind="", text=f"{name} was {was} and stays so, not {given}"))
        elif "learning-rate" in accepted:
            found.append(Difference(kind="learning-rate", text=f"learning rate was {was} and is {given}"))
        else:
            how = "" if scheduled else f" (--accept-changes learning-rate takes {given})"
            text = f"learning rate was {was} and stays so, not {given}{how}"
            found.append(Difference(kind="learning-rate", text=text))
    return found


def continued(
    saved: TrainingRecord | None, here: OptimizerRecord | None, changes: TrainingChanges
) -> OptimizerRecord | None:
    """The optimizer that training goes on with after a load: with the saved options, but for what was accepted."""
    if here is None or saved is None or saved.optimizer is None or saved.optimizer.name != here.name:
        return here
    options: dict[str, tuple[str, ...]] = {**here.options, **saved.optimizer.options}
    if changes.takes("learning-rate"):
        options[_RATE] = here.options[_RATE]
    return replace(here, options=options)


def structure_difference(saved: Structure, here: Structure) -> str | None:
    """The first thing that the model here computes otherwise, in a few words; None: it computes the same."""
    if saved.sha256 != here.sha256:
        return _first_operation(saved, here)
    for name, constant in saved.constants.items():
        if name in here.constants and not _alike(constant, here.constants[name]):
            return f"'{name}', which is in no checkpoint, has other values"
    return None


def _first_operation(saved: Structure, here: Structure) -> str:
    pairs = itertools.zip_longest(saved.modules, here.modules)
    for was, now in pairs:
        if was is not None and now is not None and was.path == now.path:
            operations = itertools.zip_longest(was.operations, now.operations, fillvalue="nothing more")
            differing = next(((first, second) for first, second in operations if first != second), None)
            if differing is None:
                continue
            where = f"'{was.path}'" if was.path else "the model"
            return f"{where} computed {_cut(differing[0])} and computes {_cut(differing[1])}"
        gone = "nothing more" if was is None else f"'{was.path}'"
        come = "nothing more" if now is None else f"'{now.path}'"
        return f"{gone} was computed where {come} is"
    return "its operations take other values than they did"


def _alike(first: ConstantTensor, second: ConstantTensor) -> bool:
    """Values that are not known, of a model that has no memory, are not compared."""
    if first.shape != second.shape:
        return False
    if not first.sums or not second.sums:
        return True
    most = (_SAME if first.dtype == second.dtype else _ROUNDED) * max(first.sums[0], second.sums[0])
    return all(abs(one - two) <= most for one, two in zip(first.sums, second.sums, strict=True))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
