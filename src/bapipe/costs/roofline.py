"""Cost of layers from datasheets and layer tables, where nothing was measured: a roofline, slower for small work.

Per pass of a layer over a micro-batch of b samples, on an accelerator with peak P, memory bandwidth W and the
assumptions of `Efficiency` (c compute, m memory, h half_seconds, λ launch):

    products     max(flops / (P · eff), bytes / (W · m)),  eff = c · w / (w + P · h),  w = flops of one kernel
    elementwise  bytes / (W · m), after the products
    launch       λ

- forward: flops of the table, parameters read `weight_reads` times;
- input gradient: the forward's flops, twice those that multiply no parameters (attention's two products); none
  through the parameters of the first layer, whose input needs no gradient; elementwise bytes · 1.5;
- weight gradient: the flops that multiply parameters, their gradient written once; nothing without parameters; in
  mixed precision it is read again and added to the fp32 gradient;
- update: Adam: parameter, gradient and two moments read, three written, in fp32; in mixed precision the parameters
  are read and their copies of 16 bits written once for the next global batch.

Good for comparing plans before anything runs; absolute times may be off by tens of per cent, at times by a factor
of 2. It knows no cache, no faster algorithm (Winograd exceeds this roofline for 3 × 3 convolutions) and no on-chip
RAM of an FPGA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import AcceleratorType
from bapipe.hardware.precision import MASTER_BYTES, Precision, find_precision
from bapipe.models.layers import Layer, Model, ModelRef
from bapipe.units import format_bandwidth, format_seconds

__all__ = ["DEFAULT_COMPUTE", "ELEMENTWISE_BACKWARD", "OPTIMIZER_PASSES", "analytic_profile"]

DEFAULT_COMPUTE = 0.5
"""share of the peak where `Efficiency.compute` does not list it"""
ELEMENTWISE_BACKWARD = 1.5
"""elementwise bytes of the backward over the forward's: the error and a kept value read and one written, for one
read and one written"""
OPTIMIZER_PASSES = 7
"""fp32 values that Adam moves per parameter"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One layer at one micro-batch size; flops and bytes."""

    forward_flops: float
    weight_flops: float
    product_bytes: float
    """activations moved by matrix products"""
    elementwise_bytes: float
    weight_bytes: float
    """of the weights as products read them"""
    summed_bytes: float
    """moved to add the weight gradient to one of another dtype"""
    weight_reads: float
    kernels: int
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roofline:
    """An accelerator in one precision."""

    peak: float
    compute: float
    bandwidth: float
    """effective bytes/s"""
    half_seconds: float
    launch: float

    def seconds(self, *, flops: float, product_bytes: float, elementwise_bytes: float, kernels: int) -> float:
        products = 0.0
        if flops > 0:
            products = (flops / self.peak + kernels * self.half_seconds) / self.compute
        products = max(products, product_bytes / self.bandwidth)
        return products + elementwise_bytes / self.bandwidth + self.launch

    def forward(self, work: _Work) -> float:
        return self.seconds(
            flops=work.forward_flops,
            product_bytes=work.product_bytes + work.weight_reads * work.weight_bytes,
            elementwise_bytes=work.elementwise_bytes,
            kernels=work.kernels,
        )

    def input_gradient(self, work: _Work) -> float:
        between_values = work.forward_flops - work.weight_flops
        through_weights = 0.0 if work.first else work.weight_flops
        moves = not work.first or between_values > 0
        return self.seconds(
            flops=2 * between_values + through_weights,
            product_bytes=work.product_bytes + work.weight_reads * work.weight_bytes if moves else 0.0,
            elementwise_bytes=ELEMENTWISE_BACKWARD * work.elementwise_bytes,
            kernels=work.kernels,
        )

    def weight_gradient(self, work: _Work) -> float:
        if work.weight_bytes == 0:
            return 0.0
        return self.seconds(
            flops=work.weight_flops,
            product_bytes=work.product_bytes + work.weight_bytes,
            elementwise_bytes=work.summed_bytes,
            kernels=work.kernels,
        )


def _roofline(kind: AcceleratorType, precision: Precision) -> _Roofline:
    return _Roofline(
        peak=precision.peak(kind),
        compute=kind.efficiency.compute.get(precision.compute, DEFAULT_COMPUTE),
        bandwidth=kind.memory_bandwidth * kind.efficiency.memory,
        half_seconds=kind.efficiency.half_seconds,
        launch=kind.efficiency.launch,
    )


def _work(layer: Layer, inputs: float, *, microbatch: int, precision: Precision, first: bool) -> _Work:
    size = precision.activation_bytes
    moved = layer.moved_elements
    if moved is None:
        moved = inputs + layer.output_elements + layer.saved_elements
    elementwise = min(layer.elementwise_elements or 0.0, moved)
    weight_flops = layer.weight_flops
    if weight_flops is None:
        weight_flops = layer.forward_flops if layer.parameters else 0.0
    return _Work(
        forward_flops=layer.forward_flops * microbatch,
        weight_flops=weight_flops * microbatch,
        product_bytes=(moved - elementwise) * microbatch * size,
        elementwise_bytes=elementwise * microbatch * size,
        weight_bytes=float(layer.parameters * size),
        summed_bytes=float(layer.parameters * (size + 2 * precision.weight_bytes)) if precision.autocast else 0.0,
        weight_reads=layer.weight_reads,
        kernels=layer.kernels,
        first=first,
    )


def _sizes(microbatches: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(sorted(set(microbatches)))
    if not sizes or sizes[0] < 1:
        raise BaPipeError(f"micro-batch sizes must be at least 1, got {list(sizes)[:8]}; name at least one")
    return sizes


def _description(kind: AcceleratorType, roofline: _Roofline, precision: Precision) -> str:
    return (
        f"roofline of {kind.name}: {roofline.peak / 1e12:g} TFLOP/s {precision.compute} · {roofline.compute:g} "
        f"(half at kernels of {roofline.peak * roofline.half_seconds / 1e9:.3g} GFLOP), "
        f"memory {format_bandwidth(roofline.bandwidth)} effective, {format_seconds(roofline.launch)} a layer and "
        f"pass, {ELEMENTWISE_BACKWARD:g} times the elementwise bytes in backward, {OPTIMIZER_PASSES} fp32 values "
        "moved by Adam per parameter; the shares are assumptions, nothing was measured"
    )


def _table(model: Model, kind: AcceleratorType, *, precision: Precision, sizes: tuple[int, ...]) -> CostTable:
    roofline = _roofline(kind, precision)
    size = precision.activation_bytes
    stepped = OPTIMIZER_PASSES * MASTER_BYTES
    if precision.autocast is not None:
        stepped += precision.weight_bytes + precision.cast_bytes
    inputs = [model.input_elements, *(layer.output_elements for layer in model.layers[:-1])]
    forward, backward, weight, out, back, saved_activations, workspace = [], [], [], [], [], [], []
    for b in sizes:
        works = [
            _work(layer, arriving, microbatch=b, precision=precision, first=index == 0)
            for index, (layer, arriving) in enumerate(zip(model.layers, inputs, strict=True))
        ]
        weight_row = tuple(map(roofline.weight_gradient, works))
        forward.append(tuple(map(roofline.forward, works)))
        weight.append(weight_row)
        backward.append(
            tuple(roofline.input_gradient(work) + own for work, own in zip(works, weight_row, strict=True))
        )
        scale = float(b * size)
        out.append(tuple(layer.output_elements * scale for layer in model.layers))
        back.append(
            tuple(
                (layer.output_elements if layer.error_elements is None else layer.error_elements) * scale
                for layer in model.layers
            )
        )
        saved_activations.append(tuple(layer.saved_elements * scale for layer in model.layers))
        workspace.append(max((layer.saved_elements + layer.output_elements) * scale for layer in model.layers))
    return CostTable(
        source="analytic",
        description=_description(kind, roofline, precision),
        microbatches=sizes,
        forward=tuple(forward),
        backward=tuple(backward),
        boundary_forward=tuple(out),
        boundary_backward=tuple(back),
        saved_activations=tuple(saved_activations),
        update=tuple(
            0.0 if layer.shares_weights_with else stepped * layer.parameters / roofline.bandwidth
            for layer in model.layers
        ),
        weight_casts=_casts(model, precision),
        weight_gradient=tuple(weight),
        workspace=tuple(workspace),
    )


def _casts(model: Model, precision: Precision) -> tuple[float, ...] | None:
    """Bytes of each layer's copies of its weights in mixed precision; None without it."""
    if precision.autocast is None:
        return None
    return tuple(
        0.0 if layer.shares_weights_with else float(layer.parameters * precision.cast_bytes)
        for layer in model.layers
    )


def analytic_profile(
    model: Model, types: Sequence[AcceleratorType], *, precision: str, microbatches: Iterable[int]
) -> Profile:
    """Costs of every layer on each type at each micro-batch size, all in one precision, by its word.

    Inputs of the model have the dtype of its weights.

    The workspace is an upper estimate: the gradients of all that the largest layer keeps, and of its output.
    """
    if not model.layers:
        raise BaPipeError(f"model '{model.name[:60]}' has no layers; add some")
    if not types:
        raise BaPipeError("an analytic profile needs at least one accelerator type, got none; name one")
    found = find_precision(precision)
    sizes = _sizes(microbatches)
    return Profile(
        model=ModelRef(name=model.name),
        dtype=precision,
        layers=tuple(
            ProfiledLayer(
                name=layer.name,
                parameters=layer.parameters,
                weight_bytes=float(layer.parameters * found.weight_bytes),
                split=layer.split,
                shares_weights_with=layer.shares_weights_with,
            )
            for layer in model.layers
        ),
        accelerators={kind.name: _table(model, kind, precision=found, sizes=sizes) for kind in types},
        input_bytes=float(model.input_elements * found.weight_bytes),
    )
