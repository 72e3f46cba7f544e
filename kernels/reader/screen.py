"""The screen: estimates gate and up activations from the ternary sketch, with bounds of the errors."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from epsim.kernels.reader.build import LayerSketch
from epsim.kernels.reader.codes import in_blocks
from epsim.kernels.reader.rotate import rotated
from epsim.kernels.reader.select import top_mask
from epsim.kernels.reader.slots import slot_products

COORDINATES = 80
"""The number of coordinates of each 128 that a partial screen reads."""


class Batches(NamedTuple):
    """of_token [T] int64: the batch of each token, of `total` batches."""

    of_token: torch.Tensor
    total: int


def coordinates(rotated_x: torch.Tensor, number: int) -> torch.Tensor:
    """The `number` largest absolute values per block of rotated_x [T, H], as [T, H] bool; ties: the lower index."""
    return top_mask(in_blocks(rotated_x.abs()), number).flatten(-2)


def batch_coordinates(rotated_x: torch.Tensor, number: int, batch: torch.Tensor, count: int) -> torch.Tensor:
    """`coordinates` for whole batches, [T, H] bool: the `number` coordinates of each block of rotated_x [T, H] with the
    largest sum of squares over the batch's tokens. batch [T]: the batch of each token, of `count` batches."""
    squares = rotated_x.new_zeros(count, rotated_x.shape[1]).index_add_(0, batch, rotated_x.square())
    return coordinates(squares, number)[batch]


@dataclass(frozen=True, eq=False)
class Screen:
    """A sketch that is decoded once to screen many tokens. dtype: of the arithmetic."""

    sketch: LayerSketch
    dtype: torch.dtype = torch.float32

    @cached_property
    def decoded(self) -> torch.Tensor:
        """The decoded sketch, [E, 2I, H]."""
        return self.sketch.decoded(self.dtype)

    def estimates(
        self, x: torch.Tensor, ids: torch.Tensor, number: int = COORDINATES, batches: Batches | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up estimates [T, k, I] for x [T, H] and ids [T, k], from the `number` largest coordinates of each
        block of the rotated x; 128 is the full screen. batches: groups of tokens that share their coordinates; tokens
        without experts do not influence the choice."""
        rotated_x = rotated(x.to(self.dtype), self.sketch.signs)
        if batches is None:
            read = coordinates(rotated_x, number)
        else:
            counted = torch.where((ids >= 0).any(1, keepdim=True), rotated_x, 0.0)
            read = batch_coordinates(counted, number, batches.of_token, batches.total)
        gate, up = slot_products(rotated_x * read, ids, self.decoded).chunk(2, -1)
        return gate, up

    def error_bounds(
        self, x: torch.Tensor, ids: torch.Tensor, number: int = COORDINATES
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Upper bounds of the errors of `estimates` in exact arithmetic, gate and up [T, k, I].

        A bound is the sum over blocks b of error_b |x_b| + scale_b * (sum of the absolute values of the coordinates
        that are not read), because no code is larger than 1.
        """
        rotated_x = rotated(x.to(self.dtype), self.sketch.signs)
        unread = rotated_x.abs() * ~coordinates(rotated_x, number)
        lengths = in_blocks(rotated_x).norm(dim=-1)
        sizes = in_blocks(unread).sum(-1)
        bounds = []
        for which in (0, 1):
            errors, scales = (
                table[:, :, which].transpose(1, 2).to(self.dtype) for table in (self.sketch.errors, self.sketch.scales)
            )
            bounds.append(slot_products(lengths, ids, errors) + slot_products(sizes, ids, scales))
        return bounds[0], bounds[1]
