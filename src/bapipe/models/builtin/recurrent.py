"""GNMT-L: Google's translation model with L/2 encoder and L/2 decoder LSTM layers, as BaPipe's Table IV has it.

Source embedding -> bidirectional LSTM -> LSTM(2h -> h) -> (L/2 − 2) × LSTM(h), residual -> target embedding ->
LSTM(h) + Bahdanau attention -> (L/2 − 1) × LSTM(2h -> h), fed by the layer below and the context -> classifier.

What crosses a cut: T·h in the encoder (2·T·h behind the bidirectional layer); the encoder's output and the
embedding before the attention; the context and the layer's output after it. Every stage gets its tokens from the
data, not over a cut. What autograd keeps, with S = T·h elements per sample:

- LSTM: its input after dropout, the dropout's mask (1 byte a value), cuDNN's reserve of 5 S (gates and cell), its
  output: 7.25 S for LSTM(h), 8.25 S in the decoder;
- attention: the tanh of every (query, key) pair, T·S, and the scores;
- embedding: the tokens, int64; classifier: its input and the log-probabilities.
"""

from __future__ import annotations

from bapipe.errors import BaPipeError
from bapipe.models.layers import Layer, Model, Split

__all__ = ["gnmt"]

_MASK = 0.25
_TOKEN = 2.0
"""elements of 4 bytes in one int64"""
_RESERVE = 5
_TANH_PASSES = 6
"""passes over the (query, key) pairs: write the sum, bias, tanh, read for the product"""


def _lstm_parameters(inputs: int, hidden: int) -> int:
    return 4 * hidden * (inputs + hidden) + 8 * hidden


def _lstm(
    name: str, *, inputs: int, dropped: int, hidden: int, sequence: int, output: int, residual: bool = False
) -> Layer:
    """`dropped`: how many of the `inputs` pass through dropout first; `output`: elements across a cut after it."""
    elementwise = float(sequence * ((2 + _MASK) * dropped + (3 * hidden if residual else 0)))
    parameters = _lstm_parameters(inputs, hidden)
    return Layer(
        name=name,
        kind="lstm",
        forward_flops=2.0 * 4 * hidden * (inputs + hidden) * sequence,
        parameters=parameters,
        output_elements=output,
        saved_elements=sequence * (inputs + _MASK * dropped + (_RESERVE + 1) * hidden),
        moved_elements=sequence * (inputs + 8 * hidden + hidden) + elementwise,
        elementwise_elements=elementwise,
        weight_reads=_reads(inputs, hidden, sequence),
        kernels=sequence,
    )


def _reads(inputs: int, hidden: int, sequence: int) -> float:
    """The recurrent weights are read at every step, those of the input once."""
    return (inputs + hidden * sequence) / (inputs + hidden)


def _bidirectional(name: str, *, hidden: int, sequence: int) -> Layer:
    size = sequence * hidden
    return Layer(
        name=name,
        kind="lstm",
        forward_flops=2 * 2.0 * 4 * hidden * (2 * hidden) * sequence,
        parameters=2 * _lstm_parameters(hidden, hidden),
        output_elements=2 * size,
        saved_elements=size + 2 * (_RESERVE + 1) * size,
        moved_elements=2 * size + 2 * 9 * size,
        elementwise_elements=0.0,
        weight_reads=_reads(hidden, hidden, sequence),
        kernels=sequence,
        split=Split(channels=2, by="directions"),
    )


def _attention(name: str, *, hidden: int, sequence: int, layers_above: bool) -> Layer:
    """LSTM(h) + Bahdanau attention: linear maps of queries and keys, tanh, scores, context."""
    size = sequence * hidden
    projections = 2 * 2.0 * hidden * hidden * sequence
    recurrent = 2.0 * 4 * hidden * (2 * hidden) * sequence
    pairs = float(sequence * sequence * hidden)
    elementwise = _TANH_PASSES * pairs
    return Layer(
        name=name,
        kind="attention",
        forward_flops=recurrent + projections + 4 * pairs,
        parameters=_lstm_parameters(hidden, hidden) + 2 * hidden * hidden + 2 * hidden + 1,
        output_elements=2 * size if layers_above else size,
        saved_elements=2 * size + (_RESERVE + 1) * size + pairs + sequence * sequence,
        moved_elements=2 * size + 9 * size + 6 * size + elementwise,
        elementwise_elements=elementwise,
        weight_flops=recurrent + projections,
        weight_reads=_reads(hidden, hidden, sequence),
        kernels=sequence + 4,
    )


def _embedding(name: str, *, vocabulary: int, hidden: int, sequence: int, carried: int) -> Layer:
    size = sequence * hidden
    return Layer(
        name=name,
        kind="embedding",
        forward_flops=0.0,
        parameters=vocabulary * hidden,
        output_elements=size + carried,
        saved_elements=_TOKEN * sequence,
        moved_elements=2 * size,
        elementwise_elements=0.0,
        weight_reads=0.0,
        split=Split(channels=hidden),
    )


def gnmt(*, layers: int, sequence: int = 50, hidden: int = 1024, vocabulary: int = 32320) -> Model:
    """GNMT with `layers` LSTM layers, even and at least 4; 445.62 M parameters at 32 layers."""
    if layers < 4 or layers % 2:
        raise BaPipeError(f"GNMT needs an even number of layers of at least 4, got {layers}; take {_even(layers)}")
    for what, value in (("sequence", sequence), ("hidden", hidden), ("vocabulary", vocabulary)):
        if value < 2:
            raise BaPipeError(f"{what} must be at least 2, got {value}; raise it")
    size = sequence * hidden
    half = layers // 2
    chain = [
        _embedding("source-embedding", vocabulary=vocabulary, hidden=hidden, sequence=sequence, carried=0),
        _bidirectional("encoder-1", hidden=hidden, sequence=sequence),
        _lstm("encoder-2", inputs=2 * hidden, dropped=2 * hidden, hidden=hidden, sequence=sequence, output=size),
    ]
    for index in range(3, half + 1):
        chain.append(
            _lstm(
                f"encoder-{index}",
                inputs=hidden,
                dropped=hidden,
                hidden=hidden,
                sequence=sequence,
                output=size,
                residual=True,
            )
        )
    chain.append(
        _embedding("target-embedding", vocabulary=vocabulary, hidden=hidden, sequence=sequence, carried=size)
    )
    chain.append(_attention("decoder-1", hidden=hidden, sequence=sequence, layers_above=half > 1))
    for index in range(2, half + 1):
        chain.append(
            _lstm(
                f"decoder-{index}",
                inputs=2 * hidden,
                dropped=hidden,
                hidden=hidden,
                sequence=sequence,
                output=size if index == half else 2 * size,
                residual=index > 2,
            )
        )
    logits = sequence * vocabulary
    chain.append(
        Layer(
            name="classifier",
            kind="linear",
            forward_flops=2.0 * hidden * logits,
            parameters=hidden * vocabulary + vocabulary,
            output_elements=logits,
            saved_elements=size + logits,
            moved_elements=size + logits + 3 * logits,
            elementwise_elements=3.0 * logits,
            split=Split(channels=vocabulary, by="vocabulary"),
        )
    )
    return Model(
        name=f"gnmt-{layers}",
        layers=tuple(chain),
        input_elements=_TOKEN * sequence,
        description=f"GNMT with {layers} LSTM layers, sequences of {sequence}, hidden {hidden}, "
        f"vocabulary {vocabulary}",
    )


def _even(layers: int) -> int:
    return max(4, layers + layers % 2)
