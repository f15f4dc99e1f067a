"""The rows of the benchmark by name: who trains which model, in which precision, compiled or not, on which slices.

A row is named by its words, `MODEL PRECISION HOW SLICES CONTENDER…`, such as `vit-l bf16 compiled 4 torch ddp`.
Rows that share all but the contender are a setting: same global batch, optimizer implementation, precision and
memory limit. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bapipe.planner.request import SCHEDULE_NAMES
from bapipe.records.plan import Alternative

__all__ = [
    "CONTENDERS",
    "CUTS",
    "SETTINGS",
    "Contender",
    "Cut",
    "Setting",
    "family_of",
    "other_families",
    "parse_row",
    "row_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the GPU is cut."""

    percentages: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.percentages)

    @property
    def equal(self) -> bool:
        return len(set(self.percentages)) == 1


CUTS = {
    "4": Cut(percentages=(25.0,) * 4),
    "8": Cut(percentages=(12.5,) * 8),
    "unequal": Cut(percentages=(25.0, 25.0, 12.5, 12.5)),
}
"""slices of 16 GB each, by the word in a row's name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train."""

    launch: Literal["nccl", "auto", "peers", "none"]
    """contenders of one launch share its processes; nccl and auto are ours, by that transport"""
    plan: str | None = None
    """which plan it runs: automatic, second, third, dealt equally, or of that schedule"""
    kind: Literal["ours", "ddp", "fsdp", "torch", "deepspeed"] = "ours"
    schedule: str | None = None
    """torch's class"""
    equal: bool = False
    """whether stages have equally many layers, instead of being cut as our plan cuts"""
    compiles: Literal["setting", "always", "never"] = "setting"
    """whether it runs compiled: as the setting says, also where ours does not, or not at all"""
    only: str = ""
    """the words at the end of the settings that have it"""

    @property
    def is_peer(self) -> bool:
        return self.kind != "ours"


CONTENDERS = {
    "ours nccl": Contender(launch="nccl", plan="automatic"),
    "ours nccl second": Contender(launch="nccl", plan="second"),
    "ours nccl third": Contender(launch="nccl", plan="third"),
    "ours nccl dealt equally": Contender(launch="nccl", plan="dealt equally", only="unequal"),
    "ours nccl data-parallel": Contender(launch="nccl", plan="data-parallel", only="gnmt-8 fp32 eager 4"),
    "ours nccl zb-v": Contender(launch="nccl", plan="zb-v", only="gnmt-8 fp32 eager 4"),
    "ours nccl v-half": Contender(launch="nccl", plan="v-half", only="gnmt-8 fp32 eager 4"),
    "torch 1f1b ourcut": Contender(launch="peers", kind="torch", plan="1f1b-so", schedule="Schedule1F1B"),
    "torch ddp": Contender(launch="peers", kind="ddp"),
    "torch zbv ourcut": Contender(
        launch="peers", kind="torch", plan="zb-v", schedule="ScheduleZBVZeroBubble", compiles="never"
    ),
    "torch dualpipe-v ourcut": Contender(
        launch="peers",
        kind="torch",
        plan="dualpipe-v",
        schedule="ScheduleDualPipeV",
        compiles="never",
        only="gnmt-8 fp32 eager 4",
    ),
    "torch 1f1b equal": Contender(
        launch="peers", kind="torch", plan="1f1b-so", schedule="Schedule1F1B", equal=True
    ),
    "torch zbv equal": Contender(
        launch="peers", kind="torch", plan="zb-v", schedule="ScheduleZBVZeroBubble", equal=True, compiles="never"
    ),
    "torch ddp compiled": Contender(launch="peers", kind="ddp", compiles="always"),
    "torch 1f1b ourcut compiled": Contender(
        launch="peers", kind="torch", plan="1f1b-so", schedule="Schedule1F1B", compiles="always"
    ),
    "torch fsdp": Contender(launch="peers", kind="fsdp"),
    "ours auto": Contender(launch="auto", plan="automatic"),
    "deepspeed": Contender(launch="none", kind="deepspeed"),
}
"""in the order in which they are worth their time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of a row have alike."""

    model: str
    precision: str
    how: Literal["compiled", "eager"]
    slices: str
    """a word of CUTS"""
    words: tuple[str, ...] = ()
    """the contenders that it has; (): all"""

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.how} {self.slices}"

    @property
    def stem(self) -> str:
        """For names of files."""
        return self.name.replace(" ", "-")

    @property
    def cut(self) -> Cut:
        return CUTS[self.slices]

    def contenders(self) -> dict[str, Contender]:
        """By their words; what runs compiled anyway has no row for it of its own."""
        both = self.how == "compiled"
        return {
            words: own
            for words, own in CONTENDERS.items()
            if not (both and own.compiles == "always")
            and self.name.endswith(own.only)
            and words in (self.words or CONTENDERS)
        }


def _settings(
    models: Sequence[str],
    precision: str,
    how: Literal["compiled", "eager"],
    slices: str,
    words: tuple[str, ...] = (),
) -> list[Setting]:
    return [Setting(model=model, precision=precision, how=how, slices=slices, words=words) for model in models]


_CLAIM = ("ours nccl",)
_IMAGES = ("vit-l", "convnext-l")


SETTINGS = (
    *_settings(
        ["tinyllama", "vit-l", "gpt2-medium", "convnext-l", "gnmt-8", "vgg16", "t5-large", "diffusion-unet"],
        "bf16",
        "compiled",
        "4",
    ),
    *_settings(["resnet50", "tinyllama-lora"], "bf16", "compiled", "4"),
    *_settings(["gnmt-8", "vgg16", "resnet50-192"], "fp32", "eager", "unequal"),
    *_settings(["gnmt-8", "vgg16", "resnet50"], "fp32", "eager", "4"),
    *_settings(["gnmt-8", "vgg16", "resnet50"], "fp32", "eager", "8"),
    *_settings(["tinyllama-256"], "fp32", "compiled", "4", (*_CLAIM, "ours nccl second", "ours nccl third")),
    *_settings(["tinyllama"], "bf16-mixed", "compiled", "4", _CLAIM),
    *_settings(_IMAGES, "bf16-mixed", "compiled", "4", _CLAIM),
    *_settings(["tinyllama", *_IMAGES], "bf16", "eager", "4", _CLAIM),
    *_settings(_IMAGES, "fp32", "compiled", "4", _CLAIM),
    *_settings(["tinyllama-256", *_IMAGES], "fp32", "eager", "4", _CLAIM),
    *_settings(["tinyllama", *_IMAGES], "bf16-mixed", "eager", "4", _CLAIM),
)
"""in the order in which they are worth their time"""


def row_names() -> list[str]:
    """All rows."""
    return [f"{setting.name} {words}" for setting in SETTINGS for words in setting.contenders()]


def parse_row(name: str) -> tuple[Setting, Contender]:
    """What a row's name says; ValueError for one that is none."""
    for setting in SETTINGS:
        begin = f"{setting.name} "
        contender = setting.contenders().get(name.removeprefix(begin)) if name.startswith(begin) else None
        if contender is not None:
            return setting, contender
    raise ValueError(f"'{name}' is no row: MODEL PRECISION compiled|eager {'|'.join(CUTS)} CONTENDER")


_FAMILIES = {
    "1f1b-sno": "1f1b",
    "1f1b-so": "1f1b",
    "zb-h1": "zb",
    "zb-h2": "zb",
    "v-half": "zb-v",
    "v-min": "zb-v",
    "dualpipe-v": "zb-v",
}


def family_of(schedule: str) -> str:
    """Schedules that differ little count as one family."""
    return _FAMILIES.get(schedule, schedule)


def other_families(chosen: str, alternatives: Sequence[Alternative]) -> list[str]:
    """Schedules of a plan's alternatives that fit, the fastest of each family, without the chosen one's."""
    found: dict[str, str] = {}
    for own in sorted((own for own in alternatives if own.time is not None), key=lambda own: own.time or 0.0):
        word = own.name.partition(",")[0].replace("data parallelism", "data-parallel")
        if word in SCHEDULE_NAMES and family_of(word) != family_of(chosen):
            found.setdefault(family_of(word), word)
    return list(found.values())
