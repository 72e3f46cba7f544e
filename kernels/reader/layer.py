"""Reads a layer's experts by channels: the fused kernel if it supports the device and the shape, else plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from epsim.kernels.experts.cuda import available
from epsim.kernels.reader import cuda
from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.bytes import ReadBytes
from epsim.kernels.reader.read import Activation, Experts, read_output
from epsim.kernels.reader.screen import COORDINATES, Batches, Screen
from epsim.kernels.reader.select import keep_top, output_scores

Gate = Literal["silu", "gelu"]
MOST_TOKENS = 512
"""The most tokens of one launch."""
GATES: dict[Gate, Activation] = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}


@dataclass(frozen=True, slots=True, eq=False)
class ReaderLayer:
    """E experts of I channels and H inputs in bfloat16: gate_up [E, 2I, H]; down [E, I, H], transposed so that a
    channel's weights are contiguous. kept_of [k + 1] int32: channels that a token keeps, by its number of experts."""

    sketch: LayerSketch
    gate_up: torch.Tensor
    down: torch.Tensor
    kept_of: torch.Tensor
    gate: Gate = "silu"
    coordinates: int = COORDINATES
    restore: bool = True

    @classmethod
    def of(
        cls,
        sketch: LayerSketch,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        top_k: int,
        budget: float,
        gate: Gate = "silu",
        coordinates: int = COORDINATES,
        restore: bool = True,
    ) -> ReaderLayer:
        """Creates a layer from down [E, H, I], as checkpoints have it. budget: the fraction of its experts' bytes that
        a token may read. Raises ValueError if the screen alone reads more, or if weights are not bfloat16."""
        if gate_up.dtype != torch.bfloat16 or down.dtype != torch.bfloat16:
            raise ValueError(f"weights are {gate_up.dtype} and {down.dtype}: a channel reader takes bfloat16")
        # The kernel needs contiguous tensors.
        sketch = LayerSketch(**{name: tensor.contiguous() for name, tensor in sketch.tensors().items()})
        weights = (gate_up.contiguous(), down.transpose(1, 2).contiguous())
        none_kept = torch.zeros(top_k + 1, dtype=torch.int32, device=gate_up.device)
        layer = cls(sketch, *weights, none_kept, gate, coordinates, restore)
        return replace(layer, kept_of=layer.channels_kept(budget, range(top_k + 1)))

    @property
    def rank(self) -> int:
        """The rank of the map that restores skipped channels, 0 if none are restored."""
        return self.sketch.rank if self.restore else 0

    def channels_kept(self, budget: float, numbers: range) -> torch.Tensor:
        """The most channels within the budget, for each number of experts, int32. Raises ValueError if none fit."""
        sizes = ReadBytes(self.sketch.hidden, self.sketch.intermediate, 2, self.coordinates, self.rank)
        kept = [sizes.kept(budget, number) if number else 0 for number in numbers]
        return torch.tensor(kept, dtype=torch.int32, device=self.gate_up.device)

    def sizes(self, top_k: int) -> cuda.Sizes:
        hidden, inter = self.sketch.hidden, self.sketch.intermediate
        return cuda.Sizes(hidden, inter, top_k, self.coordinates, self.rank, self.gate == "gelu")

    def read(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output [T, H] bfloat16 of x [T, H] bfloat16, ids [T, k] int64 (-1 for none), weights [T, k] float32.

        kept [T, ceil(k I / 32)] int32, if given, receives the kept channels: bit c % 32 of word c / 32 is channel c % I
        of the token's expert c / I. Every run gives the same bits. The call does not wait for the GPU. After a first
        read of as many tokens it can be captured in a CUDA graph. Reads on one device share memory, so they must not
        run on two streams at the same time. Raises ValueError for inputs of the wrong shape, type or device.
        """
        self.check(x, ids, weights)
        self._check_kept(kept, len(x))
        if not len(x):
            return torch.empty_like(x)
        if x.is_cuda and available(x.device.index) and cuda.uncovered(self.sizes(ids.shape[1])) is None:
            return in_parts(self._fused, x, ids, weights, kept)
        return self._plain(x, ids, weights, kept)

    def _fused(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        held = {"ids": ids.contiguous(), "weights": weights.contiguous()}
        held |= {"gate_up": self.gate_up, "down": self.down, "kept_of": self.kept_of}
        return cuda.fused(self.sizes(ids.shape[1]), self.sketch, x, held, kept)

    def _plain(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        scores, estimates = self.screened(x, ids, weights)
        taken = keep_top(scores, self.kept_of[(ids >= 0).sum(1)].long())
        if kept is not None:
            kept.copy_(as_words(taken))
        return self.output(x, ids, weights, taken, estimates)

    def screened(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, batches: Batches | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain PyTorch: the scores (-1 if the id is -1) and the estimated activations of all channels, [T, k, I]."""
        gate, up = Screen(self.sketch).estimates(x, ids, self.coordinates, batches)
        estimates = GATES[self.gate](gate) * up
        scores = output_scores(weights, self.sketch.norms[ids.clamp(min=0)], estimates)
        return scores.masked_fill((ids < 0)[..., None], -1.0), estimates

    def output(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, estimates: torch.Tensor
    ) -> torch.Tensor:
        """Plain PyTorch: the output [T, H] bfloat16 from the kept channels [T, k, I] bool and the estimates."""
        experts = Experts(self.gate_up, self.down.transpose(1, 2), GATES[self.gate])
        sketch = self.sketch if self.restore else None
        return read_output(x, ids, weights, experts, kept, estimates, sketch).bfloat16()

    def check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Raises ValueError for inputs that `read` does not take."""
        hidden, most = self.sketch.hidden, len(self.kept_of) - 1
        if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != hidden:
            raise ValueError(f"x is {list(x.shape)} {x.dtype}, not [T, {hidden}] bfloat16")
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            raise ValueError("rows of x do not begin at multiples of 16 bytes")
        if ids.dtype != torch.int64 or tuple(ids.shape) != (len(x), most) or ids.shape != weights.shape:
            raise ValueError(
                f"ids are {list(ids.shape)} {ids.dtype}, weights {list(weights.shape)}, not [{len(x)}, {most}] int64"
            )
        if weights.dtype != torch.float32:
            raise ValueError(f"weights are {weights.dtype}, not float32")

    def _check_kept(self, kept: torch.Tensor | None, tokens: int) -> None:
        words = self.sizes(len(self.kept_of) - 1).words
        if kept is not None and (
            kept.dtype != torch.int32 or tuple(kept.shape) != (tokens, words) or not kept.is_contiguous()
        ):
            raise ValueError(f"kept is {list(kept.shape)} {kept.dtype}, not contiguous [{tokens}, {words}] int32")


def in_parts(
    read: Callable[..., torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """`read` of MOST_TOKENS tokens at a time, which limits the workspace of a launch."""
    if len(x) <= MOST_TOKENS:
        return read(x, ids, weights, kept)
    parts = [slice(at, at + MOST_TOKENS) for at in range(0, len(x), MOST_TOKENS)]
    return torch.cat([read(x[part], ids[part], weights[part], None if kept is None else kept[part]) for part in parts])


def as_words(taken: torch.Tensor) -> torch.Tensor:
    """Kept channels as bits, [T, ceil(k I / 32)] int32, from taken [T, k, I] bool."""
    flat = taken.flatten(1)
    bits = F.pad(flat, (0, -flat.shape[1] % 32)).view(len(flat), -1, 32).to(torch.int64)
    words = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def from_words(words: torch.Tensor, top_k: int, intermediate: int) -> torch.Tensor:
    """The inverse of `as_words`."""
    bits = words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
    return bits.flatten(1)[:, : top_k * intermediate].bool().view(len(words), top_k, intermediate)
