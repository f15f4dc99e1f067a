"""A small U-Net (Ronneberger et al., 2015): values skip from each level down to the same level up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.torch.zoo.common import Built, classes_loss, finish, images, require

__all__ = ["UNet", "build_unet", "loss", "make_batch"]

loss = classes_loss


def _double(source: int, target: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(source, target, 3, padding=1),
        nn.BatchNorm2d(target),
        nn.ReLU(),
        nn.Conv2d(target, target, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Images in; logits per pixel out, (batch, classes, side, side)."""

    def __init__(self, *, levels: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList([_double(a, b) for a, b in zip([3, *widths], widths, strict=False)])
        self.pool = nn.MaxPool2d(2)
        self.lift = nn.ModuleList(
            [nn.ConvTranspose2d(widths[level + 1], widths[level], 2, stride=2) for level in range(levels)]
        )
        self.up = nn.ModuleList([_double(2 * widths[level], widths[level]) for level in range(levels)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits, or the loss if a target is given."""
        value, skipped = images, []
        for level, block in enumerate(self.down):
            value = block(value if level == 0 else self.pool(value))
            skipped.append(value)
        for level in range(len(self.up) - 1, -1, -1):
            value = self.up[level](torch.cat([skipped[level], self.lift[level](value)], dim=1))
        logits: Tensor = self.head(value)
        return logits if target is None else loss(logits, target)


def build_unet(
    *,
    batch: int = 2,
    image: int = 32,
    levels: int = 3,
    width: int = 8,
    classes: int = 4,
    with_loss: bool = False,
    float64: bool = False,
) -> Built:
    """A U-Net with `levels` poolings."""
    require(batch=batch, image=image // 2**levels, levels=levels, width=width, classes=classes)
    pictures, target = make_batch(0, batch, image=image, classes=classes)
    module = UNet(levels=levels, width=width, classes=classes)
    return finish(module, (pictures,), target, with_loss=with_loss, float64=float64)


def make_batch(seed: int, size: int, *, image: int = 32, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Images and a class for every pixel."""
    pictures, _ = images(size, image, classes, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return pictures, torch.randint(classes, (size, image, image), generator=generator)
