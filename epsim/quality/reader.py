"""Applies a channel reader to a live model: it replaces the routed experts' forward, after any router policy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
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
from epsim.quality.hook import before_passes

Record: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


def expert_modules(model: Any) -> list[Any]:
    """The modules that hold the routed experts of each layer, in order. Raises ValueError if there are none."""
    wanted = ("gate_up_proj", "down_proj", "act_fn")
    found = [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]
    found = [module for module in found if getattr(module.gate_up_proj, "ndim", 0) == 3]
    if not found:
        raise ValueError("a channel reader needs a model whose experts hold gate_up_proj [E, 2I, H] and down_proj")
    return found


def build_sketches(model: Any, seed: int = 0) -> dict[int, LayerSketch]:
    """Builds the sketches of a model in memory, on its device, by index among its layers with experts."""
    modules = expert_modules(model)
    return {i: build_named(i, m.gate_up_proj.data, m.down_proj.data, seed, 32) for i, m in enumerate(modules)}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's experts, its decoded sketch, and what scores need of both, all on the model's device."""

    experts: Experts
    screen: Screen
    int4: torch.Tensor | None = None

    @property
    def norms(self) -> torch.Tensor:
        return self.screen.sketch.norms

    def estimates(
        self, reader: Channels, x: torch.Tensor, ids: torch.Tensor, batches: Batches | None = None
    ) -> torch.Tensor:
        """The activations that the reader estimates and chooses by, [T, k, I] float32."""
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
        """The scores of channels, [T, k, I] float32; -1 in an empty slot."""
        if reader.units == "output":
            scores = output_scores(weights, self.norms[ids.clamp(min=0)], estimates)
        else:
            scores = estimates.abs()
        return scores.masked_fill((ids < 0)[..., None], -1.0)


def layers_of(model: Any, sketches: dict[int, LayerSketch], int4: bool = False) -> list[Layer]:
    """The layers with experts, as `Reading` needs them. int4: also make int4 copies of the gate rows."""
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
    """Reads the largest inputs of each matrix within a budget: by size (TEAL), or size times column length (WINA)."""

    which: Inputs
    budget: float


@dataclass
class Reading:
    """Applies a reader to the experts of a model while it is `on`, and counts what it keeps.

    reader: the policy. thresholds: one per layer, for a reader with a threshold (`calibrated`). num_kept: channels that
    a token keeps, instead of what the budget allows. num_ranks: ranks that hold the experts in contiguous shares, if
    each has a quota. batch_size: sequences whose t-th tokens are a batch, for readers that choose per batch; None for
    all of a pass. record: is called with (layer, x, ids, kept) of every read.
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
        """For each layer: tokens read, channels kept, the largest index into `allowed` of a token whose screen exceeds
        its budget, experts of all tokens, ranks of all tokens."""
        self.rank_of_expert = torch.arange(num_experts, device=device) // (num_experts // self.num_ranks)
        if isinstance(reader, SparseInputs):
            self.share = sparse_inputs_share(reader.budget, hidden, intermediate, reader.which)
            return
        if reader.fitted and self.thresholds is None:
            raise ValueError(f"{reader.name} needs thresholds: calibrate them on text with `calibrated`")
        sizes = self._sizes()
        # The channels allowed for a token, or a batch that chooses as one: index experts * (number of ranks + 1) + its
        # ranks; -1 where the screen exceeds the budget.
        places = product(range(num_experts + 1), range(self.num_ranks + 1))
        self.allowed = torch.tensor([self._allowed(sizes, *place) for place in places], device=device)

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
        """The output [T, H] for x [T, H], ids and weights [T, k]: tokens of sequences of `length`."""
        layer, reader = self.layers[number], self.reader
        # Slots of weight 0 are ignored: router policies fill rows by repeating an expert.
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
        """Batches of tokens: the t-th tokens of `batch_size` sequences."""
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
        """The channels to keep, [T, k, I] bool, by the scores [T, k, I] of a layer."""
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
        """The number of ranks that have an expert of each token, [T], for ids [T, k]."""
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
        """Channels kept per token and layer, mean over all reads so far."""
        return float(self.counts[:, 1].sum() / self.counts[:, 0].sum())

    def described(self) -> dict[str, float]:
        """kept_channels per token and layer, and share_read: the bytes that a token reads by itself on all ranks, over
        the bytes of its experts. Both are means."""
        sizes, kept = self._sizes(), self.kept_channels()
        experts, ranks = (self.counts[:, 3:].sum(0) / self.counts[:, 0].sum()).tolist()
        skipped = experts * sizes.intermediate - kept
        read = experts * sizes.screen + kept * sizes.kept_channel + skipped * sizes.skipped_channel + ranks * sizes.once
        share = 1.0 if self.reader.budget >= 1 else read / (experts * sizes.expert)
        return {"kept_channels": kept, "share_read": share}

    @contextmanager
    def recording(self, model: Any, record: Record) -> Iterator[None]:
        """`on` for whole sequences, with another `record`."""
        before, self.record = self.record, record
        with self.on(model, whole_sequences=True):
            yield
        self.record = before

    @contextmanager
    def on(self, model: Any, whole_sequences: bool) -> Iterator[None]:
        """Inside the `with`, the model's experts are read by this reader. whole_sequences: every token of a pass counts
        as a decode token; otherwise passes with several tokens per sequence (prefill) read all. Raises ValueError at
        the end if a token's screen exceeded its budget."""
        with replaced(model, whole_sequences, self._output):
            yield
        if short := int(self.counts[:, 2].amax()):
            # Raises ValueError, which says how much budget the screen takes.
            self._sizes().kept(self.reader.budget, *divmod(short, self.num_ranks + 1))


@contextmanager
def replaced(model: Any, whole_sequences: bool, output: Any) -> Iterator[None]:
    """Inside the `with`, output(layer, x [T, H], ids [T, k], weights [T, k], length of sequences) -> [T, H] replaces
    the experts' forward."""
    modules = expert_modules(model)
    length = [1]

    def note_length(ids: torch.Tensor) -> None:
        length[0] = ids.shape[1]

    handle = before_passes(model, "a reader", note_length)
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
    """`Reading.on`, or a context that does nothing."""
    return nullcontext() if reading is None else reading.on(model, whole_sequences)


def reading_of(
    model: Any,
    reader: Reader,
    calibration: torch.Tensor,
    sketches: dict[int, LayerSketch] | None = None,
    num_ranks: int = 1,
) -> Reading:
    """The `Reading` of a stack's reader for a model. calibration [sequences, length]: text to calibrate a threshold on.
    sketches: of the model, None to build them. num_ranks: for quotas per rank."""
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
    """{budget: thresholds of the layers} at which the plain model keeps, on average over the tokens of text
    [sequences, length], as many channels as `topk-channels` with that budget."""
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
            # Scores are >= 0.
            found[budget].append(float(best[count]) if count < len(scores) else -1.0)
        kept = torch.ones(*ids.shape, sketch.intermediate, dtype=torch.bool, device=ids.device)
        return read_output(x, ids, weights, layer.experts, kept)

    with replaced(model, True, watch):
        model(input_ids=text.to(model.device), use_cache=False, logits_to_keep=1)
    return found
