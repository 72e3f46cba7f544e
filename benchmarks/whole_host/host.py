"""The sizes of the measurement of benchmarks/whole_host.py, and a rank's part in it."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from runtime_common import Bench

from epsim.models.shapes import LayerShape, shape_of
from epsim.runtime.job import Place


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurement. tokens, decode: {tokens per rank: number of steps}; sizes in `tokens` are also
    timed as CUDA graphs. checked: tokens per rank whose outputs are compared with a reference."""

    wide: LayerShape
    small: LayerShape
    models: tuple[str, str]
    redundant: tuple[int, ...]
    tokens: dict[int, int]
    decode: dict[int, int]
    routed_redundant: int
    checked: int
    tolerance: float


V3, QWEN, TINY = shape_of("deepseek-v3-layer"), shape_of("qwen3-30b-a3b-layer"), shape_of("tiny")
ON_GPU = Sizes(
    V3, QWEN, ("deepseek-v3-bf16", "qwen3-30b-a3b"), (32, 16, 8, 0), {4096: 16, 1024: 24, 128: 48},
    {16: 32, 4: 32, 1: 32}, 16, 24, 0.01,
)  # fmt: skip
"""The tolerance is 1%: bfloat16 outputs differ by 0.43% from float64 (runtime/README.md)."""
ON_CPU = Sizes(
    TINY, dataclasses.replace(TINY, name="tiny-routed", num_experts=32, top_k=8, shared_intermediate=0),
    ("epsim-small", "epsim-small"), (4, 0), {8: 6}, {4: 6}, 8, 8, 1e-5,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """What a rank measures with. recordings: a folder of recordings, or None. calibration: a folder of tables, which
    may be empty."""

    bench: Bench
    sizes: Sizes
    recordings: Path | None
    calibration: Path

    @property
    def on_gpu(self) -> bool:
        return self.bench.on_gpu

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def place(self) -> Place:
        return Place(self.bench.rank, self.bench.size, dist.group.WORLD, self.bench.device, self.dtype)

    def goes_on(self, until: float) -> bool:
        """Whether time is left, by the clock of rank 0, so that all ranks decide the same. Collective."""
        left = torch.tensor([float(time.monotonic() < until)], device=self.bench.device)
        dist.broadcast(left, 0)
        return bool(left)
