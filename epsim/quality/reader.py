"""Where a channel reader acts on a live model: in place of the routed experts' forward, after any router policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from epsim.kernels.reader import (
    Batches,
    Experts,
    LayerSketch,
    ReadBytes,
    Screen,
    keep_above,
    keep_by_rank,
    keep_for_batch,
    keep_top,
    output_scores,
    rank_quotas,
    read_output,
)
from epsim.kernels.reader.rivals import Inputs, int4_gate, sparse_inputs_output, sparse_inputs_share
from epsim.kernels.reader.select import ShareBy
from epsim.kernels.reader.slots import slot_products
from epsim.kernels.reader.store import build_named
from epsim.policies.base import Reader
from epsim.policies.reader import Channels

Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


def expert_modules(model: Any) -> list[Any]:
    """The modules of a model that hold a layer's routed experts, first layer first. Raises ValueError for none."""
    wanted = ("gate_up_proj", "down_proj", "act_fn")
    found = [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]
    found = [module for module in found if getattr(module.gate_up_proj, "ndim", 0) == 3]
    if not found:
        raise ValueError("a channel reader needs a model whose experts hold gate_up_proj [E, 2I, H] and down_proj")
    return found


def build_sketches(model: Any, seed: int = 0) -> dict[int, LayerSketch]:
    """The sketches of a model in memory, by place among its layers with experts, on its device."""
    modules = expert_modules(model)
    return {i: build_named(i, m.gate_up_proj.data, m.down_proj.data, seed, 32) for i, m in enumerate(modules)}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's experts, its sketch decoded, and what scores need of both, all on the model's device."""

    experts: Experts
    screen: Screen
    int4: torch.Tensor | None = None

    @property
    def norms(self) -> torch.Tensor:
        return self.screen.sketch.norms

    def estimates(
        self, reader: Channels, x: torch.Tensor, ids: torch.Tensor, batches: Batches | None = None
    ) -> torch.Tensor:
        """[T, k, I] float32: what the reader takes the activations for, by which it chooses."""
        if reader.score == "sketch":
            gate, up = self.screen.estimates(x, ids, reader.coordinates, batches)
            return self.experts.activation(gate) * up
        if reader.score == "int4-gate":
            assert self.int4 is not None
            return self.experts.activation(slot_products(x.float(), ids, self.int4))
        gate = slot_products(x, ids, self.experts.gate_up[:, : self.norms.shape[1]])
        return self.experts.activation(gate.float())

    def scores(
        self, reader: Channels, ids: torch.Tensor, weights: torch.Tensor, estimates: torch.Tensor
    ) -> torch.Tensor:
        """[T, k, I] float32, -1 for an empty slot."""
        if reader.units == "output":
            scores = output_scores(weights, self.norms[ids.clamp(min=0)], estimates)
        else:
            scores = estimates.abs()
        return scores.masked_fill((ids < 0)[..., None], -1.0)


def layers_of(model: Any, sketches: dict[int, LayerSketch], int4: bool = False) -> list[Layer]:
    """What `Reading` needs of every layer with experts. int4: also the int4 copies of the gate rows."""
    modules = expert_modules(model)
    if len(modules) != len(sketches):
        raise ValueError(f"sketches of {len(sketches)} layers do not fit a model of {len(modules)} layers with experts")
    layers = []
    for module, (_, sketch) in zip(modules, sorted(sketches.items()), strict=True):
        gate_up, down = module.gate_up_proj.data, module.down_proj.data
        copied = int4_gate(gate_up[:, : gate_up.shape[1] // 2]) if int4 else None
        layers.append(Layer(Experts(gate_up, down, module.act_fn), Screen(sketch.to(gate_up.device)), copied))
    return layers


@dataclass(frozen=True, slots=True)
class SparseInputs:
    """Inputs of every matrix by size, after TEAL, or by size times column length, after WINA, within a budget."""

    which: Inputs
    budget: float


@dataclass
class Reading:
    """What a reader does to the experts of a model while it is `on`, and what it has kept.

    reader: with a threshold, `thresholds` of the layers (`calibrated`). num_kept: channels that a token keeps, in place
    of those that the budget allows. num_ranks: of the experts, in contiguous shares, where each rank has its quota.
    batch_size: sequences whose t-th tokens are a batch, for readers that choose for batches; None for all of a pass.
    record: sees (layer, x, ids, kept) of every read.
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
        """Of each layer: tokens read, channels kept, the largest place in `allowed` of a token that the budget does not
        pay for, experts of all tokens, ranks of all tokens."""
        self.rank_of_expert = torch.arange(num_experts, device=device) // (num_experts // self.num_ranks)
        if isinstance(reader, SparseInputs):
            self.share = sparse_inputs_share(reader.budget, hidden, intermediate, reader.which)
            return
        if reader.fitted and self.thresholds is None:
            raise ValueError(f"{reader.name} needs thresholds: fit them on text with `calibrated`")
        sizes = self._sizes()
        # By the number of experts and of ranks of a token, or of a batch that chooses as one: place experts * (ranks in
        # all + 1) + ranks; -1 where the budget does not pay.
        fixed = self.num_kept
        places = ((experts, ranks) for experts in range(num_experts + 1) for ranks in range(self.num_ranks + 1))
        allowed = [self._allowed(sizes, *place) if fixed is None else fixed for place in places]
        self.allowed = torch.tensor(allowed, device=device)

    def _allowed(self, sizes: ReadBytes, num_experts: int, num_ranks: int) -> int:
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
        """x [T, H], ids and weights [T, k], tokens of sequences of `length` -> [T, H]."""
        layer, reader = self.layers[number], self.reader
        # A slot of no weight is no expert: fillers of router policies repeat one that is there.
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
        """The t-th tokens of `batch_size` sequences are a batch."""
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
        """scores [T, k, I] of a layer -> [T, k, I] bool."""
        assert not isinstance(self.reader, SparseInputs)
        if self.reader.fitted:
            assert self.thresholds is not None
            return keep_above(scores, self.thresholds[number]) & (ids >= 0)[..., None]
        num_experts = len(self.rank_of_expert)
        if batches is None:
            experts, ranks = (ids >= 0).sum(1), self.ranks_of(ids)
        else:
            found = torch.zeros(batches.total, num_experts + 1, dtype=torch.bool, device=ids.device)
            found[batches.of_token[:, None], torch.where(ids >= 0, ids, num_experts)] = True
            experts = found[:, :num_experts].sum(1)
            ranks = found[:, :num_experts].view(batches.total, self.num_ranks, -1).any(-1).sum(1)
        place = experts * (self.num_ranks + 1) + ranks
        allowed = self.allowed[place]
        self.counts[number, 2] = torch.maximum(self.counts[number, 2], torch.where(allowed < 0, place, 0).amax())
        allowed = allowed.clamp(min=0)
        if batches is not None:
            return keep_for_batch(scores, ids, num_experts, allowed, batches.of_token)
        if self.reader.quota in ("experts", "weights") and self.num_ranks > 1:
            by: ShareBy = "experts" if self.reader.quota == "experts" else "weights"
            quotas = rank_quotas(allowed, ids, weights, self.rank_of_expert, self.num_ranks, by)
            return keep_by_rank(scores, ids, quotas, self.rank_of_expert)
        return keep_top(scores, allowed)

    def ranks_of(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T, k] -> [T]: ranks that have an expert of the token."""
        found = torch.zeros(len(ids), self.num_ranks + 1, dtype=torch.bool, device=ids.device)
        rank = torch.where(ids >= 0, self.rank_of_expert[ids.clamp(min=0)], self.num_ranks)
        return found.scatter_(1, rank, torch.ones_like(rank, dtype=torch.bool))[:, : self.num_ranks].sum(1)

    def _count(self, number: int, x: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> None:
        self.counts[number, 0] += (ids >= 0).any(1).sum()
        self.counts[number, 1] += kept.sum()
        self.counts[number, 3] += (ids >= 0).sum()
        self.counts[number, 4] += self.ranks_of(ids).sum()
        if self.record is not None:
            self.record(number, x, ids, kept)

    def kept_channels(self) -> float:
        """Channels kept of a token in a layer, mean over all read so far."""
        return float(self.counts[:, 1].sum() / self.counts[:, 0].sum())

    def described(self) -> dict[str, float]:
        """kept_channels of a token in a layer, and share_read: what tokens alone read, on all ranks, over the bytes of
        their experts, both in the mean."""
        sizes, kept = self._sizes(), self.kept_channels()
        experts, ranks = (self.counts[:, 3:].sum(0) / self.counts[:, 0].sum()).tolist()
        skipped = experts * sizes.intermediate - kept
        read = experts * sizes.screen + kept * sizes.kept_channel + skipped * sizes.skipped_channel + ranks * sizes.once
        share = 1.0 if self.reader.budget >= 1 else read / (experts * sizes.expert)
        return {"kept_channels": kept, "share_read": share}

    @contextmanager
    def on(self, model: Any, whole_sequences: bool) -> Iterator[None]:
        """Inside, the model's experts are read so. whole_sequences: every token of a pass is one of a decode step;
        otherwise passes of several tokens a sequence (prefill) read all. Raises ValueError at the end where a token's
        budget did not pay for its screen."""
        with replaced(model, whole_sequences, self._output):
            yield
        if short := int(self.counts[:, 2].amax()):
            # Raises, and says how much it takes.
            self._sizes().kept(self.reader.budget, *divmod(short, self.num_ranks + 1))


@contextmanager
def replaced(model: Any, whole_sequences: bool, output: Any) -> Iterator[None]:
    """Inside, output(layer, x [T, H], ids [T, k], weights [T, k], length of sequences) -> [T, H] takes the place of the
    experts' forward."""
    modules = expert_modules(model)
    length = [1]

    def note_length(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise ValueError("a reader needs a model that is called with input_ids")
        length[0] = ids.shape[1]

    handle = model.register_forward_pre_hook(note_length, with_kwargs=True)
    for number, module in enumerate(modules):
        plain = module.forward

        def forward(
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
            number: int = number,
            plain: Any = plain,
        ) -> torch.Tensor:
            if length[0] > 1 and not whole_sequences:
                every: torch.Tensor = plain(hidden_states, top_k_index, top_k_weights)
                return every
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            own: torch.Tensor = output(number, x, top_k_index, top_k_weights, length[0])
            return own.to(hidden_states.dtype).view_as(hidden_states)

        module.forward = forward
    try:
        yield
    finally:
        handle.remove()
        for module in modules:
            del module.forward


def reads(reading: Reading | None, model: Any, whole_sequences: bool) -> AbstractContextManager[None]:
    """`Reading.on`, or nothing."""
    return nullcontext() if reading is None else reading.on(model, whole_sequences)


def reading_of(
    model: Any,
    reader: Reader,
    calibration: torch.Tensor,
    sketches: dict[int, LayerSketch] | None = None,
    num_ranks: int = 1,
) -> Reading:
    """What a stack's reader does to a model. calibration [sequences, length]: text that a threshold is fitted on.
    sketches: of the model, None to build them. num_ranks: for a quota of ranks."""
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
    """{budget: thresholds of the layers} at which the plain model's tokens of text [sequences, length] keep on average
    as many channels as `topk-channels` of that budget would."""
    sketch = layers[0].screen.sketch
    found: dict[float, list[float]] = {budget: [] for budget in budgets}

    def watch(number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, length: int) -> torch.Tensor:
        layer = layers[number]
        scores = layer.scores(reader, ids, weights, layer.estimates(reader, x, ids)).flatten()
        numbers = []
        for budget in budgets:
            sizes = replace(reader, budget=budget).sizes(sketch.hidden, sketch.intermediate, rank=sketch.rank)
            numbers.append(len(x) * sizes.kept(budget, ids.shape[1]))
        best = scores.topk(min(max(numbers) + 1, len(scores))).values
        for budget, count in zip(budgets, numbers, strict=True):
            # Scores are not below 0.
            found[budget].append(float(best[count]) if count < len(scores) else -1.0)
        kept = torch.ones(*ids.shape, sketch.intermediate, dtype=torch.bool, device=ids.device)
        return read_output(x, ids, weights, layer.experts, kept)

    with replaced(model, True, watch):
        model(input_ids=text.to(model.device), use_cache=False, logits_to_keep=1)
    return found
