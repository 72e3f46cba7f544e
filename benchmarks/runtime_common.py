"""What the parts of benchmarks/runtime.py share: timing across ranks, shapes, skewed tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import installed

from epsim.calibrate.machine import Machine
from epsim.models.shapes import LayerShape, shape_of
from epsim.placement.base import Cluster, Placement
from epsim.policies.stack import parse_stack
from epsim.runtime.exchange.deep_ep import load

V3 = shape_of("deepseek-v3-layer").with_experts(224)
"""DeepSeek-V3's layer with as many experts as two ranks of deep_ep hold: 224 + 28 redundant + 2 shared slots."""
QWEN = shape_of("qwen3-30b-a3b-layer")
REDUNDANT = {V3.name: 28, QWEN.name: 16}
"""For two ranks; `redundant_on` gives them for others."""
SEED = 5


class Bench(Machine):
    """One rank of a benchmark. Times are those of the slowest rank, and every rank calls the same methods."""

    @property
    def has_deep_ep(self) -> bool:
        return not isinstance(load(), str)

    def slowest(self, microseconds: float) -> float:
        """The largest over ranks. Collective."""
        value = torch.tensor([microseconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    def time(self, run: Callable[..., object], *args: Any, inner: int = 20, repeats: int = 15) -> float:
        """Microseconds per call of run(*args): the median over repeats of `inner` calls in a row. Collective."""
        return self.together_us(partial(run, *args), None, repeats, inner)

    def time_graph(self, run: Callable[..., object], *args: Any, inner: int = 10, repeats: int = 30) -> float:
        """`time` in a CUDA graph of `inner` calls. Collective."""
        captured = self.capture(run, *args, inner=inner)
        found = self.time(captured.replay, inner=1, repeats=repeats) / inner
        captured.reset()  # a graph must be freed before its tensors and the process group
        return found

    def capture(self, run: Callable[..., object], *args: Any, inner: int = 1, **options: Any) -> torch.cuda.CUDAGraph:
        """A CUDA graph of `inner` calls of run(*args, **options)."""
        for _ in range(3):
            run(*args, **options)
        torch.cuda.synchronize()
        dist.barrier()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _ in range(inner):
                run(*args, **options)
        return captured


def popularity(shape: LayerShape, seed: int = SEED) -> torch.Tensor:
    """The popularity of experts, [E] float64. As in recorded layers, the most popular one has about 8 times the
    mean."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.num_experts, generator=generator, dtype=torch.float64).mul(0.9).exp()


def skewed_ids(shape: LayerShape, num_tokens: int, seed: int, device: torch.device) -> torch.Tensor:
    """Experts [T, k] int64 drawn by a popularity that has drifted by a fifth since placements were planned."""
    generator = torch.Generator(device).manual_seed(seed)
    drift = torch.randn(shape.num_experts, generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    liked = (popularity(shape).log() + 0.2 * drift).to(device, torch.float32)
    noise = torch.rand(num_tokens, shape.num_experts, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
    return (liked - torch.log(-torch.log(noise))).topk(shape.top_k, dim=1).indices


def redundant_on(size: int, shape: LayerShape) -> int:
    """The number of redundant experts that gives all ranks equally many slots."""
    least = REDUNDANT[shape.name]
    return least + -(shape.num_experts + least) % size


def placement_of(text: str, shape: LayerShape, size: int, redundant: int, nodes: int = 1) -> Placement:
    history = (popularity(shape) * 1e4).to(torch.int64)[None, None]
    return parse_stack(text).placement.plan(history, Cluster(size, nodes, redundant, shape.groups))


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for name, number in installed("tokenspeed-deepep", "deep_ep").items():
        found.setdefault("deep_ep", f"{name} {number}")
    return found
