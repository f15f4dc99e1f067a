"""A U-Net that predicts the noise in latents of images, as diffusion models are trained: plain torch.

Residual blocks take an embedding of the time step, lower levels attend over all positions, and what every block of
the way down makes is joined to its block of the way up. With the width of 192 it has 198 million parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DiffusionUNet", "build", "make_batch"]

CHANNELS = 4
"""of a latent"""
STEPS = 1000
"""that noise is added in"""
GROUPS = 8
"""of channels that are normalised together"""
HEADS = 4


class ResidualBlock(nn.Module):
    """Two convolutions, with the time step's embedding between them."""

    def __init__(self, source: int, target: int, embedding: int) -> None:
        super().__init__()
        self.norm_in, self.conv_in = nn.GroupNorm(GROUPS, source), nn.Conv2d(source, target, 3, padding=1)
        self.time = nn.Linear(embedding, target)
        self.norm_out, self.conv_out = nn.GroupNorm(GROUPS, target), nn.Conv2d(target, target, 3, padding=1)
        self.skip = nn.Conv2d(source, target, 1) if source != target else nn.Identity()

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        made = self.conv_in(nn.functional.silu(self.norm_in(value)))
        made = made + self.time(nn.functional.silu(time))[:, :, None, None]
        made = self.conv_out(nn.functional.silu(self.norm_out(made)))
        joined: Tensor = made + self.skip(value)
        return joined


class Attention(nn.Module):
    """Of every position to all others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.taken, self.made = (
            nn.GroupNorm(GROUPS, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, value: Tensor) -> Tensor:
        batch, width, high, wide = value.shape
        flat = self.norm(value).flatten(2).transpose(1, 2)
        parts = self.taken(flat).view(batch, high * wide, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        made = self.made(found.transpose(1, 2).reshape(batch, high * wide, width))
        joined: Tensor = value + made.transpose(1, 2).reshape(batch, width, high, wide)
        return joined


class Block(nn.Module):
    """A residual block, and attention where the level has it."""

    def __init__(self, source: int, target: int, embedding: int, *, attends: bool) -> None:
        super().__init__()
        self.residual = ResidualBlock(source, target, embedding)
        self.attention = Attention(target) if attends else nn.Identity()

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        made: Tensor = self.attention(self.residual(value, time))
        return made


class DiffusionUNet(nn.Module):
    """Noisy latents, time steps and the noise in; the mean squared error of the noise that is predicted out."""

    frequencies: Tensor

    def __init__(self, *, width: int, levels: tuple[int, ...], blocks: int, attends_from: int) -> None:
        """`levels` are multiples of the width, from the top down; each has so many blocks on either way."""
        super().__init__()
        embedding, widths = 4 * width, [width * level for level in levels]
        exponents = torch.arange(width // 2) / (width // 2)
        self.register_buffer("frequencies", torch.exp(-math.log(10000.0) * exponents), persistent=False)
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.enter = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        joined, source = [width], width
        for level, target in enumerate(widths):
            row = nn.ModuleList()
            for _ in range(blocks):
                row.append(Block(source, target, embedding, attends=level >= attends_from))
                joined.append(target)
                source = target
            self.down.append(row)
            if level + 1 < len(widths):
                self.shrink.append(nn.Conv2d(source, source, 3, stride=2, padding=1))
                joined.append(source)
        self.middle = nn.ModuleList(
            [Block(source, source, embedding, attends=True), Block(source, source, embedding, attends=False)]
        )
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, target in reversed(list(enumerate(widths))):
            row = nn.ModuleList()
            for _ in range(blocks + 1):
                row.append(Block(source + joined.pop(), target, embedding, attends=level >= attends_from))
                source = target
            self.up.append(row)
            if level:
                self.grow.append(nn.Conv2d(source, source, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(GROUPS, source), nn.Conv2d(source, CHANNELS, 3, padding=1)

    def forward(self, latents: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        angles = steps[:, None].float() * self.frequencies.float()
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(latents.dtype))
        value = self.enter(latents)
        joined = [value]
        for level, row in enumerate(self.down):
            for block in row:
                value = block(value, time)
                joined.append(value)
            if level < len(self.shrink):
                value = self.shrink[level](value)
                joined.append(value)
        for block in self.middle:
            value = block(value, time)
        for level, row in enumerate(self.up):
            for block in row:
                value = block(torch.cat([value, joined.pop()], dim=1), time)
            if level < len(self.grow):
                value = self.grow[level](nn.functional.interpolate(value, scale_factor=2.0, mode="nearest"))
        made = self.leave(nn.functional.silu(self.norm(value)))
        return nn.functional.mse_loss(made.float(), noise.float())


def build(
    *, width: int = 192, levels: str = "1,2,3,4", blocks: int = 2, attends_from: int = 2, image: int = 64
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and an example of its inputs."""
    multiples = tuple(int(item) for item in levels.split(","))
    module = DiffusionUNet(width=width, levels=multiples, blocks=blocks, attends_from=attends_from)
    return module, make_batch(0, 2, image=image), {}


def make_batch(seed: int, size: int, *, image: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Latents with noise, their time steps, and the noise."""
    generator = torch.Generator().manual_seed(seed)
    clean, noise = (torch.randn(size, CHANNELS, image, image, generator=generator) for _ in range(2))
    steps = torch.randint(STEPS, (size,), generator=generator)
    share = (1 - steps.float() / STEPS)[:, None, None, None]
    return share.sqrt() * clean + (1 - share).sqrt() * noise, steps, noise
