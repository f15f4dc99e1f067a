"""Layer tables of transformers: GPT-2, BERT and Llama 2, each block as an attention half and an MLP half.

A cut after either half carries the residual stream alone, T·d values. FLOPs are those of matrix products; causal
attention is taken to skip the masked half. What autograd keeps assumes fused kernels (scaled_dot_product_attention
that keeps no T × T matrix, one-kernel GELU, SiLU and norms); per token, with d the width and f the MLP's width:

- norm: its input; linear: its input; attention: query, key, value, its output and one value per head;
- GELU: its input; SiLU times gate: gate, up, SiLU's output; dropout: a mask of 1 byte, a quarter of an element;
- embedding: the tokens, int64; head with loss: its input and the log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.models.layers import Layer, Model, Split

__all__ = ["bert", "gpt2", "llama"]

_MASK = 0.25
_TOKEN = 2.0
"""elements of 4 bytes in one int64"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """Half a block, counted per token except for `pairs`."""

    weights: int
    """entries of its matrices"""
    other: int
    """biases and norms"""
    saved_activations: float
    products: float
    """elements read and written by matrix products"""
    elementwise: float
    kernels: int
    pairs: int = 0
    """width over which every query meets every key; 0: no attention"""


def _layer(name: str, kind: str, half: _Half, *, width: int, sequence: int, causal: bool) -> Layer:
    linear = 2.0 * half.weights * sequence
    attention = 4.0 * half.pairs * sequence * sequence * (0.5 if causal else 1.0)
    return Layer(
        name=name,
        kind=kind,
        forward_flops=linear + attention,
        parameters=half.weights + half.other,
        output_elements=width * sequence,
        saved_elements=half.saved_activations * sequence,
        moved_elements=(half.products + half.elementwise) * sequence,
        elementwise_elements=half.elementwise * sequence,
        weight_flops=linear,
        kernels=half.kernels,
    )


def _blocks(count: int, attention: _Half, mlp: _Half, *, width: int, sequence: int, causal: bool) -> list[Layer]:
    halves = (("attention", attention), ("mlp", mlp))
    return [
        _layer(f"block-{index}.{kind}", kind, half, width=width, sequence=sequence, causal=causal)
        for index in range(count)
        for kind, half in halves
    ]


def _gelu_halves(width: int, heads: int, *, products: int, kernels: int) -> tuple[_Half, _Half]:
    """Attention and MLP of a block with biases, layer norms, dropout and a GELU four times as wide.

    `products` are those of attention, over the width; `kernels` its matrix products.
    """
    d = width
    attention = _Half(
        weights=4 * d * d,
        other=4 * d + 2 * d,
        # input, norm's input or output, qkv, attention's output and its contiguous copy, mask
        saved_activations=7 * d + _MASK * d + heads,
        products=products * d,
        # norm 2, copies of the heads 2, dropout 2.25, residual sum 3
        elementwise=(9 + _MASK) * d,
        kernels=kernels,
        pairs=d,
    )
    mlp = _Half(
        weights=8 * d * d,
        other=5 * d + 2 * d,
        saved_activations=(10 + _MASK) * d,
        products=10 * d,
        # norm 2, GELU 8, dropout 2.25, residual sum 3
        elementwise=(15 + _MASK) * d,
        kernels=2,
    )
    return attention, mlp


def _embedding(width: int, entries: int, other: int, *, sequence: int, keeps: float, passes: float) -> Layer:
    """`keeps`: elements per token that autograd holds besides the tokens; `passes` over the width."""
    size = width * sequence
    return Layer(
        name="embedding",
        kind="embedding",
        forward_flops=0.0,
        parameters=entries * width + other,
        output_elements=size,
        saved_elements=_TOKEN * sequence + keeps * sequence,
        moved_elements=2 * size + passes * size,
        elementwise_elements=passes * size,
        weight_reads=0.0,
        split=Split(channels=width),
    )


def _norm(name: str, width: int, parameters: int, *, sequence: int) -> Layer:
    size = float(width * sequence)
    return Layer(
        name=name,
        kind="norm",
        forward_flops=0.0,
        parameters=parameters,
        output_elements=size,
        saved_elements=size,
        moved_elements=2 * size,
        elementwise_elements=2 * size,
    )


def _head(name: str, width: int, vocabulary: int, *, sequence: int, tied: str | None) -> Layer:
    """Linear to the vocabulary, without bias, and the loss."""
    logits = float(vocabulary * sequence)
    return Layer(
        name=name,
        kind="linear",
        forward_flops=2.0 * width * logits,
        parameters=width * vocabulary,
        output_elements=logits,
        saved_elements=width * sequence + logits,
        moved_elements=width * sequence + 4 * logits,
        elementwise_elements=3 * logits,
        shares_weights_with=tied,
        split=Split(channels=vocabulary, by="vocabulary"),
    )


def _sequence(sequence: int, *, longest: int | None, name: str) -> None:
    if sequence < 1:
        raise BaPipeError(f"sequence must be at least 1, got {sequence}; raise it")
    if longest is not None and sequence > longest:
        raise BaPipeError(f"{name} takes sequences of at most {longest} tokens, got {sequence}; lower it")


def gpt2(*, name: str, width: int, blocks: int, heads: int, sequence: int = 1024) -> Model:
    """GPT-2 with its head tied to the token embedding; 124 439 808 parameters at width 768 and 12 blocks."""
    vocabulary, context = 50257, 1024
    _sequence(sequence, longest=context, name=name)
    d = width
    attention, mlp = _gelu_halves(d, heads, products=10, kernels=4)
    layers = [
        _embedding(d, vocabulary + context, 0, sequence=sequence, keeps=_MASK * d, passes=5 + _MASK),
    ]
    layers += _blocks(blocks, attention, mlp, width=d, sequence=sequence, causal=True)
    layers.append(_norm("norm", d, 2 * d, sequence=sequence))
    layers.append(_head("head", d, vocabulary, sequence=sequence, tied="embedding"))
    return Model(
        name=name,
        layers=tuple(layers),
        input_elements=_TOKEN * sequence,
        description=f"GPT-2, width {d}, {blocks} blocks, {heads} heads, sequences of {sequence}, tied head",
    )


_BERT_HEADS = ("pooler", "mlm")


def bert(*, name: str, width: int, blocks: int, heads: int, sequence: int = 512, head: str = "pooler") -> Model:
    """BERT; `head`: "pooler" is the bare encoder with its pooler (109 482 240 parameters at width 768), "mlm" the
    masked language model without it (109 514 298), whose decoder is tied to the token embedding.

    The decoder's bias is counted with the layer before it, so that the tied layer owns nothing.
    """
    vocabulary, context = 30522, 512
    _sequence(sequence, longest=context, name=name)
    if head not in _BERT_HEADS:
        raise BaPipeError(
            f"head must be one of {', '.join(_BERT_HEADS)}, got '{head[:60]}'{nearest(head, _BERT_HEADS)}"
        )
    d = width
    attention, mlp = _gelu_halves(d, heads, products=12, kernels=6)
    entries = vocabulary + context + 2
    layers = [
        _embedding(
            d, entries, 2 * d, sequence=sequence, keeps=_TOKEN + (1 + _MASK) * d, passes=3 + 3 + 2 + 2 + _MASK
        )
    ]
    layers += _blocks(blocks, attention, mlp, width=d, sequence=sequence, causal=False)
    if head == "pooler":
        layers.append(
            Layer(
                name="pooler",
                kind="linear",
                forward_flops=2.0 * d * d,
                parameters=d * d + d,
                output_elements=d,
                saved_elements=2 * d,
                moved_elements=4 * d,
                elementwise_elements=2 * d,
                split=Split(channels=d),
            )
        )
    else:
        transform = _Half(
            weights=d * d,
            other=d + 2 * d + vocabulary,
            saved_activations=3 * d,
            products=2 * d,
            elementwise=4 * d,
            kernels=1,
        )
        layers.append(_layer("transform", "linear", transform, width=d, sequence=sequence, causal=False))
        layers.append(_head("decoder", d, vocabulary, sequence=sequence, tied="embedding"))
    return Model(
        name=name,
        layers=tuple(layers),
        input_elements=2 * _TOKEN * sequence,
        description=f"BERT, width {d}, {blocks} blocks, {heads} heads, sequences of {sequence}, head: {head}",
    )


def llama(
    *, name: str, width: int, blocks: int, heads: int, kv_heads: int, mlp_width: int, sequence: int = 4096
) -> Model:
    """Llama 2: RMS norm, rotary positions, gated MLP, no biases, untied head; grouped queries if kv_heads < heads.

    6 738 415 616 parameters as 7B, 13 015 864 320 as 13B, 68 976 648 192 as 70B.
    """
    vocabulary = 32000
    _sequence(sequence, longest=None, name=name)
    d, f = width, mlp_width
    kv = d // heads * kv_heads
    attention = _Half(
        weights=2 * d * d + 2 * d * kv,
        other=d,
        # norm's input, its output, query, key and value, attention's output and its contiguous copy
        saved_activations=5 * d + 2 * kv + heads,
        products=(3 * d + d + 2 * kv) + (2 * d + 2 * kv) + 2 * d,
        # norm 2, rotary 2 of query and key, copies of the heads 2, residual sum 3
        elementwise=2 * d + 2 * (d + kv) + 2 * d + 3 * d,
        kernels=6,
        pairs=d,
    )
    mlp = _Half(
        weights=3 * d * f,
        other=d,
        saved_activations=2 * d + 4 * f,
        products=3 * d + 3 * f,
        # norm 2, SiLU 2, product 3, residual sum 3
        elementwise=5 * d + 5 * f,
        kernels=3,
    )
    layers = [_embedding(d, vocabulary, 0, sequence=sequence, keeps=0.0, passes=0.0)]
    layers += _blocks(blocks, attention, mlp, width=d, sequence=sequence, causal=True)
    layers.append(_norm("norm", d, d, sequence=sequence))
    layers.append(_head("head", d, vocabulary, sequence=sequence, tied=None))
    return Model(
        name=name,
        layers=tuple(layers),
        input_elements=_TOKEN * sequence,
        description=f"Llama 2, width {d}, {blocks} blocks, {heads} heads ({kv_heads} for keys and values), "
        f"sequences of {sequence}",
    )
