"""Reader policies: they choose the channels of a token's experts to read (kernels/reader), and count a rank's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from epsim.kernels.reader.bytes import ReadBytes
from epsim.kernels.reader.codes import BLOCK
from epsim.kernels.reader.screen import COORDINATES
from epsim.policies.base import Reader

Score = Literal["sketch", "int4-gate", "cats"]
INDEPENDENT = (
    "bytes of a batch are expected ones: tokens of an expert choose channels and coordinates as if independently; "
    "where they choose alike, fewer are read"
)


@dataclass(frozen=True, slots=True)
class Channels(Reader):
    """Of each token's experts only some channels are read.

    budget: share of its experts' bytes, all that is read counted (`ReadBytes`); 1 reads all and screens nothing.
    score: by what channels are chosen: estimates of the ternary `sketch`, an int4 copy of the gate rows, or the gate
    rows themselves, after CATS. screen: `partial` reads 80 of 128 coordinates of the sketch, `full` all.
    restore: whether skipped channels are restored by the low-rank map (of the sketch's estimates alone).
    units: `output`, a channel's score is what it adds to the layer's output; `raw`, the size of the activation.
    quota: `token`, the best k of all its experts, on whichever ranks; `experts` or `weights`, each rank its own best,
    as many as its share of the token's experts or of their weights, for which ranks need not ask each other; `batch`,
    one set of channels and of coordinates for all tokens of a batch, best by the sum of their scores, so that the bytes
    which the whole batch reads are within the budget, a share of those of its active experts.
    Raises ValueError where these do not go together.
    """

    budget: float
    score: Score = "sketch"
    screen: Literal["partial", "full"] = "partial"
    restore: Literal["on", "off"] = "on"
    units: Literal["output", "raw"] = "output"
    quota: Literal["token", "experts", "weights", "batch"] = "token"
    first: ClassVar[str] = "budget"
    fitted: ClassVar[bool] = False
    """Whether channels are chosen by a threshold that has to be fitted on text."""

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"{self.name}: budget={self.budget:g}: give a share above 0 and up to 1")
        if self.score != "sketch" and self.restore == "on":
            object.__setattr__(self, "restore", "off")

    @property
    def coordinates(self) -> int:
        return COORDINATES if self.screen == "partial" else BLOCK

    @property
    def notes(self) -> tuple[str, ...]:
        every = f"{self.name} acts on every step, as if all were decode steps"
        return (every,) if self.quota == "batch" else (every, INDEPENDENT)

    def sizes(self, hidden: int, intermediate: int, weight_bytes: float = 2, rank: int = 32) -> ReadBytes:
        """The byte counts of its reads. rank: of the map."""
        rank = rank if self.restore == "on" else 0
        return ReadBytes(hidden, intermediate, weight_bytes, self.coordinates, rank, self.score)

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        """Expected bytes [...] float64 that a rank reads. tokens [...]: its assignments; active [...]: its experts with
        any.

        Tokens are assumed to choose independently, and each expert to have tokens / active assignments. At most the
        bytes of whole experts. Raises ValueError if the screen exceeds the budget.
        """
        sizes = self.sizes(hidden, intermediate, weight_bytes)
        kept = sizes.kept(self.budget, top_k) / (top_k * intermediate)
        each = (tokens / active.clamp(min=1)).double()
        all_kept = active * float(sizes.expert)
        if self.budget >= 1:
            return all_kept

        if self.quota == "batch":
            screens = active * (sizes.screen + intermediate * sizes.skipped_channel) + sizes.once * (active > 0)
            cost = sizes.kept_channel - sizes.skipped_channel
            number = torch.floor((self.budget * all_kept - screens) / cost).clamp(min=0)
            return torch.minimum(screens + number * cost, all_kept)

        def union(share: float) -> Tensor:
            return 1 - torch.pow(torch.full_like(each, 1 - share), each)

        codes = hidden * sizes.code_row * union(sizes.coordinates / BLOCK) if self.score == "sketch" else 0.0
        channels = union(kept) * sizes.kept_channel + union(1 - kept) * sizes.skipped_channel
        read = active * (sizes.beside_codes + codes + intermediate * channels) + sizes.once * (active > 0)
        return torch.minimum(read, all_kept)

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        """Bytes of the sketch and map, or of what other scores need; 0 if all channels are read."""
        return 0 if self.budget >= 1 else self.sizes(hidden, intermediate).resident(num_experts)


@dataclass(frozen=True, slots=True)
class TopkChannels(Channels):
    """Of all channels of a token's experts exactly the best k are read, k from the bytes that the token may read."""

    name: ClassVar[str] = "topk-channels"
    examples: ClassVar[tuple[str, ...]] = ("topk-channels(0.178)", "topk-channels(0.2,quota=batch,score=cats)")


@dataclass(frozen=True, slots=True)
class ThresholdChannels(Channels):
    """All channels above a threshold, fitted on calibration text so that on average the budget is read. What is read of
    other text is another matter; the simulator counts the budget. It has no number to share out: no quota but `token`
    goes with it."""

    name: ClassVar[str] = "threshold-channels"
    examples: ClassVar[tuple[str, ...]] = ("threshold-channels(0.2)",)
    fitted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super(ThresholdChannels, self).__post_init__()
        if self.quota != "token":
            raise ValueError(f"{self.name}: quota={self.quota}: a threshold shares no number out: leave quota away")

    @property
    def notes(self) -> tuple[str, ...]:
        counted = f"{self.name}: its calibrated budget is counted, what it reads of other text differs"
        return (*super(ThresholdChannels, self).notes, counted)
