"""ResNet-50 (He et al., 2015), as torchvision has it (stride in the 3 × 3): 25 557 032 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.torch.zoo.common import Built, classes_loss, finish, images, require

__all__ = ["Bottleneck", "ResNet50", "build_resnet50", "loss", "make_batch"]

_EXPANSION = 4
loss = classes_loss


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3, 1 × 1 convolutions and a shortcut."""

    def __init__(self, source: int, width: int, *, stride: int) -> None:
        super().__init__()
        target = width * _EXPANSION
        self.conv1 = nn.Conv2d(source, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, target, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(target)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or source != target:
            self.downsample = nn.Sequential(
                nn.Conv2d(source, target, 1, stride=stride, bias=False), nn.BatchNorm2d(target)
            )

    def forward(self, value: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(value)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += value if self.downsample is None else self.downsample(value)
        result: Tensor = self.relu(out)
        return result


class ResNet50(nn.Module):
    """Blocks of 3, 4, 6, 3 bottlenecks; `width` channels in the first convolution (64)."""

    def __init__(
        self, *, width: int = 64, classes: int = 1000, blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        source = width
        for index, count in enumerate(blocks):
            inner = width * 2**index
            items = []
            for position in range(count):
                items.append(Bottleneck(source, inner, stride=2 if index and not position else 1))
                source = inner * _EXPANSION
            self.add_module(f"layer{index + 1}", nn.Sequential(*items))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(source, classes)

    def forward(self, images: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits, or the loss if a target is given."""
        value = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for index in range(1, 5):
            value = self.get_submodule(f"layer{index}")(value)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(value), 1))
        return logits if target is None else loss(logits, target)


def build_resnet50(
    *,
    batch: int = 2,
    image: int = 224,
    width: int = 64,
    classes: int = 1000,
    with_loss: bool = False,
    float64: bool = False,
) -> Built:
    """ResNet-50; narrower with `width`, for images of `image` pixels a side."""
    require(batch=batch, image=image // 32, width=width, classes=classes)
    pictures, target = images(batch, image, classes)
    module = ResNet50(width=width, classes=classes)
    return finish(module, (pictures,), target, with_loss=with_loss, float64=float64)


def make_batch(seed: int, size: int, *, image: int = 224, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    return images(size, image, classes, seed=seed)
