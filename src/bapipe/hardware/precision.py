"""Precision: what each word of `--precision` means, the one place that says so. Imports no torch.

| word       | weights and gradients | arithmetic and activations | besides                             |
|------------|-----------------------|----------------------------|-------------------------------------|
| fp32       | fp32                  | fp32                       |                                     |
| tf32       | fp32                  | fp32, products in tf32     | GPUs only                           |
| bf16, fp16 | of 16 bits            | of 16 bits                 | masters in fp32 where they are asked |
| bf16-mixed | fp32                  | bf16 under autocast        | bf16 copies of the weights          |
| fp16-mixed | fp32                  | fp16 under autocast        | fp16 copies, and a loss scaler      |

fp64 is known too, for tests of exactness, and fp8 for accelerators whose datasheet has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.cluster import DTYPE_BYTES, AcceleratorType

__all__ = ["DEFAULT_PRECISION", "MASTER_BYTES", "PRECISIONS", "WORDS", "Precision", "find_precision"]

MASTER_BYTES = 4
"""of one parameter's master copy: fp32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which dtypes a model is trained."""

    word: str
    """as options, profiles and plans have it"""
    weights: str
    """dtype of parameters and of their gradients"""
    activations: str
    """dtype of matrix products, and of what layers make and send"""
    compute: str
    """which of an accelerator's peaks products have"""
    scaled: bool = False
    """whether the loss is scaled, and a step whose gradients overflow is skipped"""

    @property
    def autocast(self) -> str | None:
        """What forwards and the loss are cast to, in mixed precision; None: there is no autocast."""
        return self.activations if self.activations != self.weights else None

    @property
    def tf32(self) -> bool:
        """Whether products of fp32 values are taken in TensorFloat-32."""
        return self.compute == "tf32"

    @property
    def takes_masters(self) -> bool:
        """Whether an optimizer may keep fp32 copies of the weights: these are of 16 bits."""
        return DTYPE_BYTES[self.weights] < MASTER_BYTES

    @property
    def weight_bytes(self) -> int:
        """Of one parameter, and of its gradient."""
        return DTYPE_BYTES[self.weights]

    @property
    def activation_bytes(self) -> int:
        """Of one element of what layers make, keep and send."""
        return DTYPE_BYTES[self.activations]

    @property
    def cast_bytes(self) -> int:
        """Of one parameter's copy that autocast keeps while a global batch runs; 0 without autocast."""
        return 0 if self.autocast is None else DTYPE_BYTES[self.autocast]

    def peak(self, kind: AcceleratorType) -> float:
        """FLOP/s of the accelerator's products; an accelerator without them is refused."""
        if self.compute not in kind.flops:
            raise BaPipeError(
                f"accelerator '{kind.name}' has no peak for {self.compute}; it has {', '.join(kind.flops)}: "
                "choose among them"
            )
        return kind.flops[self.compute]


def _of_one_dtype(word: str) -> Precision:
    return Precision(word=word, weights=word, activations=word, compute=word)


PRECISIONS = {
    item.word: item
    for item in (
        _of_one_dtype("fp32"),
        Precision(word="tf32", weights="fp32", activations="fp32", compute="tf32"),
        _of_one_dtype("bf16"),
        _of_one_dtype("fp16"),
        Precision(word="bf16-mixed", weights="fp32", activations="bf16", compute="bf16"),
        Precision(word="fp16-mixed", weights="fp32", activations="fp16", compute="fp16", scaled=True),
        _of_one_dtype("fp64"),
        _of_one_dtype("fp8"),
    )
}
"""by their words"""
WORDS = tuple(word for word in PRECISIONS if word not in ("fp64", "fp8"))
"""those that help and documents list"""
DEFAULT_PRECISION = "fp32"


def find_precision(word: str) -> Precision:
    """The precision of that word; an unknown one is refused with the nearest."""
    if word not in PRECISIONS:
        raise BaPipeError(
            f"unknown precision '{word[:60]}'{nearest(word, PRECISIONS)}; use one of {', '.join(WORDS)}"
        )
    return PRECISIONS[word]
