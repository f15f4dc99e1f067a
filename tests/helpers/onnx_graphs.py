"""ONNX graphs put together by hand, with the sizes of weights and without their values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

__all__ = ["GraphMaker", "gpt2_graph", "resnet18_graph", "vgg16_graph"]


class GraphMaker:
    """Adds nodes one after another; every method returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, *shape: int) -> str:
        """A parameter of that shape, whose values lie nowhere; the same name gives the same one."""
        if all(item.name != name for item in self.weights):
            self.weights.append(TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT))
        return name

    def whole(self, name: str, *values: int) -> str:
        """A constant of whole numbers."""
        self.weights.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """One node, and its first output; the others have the same name and a number."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        made = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, inputs, made, name=name, **attributes))
        return name

    def linear(self, x: str, path: str, inputs: int, outputs: int, *, bias: bool = True) -> str:
        """On the last dimension, as torch's Linear is exported for inputs of three dimensions."""
        found = self.add("MatMul", x, self.weight(f"{path}.weight", inputs, outputs))
        return self.add("Add", found, self.weight(f"{path}.bias", outputs)) if bias else found

    def conv(
        self, x: str, path: str, inputs: int, outputs: int, kernel: int, *, bias: bool = True, **more: int
    ) -> str:
        """A square convolution; `stride` and `padding` as torch's."""
        weights = [self.weight(f"{path}.weight", outputs, inputs, kernel, kernel)]
        weights += [self.weight(f"{path}.bias", outputs)] if bias else []
        stride, padding = more.get("stride", 1), more.get("padding", 0)
        return self.add("Conv", x, *weights, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4)

    def norm(self, x: str, path: str, channels: int) -> str:
        """Batch-norm."""
        names = ("weight", "bias", "running_mean", "running_var")
        return self.add("BatchNormalization", x, *(self.weight(f"{path}.{name}", channels) for name in names))

    def save(self, path: Path, inputs: dict[str, tuple[int, tuple[int | str, ...]]], output: str) -> Path:
        """Write the model; inputs are name -> (type, shape)."""
        values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, path.stem, values, [result], initializer=self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
        path.write_bytes(model.SerializeToString())
        return path


def vgg16_graph(path: Path, *, batch: int | str = "batch") -> Path:
    """VGG-16 for 1000 classes, as torchvision has it, without dropout."""
    made = GraphMaker()
    x, channels, place = "image", 3, 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = made.add("Relu", made.conv(x, f"features.{place}", channels, width, 3, padding=1))
            channels, place = width, place + 2
        x, place = made.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), place + 1
    x = made.add("Flatten", x, axis=1)
    for index, (inputs, outputs) in enumerate(((512 * 49, 4096), (4096, 4096), (4096, 1000))):
        weights = made.weight(f"classifier.{3 * index}.weight", outputs, inputs)
        x = made.add("Gemm", x, weights, made.weight(f"classifier.{3 * index}.bias", outputs), transB=1)
        x = made.add("Relu", x) if index < 2 else x
    return made.save(path, {"image": (TensorProto.FLOAT, (batch, 3, 224, 224))}, x)


def resnet18_graph(path: Path) -> Path:
    """ResNet-18 for 1000 classes; batch-norm is written out."""
    made = GraphMaker()
    x = made.conv("image", "conv1", 3, 64, 7, stride=2, padding=3, bias=False)
    x = made.add("Relu", made.norm(x, "bn1", 64))
    x = made.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage in range(1, 5):
        width = 64 * 2 ** (stage - 1)
        for index in range(2):
            name, stride = f"layer{stage}.{index}", 2 if index == 0 and stage > 1 else 1
            y = made.conv(x, f"{name}.conv1", channels, width, 3, stride=stride, padding=1, bias=False)
            y = made.add("Relu", made.norm(y, f"{name}.bn1", width))
            y = made.norm(
                made.conv(y, f"{name}.conv2", width, width, 3, padding=1, bias=False), f"{name}.bn2", width
            )
            if channels != width:
                x = made.conv(x, f"{name}.downsample.0", channels, width, 1, stride=stride, bias=False)
                x = made.norm(x, f"{name}.downsample.1", width)
            x, channels = made.add("Relu", made.add("Add", y, x)), width
    x = made.add("Flatten", made.add("GlobalAveragePool", x), axis=1)
    x = made.add("Gemm", x, made.weight("fc.weight", 1000, 512), made.weight("fc.bias", 1000), transB=1)
    return made.save(path, {"image": (TensorProto.FLOAT, (1, 3, 224, 224))}, x)


def gpt2_graph(
    path: Path, *, width: int, blocks: int, heads: int, tokens: int, fused: bool = True, mask: bool = False
) -> Path:
    """GPT-2 with its head tied to the embedding: attention as one node, or written out; `mask`: one that is made
    from an input and that every block reads."""
    made = GraphMaker()
    vocabulary, context = 50257, 1024
    inputs: dict[str, tuple[int, tuple[int | str, ...]]] = {"tokens": (TensorProto.INT64, ("batch", "sequence"))}
    penalty = ""
    if mask:
        inputs["mask"] = (TensorProto.FLOAT, ("batch", 1, tokens, tokens))
        penalty = made.add("Neg", "mask")
    table = made.weight("wte.weight", vocabulary, width)
    rows = made.whole("positions", *range(tokens))
    x = made.add("Gather", table, "tokens")
    x = made.add("Add", x, made.add("Gather", made.weight("wpe.weight", context, width), rows))
    for index in range(blocks):
        name = f"h.{index}"
        y = _norm(made, x, f"{name}.ln_1", width)
        y = made.linear(y, f"{name}.attn.c_attn", width, 3 * width)
        query = made.add("Split", y, outputs=3, axis=2, num_outputs=3)
        parts = (query, f"{query}_1", f"{query}_2")
        if fused:
            more = (penalty,) if mask else ()
            y = made.add("Attention", *parts, *more, q_num_heads=heads, kv_num_heads=heads, is_causal=1)
        else:
            y = _written_out(made, parts, f"{name}.shape", width, heads, tokens)
        x = made.add("Add", x, made.linear(y, f"{name}.attn.c_proj", width, width))
        y = made.linear(_norm(made, x, f"{name}.ln_2", width), f"{name}.mlp.c_fc", width, 4 * width)
        y = made.linear(made.add("Gelu", y), f"{name}.mlp.c_proj", 4 * width, width)
        x = made.add("Add", x, y)
    x = _norm(made, x, "ln_f", width)
    x = made.add("MatMul", x, made.add("Transpose", table, perm=[1, 0]))
    return made.save(path, inputs, x)


def _norm(made: GraphMaker, x: str, path: str, width: int) -> str:
    weights = (made.weight(f"{path}.weight", width), made.weight(f"{path}.bias", width))
    return made.add("LayerNormalization", x, *weights, axis=-1)


def _written_out(made: GraphMaker, parts: tuple[str, ...], name: str, width: int, heads: int, tokens: int) -> str:
    apart = made.whole(f"{name}.heads", 0, tokens, heads, width // heads)
    query, key, value = (
        made.add("Transpose", made.add("Reshape", part, apart), perm=perm)
        for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scale = helper.make_tensor(f"{name}.scale", TensorProto.FLOAT, [], [1 / math.sqrt(width // heads)])
    made.weights.append(scale)
    scores = made.add("Softmax", made.add("Mul", made.add("MatMul", query, key), scale.name), axis=-1)
    found = made.add("Transpose", made.add("MatMul", scores, value), perm=[0, 2, 1, 3])
    return made.add("Reshape", found, made.whole(f"{name}.joined", 0, tokens, width))
