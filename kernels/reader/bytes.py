"""Counts the bytes that a channel reader reads, in whole sectors of 32 bytes: per token, per batch and for a budget."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, isnan
from typing import Literal

import torch

from epsim.kernels.reader.codes import BLOCK, SECTOR, row_bytes

Source = Literal["sketch", "int4-gate", "cats"]
"""The source of channel scores: the ternary sketch, an int4 copy of the gate rows, or the gate rows (CATS)."""


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """hidden, intermediate: sizes of the experts. weight_bytes: bytes per weight. coordinates: how many of each 128 the
    screen reads. rank: of the map that restores skipped channels, 0 for none. sector: 1 counts bytes without rounding.

    A token reads: for each of its experts the screen (codes of the chosen coordinates, scales and norms; another source
    of scores has other data); for each kept channel its gate, up and down weights; for each skipped channel its
    coefficients b; and once the signs and U. Errors of the sketch are not read, and activations are not counted.
    Raises ValueError if the source needs a hidden size that is a multiple of 128 and gets another.
    """

    hidden: int
    intermediate: int
    weight_bytes: float = 2
    coordinates: int = 80
    rank: int = 32
    source: Source = "sketch"
    sector: int = SECTOR

    def __post_init__(self) -> None:
        if self.source != "cats" and self.hidden % BLOCK:
            raise ValueError(
                f"channels cannot be chosen by {self.source} with a hidden size of {self.hidden}: give a "
                f"multiple of {BLOCK}"
            )

    def _whole(self, count: float) -> int:
        return int(-(-count // self.sector) * self.sector)

    def _anywhere(self, count: int) -> int:
        """Bytes read for an item of `count` bytes in an array of such items, which may begin and end inside a sector:
        the most for any item."""
        return self._whole(count + self.sector - gcd(count, self.sector))

    @property
    def weight_row(self) -> int:
        """Bytes read for a channel's gate, up or down weights."""
        return self._whole(self.hidden * self.weight_bytes)

    @property
    def expert(self) -> int:
        """Bytes of all weights of an expert."""
        return 3 * self.intermediate * self.weight_row

    @property
    def code_row(self) -> int:
        """Bytes of one coordinate's codes of all channels of an expert."""
        return row_bytes(self.intermediate, self.sector)

    @property
    def beside_codes(self) -> int:
        """Bytes of an expert's screen without the codes, which do not depend on the number of coordinates."""
        norms = self._anywhere(2 * self.intermediate)
        if self.source == "cats":
            return norms + self.intermediate * self.weight_row
        if self.source == "int4-gate":
            return norms + self.intermediate * self._whole(self.hidden / 2 + 2 * self.hidden // BLOCK)
        return norms + self._anywhere(self.hidden // BLOCK * 2 * self.intermediate * 2)

    @property
    def screen(self) -> int:
        """Bytes of an expert's screen for one token."""
        read = self.hidden * self.coordinates // BLOCK if self.source == "sketch" else 0
        return self.beside_codes + read * self.code_row

    @property
    def kept_channel(self) -> int:
        return (2 if self.source == "cats" else 3) * self.weight_row

    @property
    def skipped_channel(self) -> int:
        return self._anywhere(2 * self.rank)

    @property
    def once(self) -> int:
        """Bytes read once per layer: the rotation's signs and U."""
        signs = self._whole(self.hidden) if self.source == "sketch" else 0
        return signs + self._whole(2 * self.hidden * self.rank)

    def resident(self, num_experts: int) -> int:
        """Bytes that a layer of num_experts experts keeps in memory in addition to the weights: the sketch with its
        errors, without padding."""
        norms = 2 * self.intermediate
        each = {
            "sketch": self.hidden * self.code_row + self.hidden // BLOCK * 2 * self.intermediate * 4 + norms,
            "int4-gate": self.intermediate * (self.hidden // 2 + 2 * self.hidden // BLOCK) + norms,
            "cats": norms,
        }[self.source]
        signs = self.hidden if self.source == "sketch" else 0
        return num_experts * (each + 2 * self.intermediate * self.rank) + signs + 2 * self.hidden * self.rank

    def token(self, num_experts: int, num_kept: int, num_ranks: int = 1) -> int:
        """Bytes read for a token with num_experts experts on num_ranks ranks. A token that keeps all channels reads
        only the weights. Each rank reads its own signs and U."""
        channels = num_experts * self.intermediate
        if num_kept >= channels:
            return num_experts * self.expert
        read = num_experts * self.screen + num_kept * self.kept_channel
        return read + (channels - num_kept) * self.skipped_channel + (self.once * num_ranks if num_experts else 0)

    def kept(self, budget: float, num_experts: int, num_ranks: int = 1) -> int:
        """The most channels that a token may keep so that `token` stays within the budget, a fraction of the bytes of
        its experts. Raises ValueError if the screen alone exceeds the budget."""
        if isnan(budget):
            raise ValueError("a budget of nan: give a share of the bytes of a token's experts, above 0 and up to 1")
        channels = num_experts * self.intermediate
        if budget >= 1 or not num_experts:
            return channels
        # Rounded down to whole bytes, because a float product may exceed the budget.
        room = floor(Fraction(max(budget, 0.0)) * num_experts * self.expert) - self.token(num_experts, 0, num_ranks)
        if room < 0:
            least = ceil(Fraction(self.token(num_experts, 0, num_ranks), num_experts * self.expert) * 10_000) / 10_000
            where = f" on {num_ranks} ranks" if num_ranks > 1 else ""
            more = "more" if least < 1 else "1, which reads whole experts"
            raise ValueError(
                f"a budget of {budget:g} is too small: with {num_experts} experts of {self.hidden} x "
                f"{self.intermediate}{where} choosing channels alone reads {least:.4f}; give {more}"
            )
        # Below a budget of 1, at least one channel is skipped, because the screen is read too.
        return min(room // (self.kept_channel - self.skipped_channel), channels - 1)


def token_bytes(sizes: ReadBytes, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Bytes that each token reads by itself, [T] int64. ids [T, k] (-1 for none), kept [T, k, I] bool."""
    experts = (ids >= 0).sum(1)
    num_kept = kept.sum((1, 2))
    channels = experts * sizes.intermediate
    read = experts * sizes.screen + num_kept * sizes.kept_channel
    read = read + (channels - num_kept) * sizes.skipped_channel + sizes.once * (experts > 0)
    return torch.where(num_kept == channels, experts * sizes.expert, read)


def union_bytes(
    sizes: ReadBytes, ids: torch.Tensor, kept: torch.Tensor, coordinates: torch.Tensor, num_experts: int
) -> int:
    """Bytes that a batch reads: for each active expert, the unions over its tokens of the coordinates, of the kept
    channels, and of the skipped channels. coordinates [T, H] bool: those that the screen of each token reads."""
    slots = torch.where(ids >= 0, ids, num_experts).flatten()

    def union(marks: torch.Tensor) -> torch.Tensor:
        marked = torch.zeros(num_experts + 1, marks.shape[-1], dtype=torch.int64, device=ids.device)
        return marked.index_add_(0, slots, marks.flatten(0, 1).long())[:num_experts] > 0

    filled = (ids >= 0)[..., None]
    active = int((torch.bincount(slots, minlength=num_experts + 1)[:num_experts] > 0).sum())
    if bool((kept | ~filled).all()):
        return active * sizes.expert
    read = active * sizes.beside_codes + sizes.once * (active > 0)
    if sizes.source == "sketch":
        read += int(union(coordinates[:, None].expand(-1, ids.shape[1], -1)).sum()) * sizes.code_row
    read += int(union(kept & filled).sum()) * sizes.kept_channel
    return read + int(union(~kept & filled).sum()) * sizes.skipped_channel
