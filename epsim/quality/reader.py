"""Applies a channel reader to a live model. It replaces the forward of the routed experts, after any router policy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import torch

from epsim.kernels.reader import (
    Batches,
    LayerSketch,
    ReadBytes,
    keep_above,
    keep_by_rank,
    keep_for_batch,
    keep_top,
    rank_quotas,
    read_output,
)
from epsim.kernels.reader.rivals import Inputs, sparse_inputs_output, sparse_inputs_share
from epsim.kernels.reader.select import ShareBy
from epsim.policies.base import Reader
from epsim.policies.reader import Channels
from epsim.quality.layers import Layer, build_sketches, layers_of, replaced

Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class SparseInputs:
    """Reads only the largest inputs of each matrix, within a budget. which: largest by size (`teal`), or by size times
    the column's norm (`wina`). budget: share of the experts' bytes."""

    which: Inputs
    budget: float


@dataclass
class Reading:
    """Applies a reader to the experts of a model inside `with reading.on(...)`, and counts the channels that it keeps.

    reader: the policy. thresholds: one per layer, for a reader with a threshold (`calibrated`). num_kept: number of
    channels that a token keeps; None for what the budget allows. num_ranks: ranks that hold the experts in contiguous
    shares, for quotas per rank. batch_size: number of sequences whose t-th tokens form a batch, for readers that choose
    per batch; None for all sequences of a pass. record: is called with (layer, x, ids, kept) for every read.
    """

    layers: list[Layer]
    reader: Channels | SparseInputs
    thresholds: Sequence[float] | None = None
    num_kept: int | None = None
    num_ranks: int = 1
    record: Record | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        sketch = self.layers[0].screen.sketch
        hidden, intermediate, num_experts = sketch.hidden, sketch.intermediate, sketch.num_experts
        if num_experts % self.num_ranks:
            raise ValueError(f"--ranks {self.num_ranks} do not divide the model's {num_experts} experts")
        reader, device = self.reader, sketch.signs.device
        self.counts = torch.zeros(len(self.layers), 5, dtype=torch.float64, device=device)
        """[layers, 5]: tokens; channels kept; the largest index into `allowed` of a token whose screen exceeds its
        budget (0 for none); experts of all tokens; ranks of all tokens."""
        self.rank_of_expert = torch.arange(num_experts, device=device) // (num_experts // self.num_ranks)
        if isinstance(reader, SparseInputs):
            self.share = sparse_inputs_share(reader.budget, hidden, intermediate, reader.which)
            return
        if reader.fitted and self.thresholds is None:
            raise ValueError(f"{reader.name} needs thresholds: calibrate them on text with `calibrated`")
        sizes = self._sizes()
        # The number of channels that a token (or a batch that chooses together) may keep, at the index
        # experts * (num_ranks + 1) + ranks, by its numbers of experts and ranks. -1: the screen exceeds the budget.
        numbers = product(range(num_experts + 1), range(self.num_ranks + 1))
        self.allowed = torch.tensor([self._allowed(sizes, *pair) for pair in numbers], device=device)

    def _allowed(self, sizes: ReadBytes, num_experts: int, num_ranks: int) -> int:
        if self.num_kept is not None:
            return self.num_kept
        try:
            return sizes.kept(self.reader.budget, num_experts, num_ranks)
        except ValueError:
            return -1

    def _sizes(self) -> ReadBytes:
        assert not isinstance(self.reader, SparseInputs)
        sketch = self.layers[0].screen.sketch
        return self.reader.sizes(sketch.hidden, sketch.intermediate, rank=sketch.rank)

    def _output(
        self, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, length: int
    ) -> torch.Tensor:
        """The experts' output [T, H] for x [T, H], ids and weights [T, k]. length: tokens of each sequence."""
        layer, reader = self.layers[number], self.reader
        # Entries of weight 0 do not count: router policies fill rows by repeating an expert.
        ids = torch.where(weights == 0, -1, ids)
        if isinstance(reader, SparseInputs):
            return sparse_inputs_output(x, ids, weights, layer.experts, self.share, reader.which)
        if reader.budget >= 1 and self.num_kept is None:
            kept = (ids >= 0)[..., None].expand(-1, -1, layer.norms.shape[1])
            self._count(number, x, ids, kept)
            return read_output(x, ids, weights, layer.experts, kept)
        batches = self.batches(x, length) if reader.quota == "batch" else None
        estimates = layer.estimates(reader, x, ids, batches)
        kept = self.keep(number, ids, weights, layer.scores(reader, ids, weights, estimates), batches)
        self._count(number, x, ids, kept)
        restored = reader.restore == "on"
        sketch = layer.screen.sketch if restored else None
        return read_output(x, ids, weights, layer.experts, kept, estimates if restored else None, sketch)

    def batches(self, x: torch.Tensor, length: int) -> Batches:
        """Groups the tokens x [T, H] into batches: the t-th tokens of `batch_size` sequences of `length` tokens."""
        sequences = len(x) // length
        together = min(self.batch_size or sequences, sequences)
        first = torch.arange(sequences, device=x.device) // together * length
        of_token = (first[:, None] + torch.arange(length, device=x.device)).flatten()
        return Batches(of_token, -(-sequences // together) * length)

    def keep(
        self,
        number: int,
        ids: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
        batches: Batches | None = None,
    ) -> torch.Tensor:
        """The channels to keep, [T, k, I] bool. number: the layer; scores [T, k, I]: of its channels."""
        assert not isinstance(self.reader, SparseInputs)
        if self.reader.fitted:
            assert self.thresholds is not None
            return keep_above(scores, self.thresholds[number]) & (ids >= 0)[..., None]
        num_experts = len(self.rank_of_expert)
        if batches is None:
            experts, ranks = (ids >= 0).sum(1), self.ranks_of(ids)
        else:
            is_active = torch.zeros(batches.total, num_experts + 1, dtype=torch.bool, device=ids.device)
            is_active[batches.of_token[:, None], torch.where(ids >= 0, ids, num_experts)] = True
            experts = is_active[:, :num_experts].sum(1)
            ranks = is_active[:, :num_experts].view(batches.total, self.num_ranks, -1).any(-1).sum(1)
        index = experts * (self.num_ranks + 1) + ranks
        allowed = self.allowed[index]
        self.counts[number, 2] = torch.maximum(self.counts[number, 2], torch.where(allowed < 0, index, 0).amax())
        allowed = allowed.clamp(min=0)
        if batches is not None:
            return keep_for_batch(scores, ids, num_experts, allowed, batches.of_token)
        if self.reader.quota in ("experts", "weights") and self.num_ranks > 1:
            by: ShareBy = "experts" if self.reader.quota == "experts" else "weights"
            quotas = rank_quotas(allowed, ids, weights, self.rank_of_expert, self.num_ranks, by)
            return keep_by_rank(scores, ids, quotas, self.rank_of_expert)
        return keep_top(scores, allowed)

    def ranks_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The number of ranks [T] that hold an expert of each token, for ids [T, k]."""
        is_active = torch.zeros(len(ids), self.num_ranks + 1, dtype=torch.bool, device=ids.device)
        rank = torch.where(ids >= 0, self.rank_of_expert[ids.clamp(min=0)], self.num_ranks)
        return is_active.scatter_(1, rank, torch.ones_like(rank, dtype=torch.bool))[:, : self.num_ranks].sum(1)

    def _count(self, number: int, x: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> None:
        self.counts[number, 0] += (ids >= 0).any(1).sum()
        self.counts[number, 1] += kept.sum()
        self.counts[number, 3] += (ids >= 0).sum()
        self.counts[number, 4] += self.ranks_of(ids).sum()
        if self.record is not None:
            self.record(number, x, ids, kept)

    def kept_channels(self) -> float:
        """The mean number of channels kept per token and layer, over all reads so far."""
        return float(self.counts[:, 1].sum() / self.counts[:, 0].sum())

    def described(self) -> dict[str, float]:
        """Two means. kept_channels: channels kept per token and layer. share_read: the bytes that a single token reads
        on all ranks, over the bytes of its experts."""
        sizes, kept = self._sizes(), self.kept_channels()
        experts, ranks = (self.counts[:, 3:].sum(0) / self.counts[:, 0].sum()).tolist()
        skipped = experts * sizes.intermediate - kept
        read = experts * sizes.screen + kept * sizes.kept_channel + skipped * sizes.skipped_channel + ranks * sizes.once
        share = 1.0 if self.reader.budget >= 1 else read / (experts * sizes.expert)
        return {"kept_channels": kept, "share_read": share}

    @contextmanager
    def recording(self, model: Any, record: Record) -> Iterator[None]:
        """`on` with whole_sequences=True; inside the `with`, `record` replaces the record of this reading."""
        before, self.record = self.record, record
        with self.on(model, whole_sequences=True):
            yield
        self.record = before

    @contextmanager
    def on(self, model: Any, whole_sequences: bool) -> Iterator[None]:
        """Inside the `with`, the model's experts are read by this reader. whole_sequences: if True, every token counts
        as a decode token; if False, passes with several tokens per sequence (prefill) read all channels. Raises
        ValueError at the end if a token's screen exceeded its budget."""
        with replaced(model, whole_sequences, self._output):
            yield
        if short := int(self.counts[:, 2].amax()):
            # Raises ValueError with the budget that the screen takes.
            self._sizes().kept(self.reader.budget, *divmod(short, self.num_ranks + 1))


def reads(reading: Reading | None, model: Any, whole_sequences: bool) -> AbstractContextManager[None]:
    """`Reading.on`, or a context that does nothing."""
    return nullcontext() if reading is None else reading.on(model, whole_sequences)


def reading_of(
    model: Any,
    reader: Reader,
    calibration: torch.Tensor,
    sketches: dict[int, LayerSketch] | None = None,
    num_ranks: int = 1,
) -> Reading:
    """The `Reading` of a stack's reader for a model. calibration [sequences, length]: text on which a threshold is
    calibrated. sketches: of the model; None to build them. num_ranks: ranks for quotas per rank."""
    assert isinstance(reader, Channels)
    layers = layers_of(model, sketches or build_sketches(model), int4=reader.score == "int4-gate")
    thresholds = None
    if reader.fitted:
        thresholds = calibrated(model, layers, reader, calibration, [reader.budget])[reader.budget]
    return Reading(layers, reader, thresholds, num_ranks=num_ranks)


@torch.no_grad()
def calibrated(
    model: Any, layers: list[Layer], reader: Channels, text: torch.Tensor, budgets: Sequence[float]
) -> dict[float, list[float]]:
    """Calibrates thresholds: {budget: one threshold per layer}. With them the plain model keeps as many channels as
    `topk-channels` with that budget, on average over the tokens of text [sequences, length]."""
    sketch = layers[0].screen.sketch
    thresholds: dict[float, list[float]] = {budget: [] for budget in budgets}

    def watch(number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, length: int) -> torch.Tensor:
        layer = layers[number]
        scores = layer.scores(reader, ids, weights, layer.estimates(reader, x, ids)).flatten()
        numbers = []
        for budget in budgets:
            sizes = replace(reader, budget=budget).sizes(sketch.hidden, sketch.intermediate, rank=sketch.rank)
            numbers.append(len(x) * sizes.kept(budget, ids.shape[1]))
        best = scores.topk(min(max(numbers) + 1, len(scores))).values
        for budget, count in zip(budgets, numbers, strict=True):
            # Scores are >= 0, so -1 keeps all channels.
            thresholds[budget].append(float(best[count]) if count < len(scores) else -1.0)
        kept = torch.ones(*ids.shape, sketch.intermediate, dtype=torch.bool, device=ids.device)
        return read_output(x, ids, weights, layer.experts, kept)

    with replaced(model, True, watch):
        model(input_ids=text.to(model.device), use_cache=False, logits_to_keep=1)
    return thresholds
