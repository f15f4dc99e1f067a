"""A cycle-level simulation of FPDeep's row streaming, written apart from the model that it checks.

Every layer has an FP, an EB and a WG engine. An engine makes one row at a time, in ⌈Ci/Tn⌉·⌈Co/Tm⌉·⌈K²/Tk⌉·W
cycles, once the rows that its kernel covers have come; its producer waits while its FIFO is full. The error of an
image starts when the last layer has finished it. Features wait in RAM without limit.

    image → FP0 → FIFO → FP1 → FIFO → FP2 → loss → EB2 → FIFO → EB1 …
                                                └→ WG2      └→ WG1
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conv:
    """A convolution with stride 1 and padding K // 2, so that all rows line up."""

    inputs: int
    outputs: int
    kernel: int
    height: int
    width: int


@dataclass(frozen=True)
class Tiles:
    """Unrolling of the three engines: (Tn, Tm, Tk) each; None: no such engine."""

    forward: tuple[int, int, int]
    error: tuple[int, int, int] | None
    gradient: tuple[int, int, int]


def row_cycles(reads: int, makes: int, taps: int, width: int, tile: tuple[int, int, int]) -> int:
    tn, tm, tk = tile
    return math.ceil(reads / tn) * math.ceil(makes / tm) * math.ceil(taps / tk) * width


@dataclass
class Engine:
    """Counts rows over all images: row r of image m is m·height + r."""

    name: str
    cycles: int
    height: int
    reach: int
    """rows below the one it makes that its kernel needs"""
    source: Engine | None = None
    depth: int = 10**9
    """rows that the FIFO before it holds"""
    after: Engine | None = None
    """an engine that must have finished the whole image first (the loss)"""
    made: int = 0
    busy: bool = False
    readers: list[Engine] = field(default_factory=list)

    def needs(self) -> int:
        """Rows that the source must have made for the next row."""
        image, row = divmod(self.made, self.height)
        return image * self.height + min(self.height, row + self.reach + 1)

    def first_held(self) -> int:
        """The oldest row of the source that this engine still needs."""
        image, row = divmod(self.made, self.height)
        return image * self.height + max(0, row - self.reach)

    def can_start(self, rows: int) -> bool:
        if self.busy or self.made >= rows:
            return False
        if self.source is not None and self.source.made < self.needs():
            return False
        if self.after is not None and self.after.made < (self.made // self.height + 1) * self.height:
            return False
        return all(self.made - reader.first_held() < reader.depth for reader in self.readers)


def build(convs: list[Conv], tiles: list[Tiles], depths: list[tuple[int, int]]) -> list[Engine]:
    """Engines of all layers; `depths`: rows of each layer's FIFO of features and of errors."""
    forward: list[Engine] = []
    for index, (conv, tile) in enumerate(zip(convs, tiles, strict=True)):
        cycles = row_cycles(conv.inputs, conv.outputs, conv.kernel**2, conv.width, tile.forward)
        engine = Engine(f"FP{index}", cycles, conv.height, conv.kernel // 2, depth=depths[index][0])
        if forward:
            engine.source = forward[-1]
            forward[-1].readers.append(engine)
        forward.append(engine)
    others: list[Engine] = []
    error: Engine | None = None
    for index in range(len(convs) - 1, -1, -1):
        conv, tile = convs[index], tiles[index]
        taps, loss = conv.kernel**2, forward[-1] if error is None else None
        gradient = Engine(
            f"WG{index}",
            row_cycles(conv.inputs, conv.outputs, taps, conv.width, tile.gradient),
            conv.height,
            0,
            source=error,
            depth=depths[index][1],
            after=loss,
        )
        if error is not None:
            error.readers.append(gradient)
        others.append(gradient)
        if tile.error is not None:
            cycles = row_cycles(conv.outputs, conv.inputs, taps, conv.width, tile.error)
            engine = Engine(
                f"EB{index}",
                cycles,
                conv.height,
                conv.kernel // 2,
                source=error,
                depth=depths[index][1],
                after=loss,
            )
            if error is not None:
                error.readers.append(engine)
            others.append(engine)
            error = engine
    return [*forward, *others]


def interval(engines: list[Engine], images: int) -> float:
    """Cycles per image once the pipeline is full: over the second half of the images, at the last engine."""
    now = 0
    events: list[tuple[int, int]] = []
    finished: list[int] = []
    last = min(engines, key=lambda engine: engine.name != "WG0")
    while last.made < images * last.height:
        progress = True
        while progress:
            progress = False
            for index, engine in enumerate(engines):
                if engine.can_start(images * engine.height):
                    engine.busy = True
                    heapq.heappush(events, (now + engine.cycles, index))
                    progress = True
        assert events, "the engines wait for one another: a FIFO is too shallow"
        now, index = heapq.heappop(events)
        done = engines[index]
        done.busy, done.made = False, done.made + 1
        if done is last and done.made % done.height == 0:
            finished.append(now)
    half = images // 2
    return (finished[-1] - finished[half - 1]) / (images - half)
