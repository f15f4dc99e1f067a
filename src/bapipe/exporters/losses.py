"""What of a plan an engine cannot hold: refused where it would compute something else, listed where it is lost."""

from __future__ import annotations

from collections.abc import Mapping

from bapipe.errors import BaPipeError
from bapipe.exporters.export_text import Job
from bapipe.exporters.plan_features import Feature, features_of, require_pipeline

__all__ = ["find_losses"]


def find_losses(job: Job, *, moved: tuple[str, ...] = (), own_order: str | None = None) -> Mapping[Feature, str]:
    """What is lost, by feature; `moved`, `own_order` as in `features_of`. Raises for what the target refuses."""
    require_pipeline(job.plan)
    target = job.target
    used = features_of(job.plan, moved=moved, own_order=own_order)
    for feature, text in used.items():
        if feature in target.refuses:
            raise BaPipeError(
                f"{target.title} cannot run a plan with {feature.value}: {text}; plan again without, or export "
                "--to another target (docs/guide/export.md)"
            )
    return {feature: text for feature, text in used.items() if feature not in target.holds}
