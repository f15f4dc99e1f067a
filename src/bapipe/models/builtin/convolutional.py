"""Layer tables of image classifiers: VGG-16, AlexNet, ResNet-18 and ResNet-50, as torchvision has them.

FLOPs are those of convolutions and linear layers alone (2 per multiply-add, bias left out). What autograd keeps:

- conv: its input; with batch-norm also the convolution's output, which is batch-norm's input;
- ReLU: its output, which is the next layer's input and counted there, unless a pool follows in the same layer;
- max-pool: its input and an int64 index per output (2 elements of 4 bytes);
- dropout: a mask of 1 byte (a quarter of an element of 4 bytes);
- classifier with loss: its input and the log-probabilities.

Elementwise passes over n values: batch-norm 3n (statistics, normalise, write), ReLU 2n, residual sum 3n.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.models.layers import Layer, Model, Split

__all__ = ["alexnet", "resnet18", "resnet50", "vgg16"]

_MASK = 0.25
_INDEX = 2.0
_GRANULARITIES = ("block", "conv")


@dataclass(frozen=True, slots=True)
class _Shape:
    """A feature map, channels × side × side."""

    channels: int
    side: int

    @property
    def elements(self) -> int:
        return self.channels * self.side**2


def _side(side: int, *, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    kernel: int
    stride: int
    padding: int = 0


def _conv(
    name: str,
    source: _Shape,
    channels: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    norm: bool = False,
    relu: bool = True,
    pool: _Pool | None = None,
    add: bool = False,
    carried: float = 0.0,
) -> tuple[Layer, _Shape]:
    """conv (+ batch-norm) (+ residual sum) (+ ReLU) (+ max-pool), and the shape that leaves it.

    `carried`: elements that merely pass by this layer (a block's skip value) and cross a cut after it as well.
    """
    side = _side(source.side, kernel=kernel, stride=stride, padding=padding)
    result = _Shape(channels, side)
    products = source.elements + result.elements
    saved_activations = float(source.elements)
    elementwise = 0.0
    if norm:
        saved_activations += result.elements
        elementwise += 3 * result.elements
    if add:
        elementwise += 3 * result.elements
    if relu:
        elementwise += 2 * result.elements
    leaves = result
    if pool is not None:
        leaves = _Shape(channels, _side(side, kernel=pool.kernel, stride=pool.stride, padding=pool.padding))
        saved_activations += result.elements + _INDEX * leaves.elements
        elementwise += result.elements + (1 + _INDEX) * leaves.elements
    weights = source.channels * channels * kernel**2
    layer = Layer(
        name=name,
        kind="conv",
        forward_flops=2.0 * weights * side**2,
        parameters=weights + (2 * channels if norm else channels),
        output_elements=leaves.elements + carried,
        saved_elements=saved_activations,
        moved_elements=products + elementwise,
        elementwise_elements=elementwise,
        split=Split(channels=channels),
        conv=(source.channels, channels, kernel, side, side),
    )
    return layer, leaves


def _linear(name: str, inputs: int, outputs: int, *, last: bool = False) -> Layer:
    """Linear + ReLU + dropout, or the classifier with its loss."""
    elementwise = 3.0 * outputs if last else (4 + _MASK) * outputs
    return Layer(
        name=name,
        kind="linear",
        forward_flops=2.0 * inputs * outputs,
        parameters=inputs * outputs + outputs,
        output_elements=outputs,
        saved_elements=inputs + (outputs if last else (1 + _MASK) * outputs),
        moved_elements=inputs + outputs + elementwise,
        elementwise_elements=elementwise,
        split=Split(channels=outputs, by="classes" if last else "output channels") if outputs > 1 else None,
        conv=(inputs, outputs, 1, 1, 1),
    )


def _check(image: int, classes: int, *, smallest: int) -> None:
    if image < smallest:
        raise BaPipeError(f"image must be at least {smallest} pixels, got {image}; raise it")
    if classes < 1:
        raise BaPipeError(f"classes must be at least 1, got {classes}; raise it")


def _classifier(inputs: int, classes: int) -> list[Layer]:
    """The three linear layers that VGG and AlexNet end with."""
    return [
        _linear("fc6", inputs, 4096),
        _linear("fc7", 4096, 4096),
        _linear("fc8", 4096, classes, last=True),
    ]


def vgg16(*, image: int = 224, classes: int = 1000) -> Model:
    """VGG-16 (configuration D): 13 convolutions and 3 linear layers; 138 357 544 parameters for 1000 classes.

    Images of another size than 224 are brought to 7 × 7 before the first linear layer, at no cost.
    """
    _check(image, classes, smallest=32)
    shape = _Shape(3, image)
    layers = []
    for stage, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1):
        for index in range(1, count + 1):
            pool = _Pool(kernel=2, stride=2) if index == count else None
            layer, shape = _conv(f"conv{stage}_{index}", shape, channels, 3, padding=1, pool=pool)
            layers.append(layer)
    layers += _classifier(512 * 49, classes)
    return Model(
        name="vgg16",
        layers=tuple(layers),
        input_elements=3.0 * image**2,
        description=f"VGG-16, {image} × {image} images, {classes} classes",
    )


def alexnet(*, image: int = 224, classes: int = 1000) -> Model:
    """AlexNet in one tower (torchvision's): 61 100 840 parameters for 1000 classes."""
    _check(image, classes, smallest=63)
    shape = _Shape(3, image)
    pool = _Pool(kernel=3, stride=2)
    layers = []
    for name, channels, kernel, stride, padding, pooled in (
        ("conv1", 64, 11, 4, 2, True),
        ("conv2", 192, 5, 1, 2, True),
        ("conv3", 384, 3, 1, 1, False),
        ("conv4", 256, 3, 1, 1, False),
        ("conv5", 256, 3, 1, 1, True),
    ):
        layer, shape = _conv(
            name, shape, channels, kernel, stride=stride, padding=padding, pool=pool if pooled else None
        )
        layers.append(layer)
    layers += _classifier(256 * 36, classes)
    return Model(
        name="alexnet",
        layers=tuple(layers),
        input_elements=3.0 * image**2,
        description=f"AlexNet in one tower, {image} × {image} images, {classes} classes",
    )


def _block(name: str, source: _Shape, width: int, *, stride: int, expansion: int) -> tuple[list[Layer], _Shape]:
    """The convolutions of one residual block, in order; `expansion` 4 is a bottleneck, 1 a basic block.

    A projected skip comes first, so that what passes by the rest is the projection. A cut inside carries the skip.
    The block's input is in the saved activations of both layers that read it.
    """
    out = width * expansion
    projected = stride != 1 or source.channels != out
    layers = []
    skip = float(source.elements)
    if projected:
        layer, shortcut = _conv(
            f"{name}.downsample", source, out, 1, stride=stride, norm=True, relu=False, carried=source.elements
        )
        layers.append(layer)
        skip = float(shortcut.elements)
    steps: tuple[tuple[int, int, int, int], ...]
    if expansion == 1:
        steps = ((width, 3, stride, 1), (width, 3, 1, 1))
    else:
        steps = ((width, 1, 1, 0), (width, 3, stride, 1), (out, 1, 1, 0))
    shape = source
    for index, (channels, kernel, step, padding) in enumerate(steps, start=1):
        last = index == len(steps)
        layer, shape = _conv(
            f"{name}.conv{index}",
            shape,
            channels,
            kernel,
            stride=step,
            padding=padding,
            norm=True,
            add=last,
            carried=0.0 if last else skip,
        )
        layers.append(layer)
    return layers, shape


def _merged(name: str, layers: list[Layer], source: _Shape) -> Layer:
    """The block as one layer: nothing inside is cut, and an input that two layers read is kept once."""
    projected = layers[0].name.endswith("downsample")
    return Layer(
        name=name,
        kind="block",
        forward_flops=sum(layer.forward_flops for layer in layers),
        parameters=sum(layer.parameters for layer in layers),
        output_elements=layers[-1].output_elements,
        saved_elements=sum(layer.saved_elements for layer in layers) - (source.elements if projected else 0),
        moved_elements=sum(layer.moved_elements or 0 for layer in layers),
        elementwise_elements=sum(layer.elementwise_elements or 0 for layer in layers),
        kernels=len(layers),
    )


def _resnet(
    name: str, counts: tuple[int, ...], *, expansion: int, image: int, classes: int, granularity: str
) -> Model:
    _check(image, classes, smallest=32)
    if granularity not in _GRANULARITIES:
        raise BaPipeError(
            f"granularity must be one of {', '.join(_GRANULARITIES)}, got '{granularity[:60]}'"
            f"{nearest(granularity, _GRANULARITIES)}"
        )
    stem, shape = _conv(
        "conv1", _Shape(3, image), 64, 7, stride=2, padding=3, norm=True, pool=_Pool(kernel=3, stride=2, padding=1)
    )
    layers = [stem]
    for stage, count in enumerate(counts, start=1):
        for index in range(count):
            source, stride = shape, 2 if index == 0 and stage > 1 else 1
            block_name = f"layer{stage}.{index}"
            block, shape = _block(block_name, source, 64 * 2 ** (stage - 1), stride=stride, expansion=expansion)
            layers += block if granularity == "conv" else [_merged(block_name, block, source)]
    layers.append(
        Layer(
            name="avgpool",
            kind="pool",
            forward_flops=0.0,
            parameters=0,
            output_elements=shape.channels,
            saved_elements=shape.elements,
            moved_elements=shape.elements + shape.channels,
            elementwise_elements=shape.elements + shape.channels,
        )
    )
    layers.append(_linear("fc", shape.channels, classes, last=True))
    return Model(
        name=name,
        layers=tuple(layers),
        input_elements=3.0 * image**2,
        description=f"{name}, {image} × {image} images, {classes} classes, a layer per {granularity}",
    )


def resnet18(*, image: int = 224, classes: int = 1000, granularity: str = "block") -> Model:
    """ResNet-18; 11 689 512 parameters for 1000 classes. `granularity`: as for `resnet50`."""
    return _resnet("resnet18", (2, 2, 2, 2), expansion=1, image=image, classes=classes, granularity=granularity)


def resnet50(*, image: int = 224, classes: int = 1000, granularity: str = "block") -> Model:
    """ResNet-50 (stride in the 3 × 3 convolution); 25 557 032 parameters for 1000 classes.

    `granularity`: "block" has a layer per bottleneck; "conv" has one per convolution, with its dimensions, which
    may be split by output channels and between which a cut carries the skip value.
    """
    return _resnet("resnet50", (3, 4, 6, 3), expansion=4, image=image, classes=classes, granularity=granularity)
