"""VGG-16 (Simonyan and Zisserman, 2014), as torchvision has it: 138 357 544 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.torch.zoo.common import Built, classes_loss, finish, images, require

__all__ = ["VGG16", "build_vgg16", "loss", "make_batch"]

_CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""output channels of the convolutions; 0 is a pool"""
_WIDTH = 64

loss = classes_loss


class VGG16(nn.Module):
    """13 convolutions and 3 linear layers; `width` channels in the first convolution (64)."""

    def __init__(
        self,
        *,
        width: int = _WIDTH,
        hidden: int = 4096,
        classes: int = 1000,
        dropout: float = 0.5,
        pooled: int = 7,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        source = 3
        for channels in _CHANNELS:
            if channels == 0:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            target = channels * width // _WIDTH
            layers += [nn.Conv2d(source, target, 3, padding=1), nn.ReLU(inplace=True)]
            source = target
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((pooled, pooled))
        self.classifier = nn.Sequential(
            nn.Linear(source * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits, or the loss if a target is given."""
        pooled = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(torch.flatten(pooled, 1))
        return logits if target is None else loss(logits, target)


def build_vgg16(
    *,
    batch: int = 2,
    image: int = 224,
    width: int = _WIDTH,
    hidden: int = 4096,
    classes: int = 1000,
    dropout: float = 0.5,
    with_loss: bool = False,
    float64: bool = False,
) -> Built:
    """VGG-16; narrower with `width` and `hidden`, for images of `image` pixels a side."""
    require(batch=batch, image=image // 32, width=width, hidden=hidden, classes=classes)
    module = VGG16(
        width=width, hidden=hidden, classes=classes, dropout=dropout, pooled=max(1, min(7, image // 32))
    )
    pictures, target = images(batch, image, classes)
    return finish(module, (pictures,), target, with_loss=with_loss, float64=float64)


def make_batch(seed: int, size: int, *, image: int = 224, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    return images(size, image, classes, seed=seed)
