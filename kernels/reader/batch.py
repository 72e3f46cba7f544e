"""Reads one set of channels for all tokens of a batch: those with the largest sum of scores over its tokens, as many as
the budget of bytes allows. Uses CUDA kernels if they support the device and the shape, else plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epsim.kernels.experts.cuda import available
from epsim.kernels.reader import batch_cuda
from epsim.kernels.reader.layer import ReaderLayer, as_words, from_words
from epsim.kernels.reader.screen import Batches
from epsim.kernels.reader.select import keep_for_batch


@dataclass(frozen=True, slots=True, eq=False)
class BatchReader:
    """layer: experts and sketch. kept_of [E + 1] int32: channels that a batch keeps, by its number of active experts.
    Create it with `of`."""

    layer: ReaderLayer
    kept_of: torch.Tensor

    @classmethod
    def of(cls, layer: ReaderLayer, budget: float) -> BatchReader:
        """Creates a reader. budget: the fraction of the bytes of its active experts that a batch may read. Raises
        ValueError if the screen alone reads more."""
        return cls(layer, layer.channels_kept(budget, range(layer.sketch.num_experts + 1)))

    @property
    def sizes(self) -> batch_cuda.Sizes:
        layer, sketch = self.layer, self.layer.sketch
        gelu = layer.gate == "gelu"
        return batch_cuda.Sizes(sketch.hidden, sketch.intermediate, layer.coordinates, layer.rank, gelu)

    def read(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output [T, H] bfloat16 for x [T, H] bfloat16, ids [T, k] int64 (distinct in a row, -1 for none)
        and weights [T, k] float32.

        The output of a token without experts is zero, and it does not influence the choice of channels. kept [E,
        ceil(I / 32)] int32, if given, receives the kept channels: bit c % 32 of word c / 32 is channel c of an expert.
        Every run gives the same bits. The call does not wait for the GPU and can be captured in a CUDA graph. The
        kernels take up to 128 tokens and round the rotated x to fp16 for the screen. Raises ValueError for inputs of
        the wrong shape, type or device.
        """
        layer = self.layer
        layer.check(x, ids, weights)
        sketch = layer.sketch
        words = (sketch.num_experts, -(-sketch.intermediate // 32))
        if kept is not None and (kept.dtype != torch.int32 or kept.shape != words or not kept.is_contiguous()):
            raise ValueError(f"kept is {list(kept.shape)} {kept.dtype}, not contiguous {list(words)} int32")
        if kept is not None:
            kept.zero_()
        if not len(x):
            return torch.empty_like(x)
        uncovered = batch_cuda.uncovered(self.sizes, len(x), sketch.num_experts, ids.shape[1])
        if not x.is_cuda or not available(x.device.index) or uncovered is not None:
            return self._plain(x, ids, weights, kept)
        tensors = {"ids": ids.contiguous(), "weights": weights.contiguous(), "kept_of": self.kept_of}
        tensors |= {"gate_up": layer.gate_up, "down": layer.down}
        return batch_cuda.launched(self.sizes, sketch, x, tensors, kept)["output"]

    def _plain(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        layer, sketch = self.layer, self.layer.sketch
        batches = Batches(torch.zeros(len(x), dtype=torch.int64, device=x.device), 1)
        scores, estimates = layer.screened(x, ids, weights, batches)
        active = torch.zeros(sketch.num_experts + 1, dtype=torch.bool, device=x.device)
        active[torch.where(ids >= 0, ids, sketch.num_experts)] = True
        number = self.kept_of[active[:-1].sum()].long()[None]
        taken = keep_for_batch(scores, ids, sketch.num_experts, number) & (ids >= 0)[..., None]
        if kept is not None:
            kept.copy_(of_experts(taken, ids, sketch.num_experts))
        return layer.output(x, ids, weights, taken, estimates)


def of_experts(taken: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Kept channels as bits, [E, ceil(I / 32)] int32. taken [T, k, I] bool: equal wherever a token has the expert."""
    marks = torch.zeros(num_experts + 1, taken.shape[2], dtype=torch.bool, device=ids.device)
    marks[torch.where(ids >= 0, ids, num_experts).flatten()] = taken.flatten(0, 1)
    return as_words(marks[:num_experts, None])


def of_slots(kept: torch.Tensor, ids: torch.Tensor, intermediate: int) -> torch.Tensor:
    """The inverse of `of_experts`: [T, k, I] bool from kept [E, ceil(I / 32)] int32 and ids [T, k]."""
    marks = from_words(kept, 1, intermediate)[:, 0]
    return marks[ids.clamp(min=0)] & (ids >= 0)[..., None]
