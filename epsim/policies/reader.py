"""Reader policies choose the channels of a token's experts to read (kernels/reader), and count the bytes of a rank."""

import math
from collections.abc import Mapping
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
    "bytes of a batch are expected ones: the tokens of an expert are assumed to choose channels and coordinates "
    "independently; if they choose alike, fewer bytes are read"
)


@dataclass(frozen=True, slots=True)
class Dense(Reader):
    """Reads all weights of an active expert."""

    name: ClassVar[str] = "dense"
    complexity: ClassVar[int] = 0
    acts: ClassVar[bool] = False
    engines: ClassVar[Mapping[str, str]] = {"sglang": "", "vllm": ""}

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        return active.double() * (3 * hidden * intermediate * weight_bytes)


@dataclass(frozen=True, slots=True)
class Channels(Reader):
    """Reads only some channels of each token's experts.

    budget: the share of its experts' bytes that a token may read, including the bytes read for choosing (`ReadBytes`).
    With 1 it reads all channels and chooses none.
    score: how channels are scored: `sketch`, by estimates from a ternary sketch; `int4-gate`, from an int4 copy of the
    gate rows; `cats`, from the gate rows (CATS). screen: `partial` reads 80 of 128 coordinates of the sketch, `full`
    all.
    restore: whether a low-rank map restores skipped channels (with score `sketch` only).
    units: `output`: a channel's score is what it adds to the layer's output; `raw`: the size of its activation.
    quota: `token`: the best k channels of all the token's experts, on any rank. `experts`, `weights`: each rank takes
    its own best channels, in proportion to its share of the token's experts or of their weights, so that ranks need not
    communicate. `batch`: one set of channels and coordinates for all tokens of a batch, with the best sum of scores;
    the budget is then a share of the bytes of the batch's active experts.
    Raises ValueError for arguments that contradict each other.
    """

    budget: float
    score: Score = "sketch"
    screen: Literal["partial", "full"] = "partial"
    restore: Literal["on", "off"] = "on"
    units: Literal["output", "raw"] = "output"
    quota: Literal["token", "experts", "weights", "batch"] = "token"
    first: ClassVar[str] = "budget"
    fitted: ClassVar[bool] = False
    """Whether a threshold, which has to be fitted on text, chooses the channels."""

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
        """The byte counts of its reads. rank: of the low-rank map."""
        rank = rank if self.restore == "on" else 0
        return ReadBytes(hidden, intermediate, weight_bytes, self.coordinates, rank, self.score)

    def bytes_read(
        self, tokens: Tensor, active: Tensor, hidden: int, intermediate: int, weight_bytes: float, top_k: int
    ) -> Tensor:
        """Expected bytes [...] float64, at most those of whole experts (see `Reader.bytes_read`).

        Assumes that tokens choose independently, and that each expert has tokens / active assignments. Raises
        ValueError if the bytes for choosing exceed the budget.
        """
        sizes = self.sizes(hidden, intermediate, weight_bytes)
        kept = sizes.kept(self.budget, top_k) / (top_k * intermediate)
        tokens_per_expert = (tokens / active.clamp(min=1)).double()
        all_kept = active * float(sizes.expert)
        if self.budget >= 1:
            return all_kept
        if self.quota == "batch":
            screens = active * (sizes.screen + intermediate * sizes.skipped_channel) + sizes.once * (active > 0)
            cost = sizes.kept_channel - sizes.skipped_channel
            number = torch.floor((self.budget * all_kept - screens) / cost).clamp(min=0)
            return torch.minimum(screens + number * cost, all_kept)

        def union(share: float) -> Tensor:
            # Not torch.pow, whose last bit depends on an element's place in the tensor.
            return 1 - torch.exp(tokens_per_expert * math.log(max(1 - share, 1e-300)))

        codes = hidden * sizes.code_row * union(sizes.coordinates / BLOCK) if self.score == "sketch" else 0.0
        channels = union(kept) * sizes.kept_channel + union(1 - kept) * sizes.skipped_channel
        read = active * (sizes.beside_codes + codes + intermediate * channels) + sizes.once * (active > 0)
        return torch.minimum(read, all_kept)

    def resident_bytes(self, num_experts: int, hidden: int, intermediate: int) -> int:
        """Bytes of the sketch and the map, or of what the other scores need; 0 if all channels are read."""
        return 0 if self.budget >= 1 else self.sizes(hidden, intermediate).resident(num_experts)


@dataclass(frozen=True, slots=True)
class TopkChannels(Channels):
    """Reads exactly the best k channels of a token's experts. The budget gives k."""

    name: ClassVar[str] = "topk-channels"
    examples: ClassVar[tuple[str, ...]] = ("topk-channels(0.178)", "topk-channels(0.2,quota=batch,score=cats)")


@dataclass(frozen=True, slots=True)
class ThresholdChannels(Channels):
    """Reads all channels whose score is above a threshold. The threshold is fitted on calibration text so that reads
    average to the budget. On other text the reads may differ, and the simulator counts the budget. Only `quota=token`
    is possible."""

    name: ClassVar[str] = "threshold-channels"
    examples: ClassVar[tuple[str, ...]] = ("threshold-channels(0.2)",)
    fitted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super(ThresholdChannels, self).__post_init__()
        if self.quota != "token":
            raise ValueError(f"{self.name}: quota={self.quota}: a threshold has no number to divide: leave quota out")

    @property
    def notes(self) -> tuple[str, ...]:
        counted = f"{self.name}: the calibrated budget is counted; on other text it reads more or less"
        return (*super(ThresholdChannels, self).notes, counted)
