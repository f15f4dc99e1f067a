"""Small modules that do what real ones do, for the capture tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes twice the gradient: a trace of the forward has another backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.round()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * error


straight_through = StraightThrough.apply
"""bound at import, as many models do: patching `Function.apply` would not see it"""


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = linear(), linear(), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.second(self.dropout(self.first(value)).relu())


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, value: Tensor) -> Tensor:
        return straight_through(self.inner(value))


class PythonLayerdrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) if random.random() < 0.5 else 2 * value


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) if value.sum() > 0 else -self.inner(value)


class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        sequence = value[:, None].expand(-1, 5, -1)
        lengths = torch.arange(len(value)) % 5 + 1
        packed = nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=5)[0].sum(1)


class SelfCheckpointed(Residual):
    """Checkpoints its own call, as transformers' layers do."""

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


class Around(nn.Module):
    """A module between two linear layers and dropout; perhaps checkpointed."""

    def __init__(self, middle: nn.Module, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.before, self.middle, self.after, self.head = linear(), middle, linear(), linear(1)
        self.reentrant = reentrant

    def forward(self, value: Tensor) -> Tensor:
        value = self.before(value).tanh()
        if self.reentrant is None:
            value = self.middle(value)
        else:
            value = checkpoint(self.middle, value, use_reentrant=self.reentrant)
        value = nn.functional.dropout(self.after(value), 0.3, self.training)
        return self.head(value).pow(2).mean()


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor
    extra: Any = None


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Around(Residual())

    def forward(self, value: Tensor) -> Output:
        return Output(self.net(value), value * 2)


class NestedInputs(nn.Module):
    """A dict, a flag and a None go in; a dict with a tuple, a None and a number comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Around(nn.Sequential(Residual(), Residual()))

    def forward(
        self, batch: dict[str, Any], flag: bool = True, *, scale: Tensor, mask: Tensor | None = None
    ) -> Any:
        value = batch["x"][0] * scale if flag else batch["x"][0]
        return {"loss": self.net(value), "rest": (batch["mask"].sum(), mask, 3)}


class KindsOfValues(nn.Module):
    """Integers, booleans and values without gradient cross between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden = self.first(value)
        largest, positive = hidden.argmax(-1), hidden > 0
        with torch.no_grad():
            scale = hidden.abs().mean()
        out = self.second(hidden)
        return out.masked_fill(positive, 0.0) / scale, largest, [out.gather(1, largest[:, None])]


class BufferWriter(nn.Module):
    """One buffer assigned, one written in place, both read later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        self.count += 1
        return self.second(hidden - self.average / self.count).pow(2).mean()


class InPlace(nn.Module):
    """Writes into a tensor that was made before its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value)
        kept = torch.zeros_like(hidden)
        kept[:, 0] = hidden[:, 1]
        hidden = self.second(hidden)
        kept[:, 1:3] = hidden[:, :2]
        return (kept + self.third(hidden)).pow(2).mean()


class InputWriter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, value: Tensor) -> Tensor:
        value.mul_(2)
        return (self.second(self.first(value)) + value).pow(2).mean()


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.utils.parametrizations.spectral_norm(linear()), linear(1)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value)).pow(2).mean()


class AutocastRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear(1)

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.first(value)
        return self.second(hidden).pow(2).mean()


class InputWithGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, value: Tensor) -> Tensor:
        return (self.second(self.first(value)) + value).pow(2).mean()


class SameLayerTwice(nn.Module):
    """One module called twice: its parameters are on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = linear(), linear(1)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(value).tanh())).pow(2).mean()


class Rotary(nn.Module):
    """Positions, a causal mask and rotary factors are needed by every block; none has parameters."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(WIDTH // 2), persistent=False)
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([linear() for _ in range(blocks)])

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        angles = places[:, None] * self.frequencies
        factor = torch.cat([angles.cos(), angles.sin()], dim=-1)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        padding = (tokens != 0)[:, None] & mask
        value = self.embedding(tokens)
        for block in self.blocks:
            turned = value * factor
            scores = (turned @ turned.transpose(1, 2)).masked_fill(~padding, -1e9).softmax(-1)
            value = value + block(scores @ value)
        return value.pow(2).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, proj_size=4, batch_first=True, bidirectional=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.lstm(self.rnn(self.gru(value)[0])[0])[0].pow(2).mean()


class Experts(nn.Module):
    """Mixture of experts with a soft router, batched over experts."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embedding, self.router, self.head = linear(), linear(experts), linear(1)
        self.weights = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(value)
        logits = self.router(hidden)
        scores, chosen = logits.softmax(-1).topk(2)
        mixed = torch.einsum("bi,bkij->bkj", hidden, self.weights[chosen])
        out = (scores[..., None] * mixed).sum(1)
        return self.head(hidden + out).pow(2).mean(), logits


def sample(batch: int = 4, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *(shape or (WIDTH,)), dtype=torch.float64, generator=generator)
