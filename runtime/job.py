"""The loop of one rank of a job: it runs its share of a trace's tokens, step by step, through several policy stacks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from epsim.models.shapes import LayerShape
from epsim.placement.base import Placement, node_of_rank
from epsim.policies.apply import Setting
from epsim.policies.routing.block import ROUTED_ANEW, scores_by_expert
from epsim.policies.stack import PolicyStack
from epsim.runtime.faults import Watch
from epsim.runtime.layer import ExpertParallelMoE, LayerRecord, build_layer
from epsim.runtime.phases import LAYER_PHASES, PhaseClock
from epsim.runtime.seeds import generator
from epsim.runtime.telemetry import COUNTS, TelemetryWriter
from epsim.runtime.trial import Trial
from epsim.traces.trace import Array, Phase, TokenBlock


@dataclass(frozen=True, slots=True)
class JobStack:
    """A policy stack of a job. placement: of all layers. notes: what a reader of the results should know about it."""

    name: str
    stack: PolicyStack
    placement: Placement
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """The job that every rank runs.

    layers: the model's layer numbers. blocks(first): the steps to run, from index `first` of num_steps, with the source
    ranks of the job. max_tokens: the most tokens of a rank in a step. num_nodes: for the remote shares. phase,
    num_scores: of the trace, for router policies.
    """

    shape: LayerShape
    layers: tuple[int, ...]
    stacks: tuple[JobStack, ...]
    blocks: Callable[[int], Iterator[TokenBlock]]
    num_steps: int
    max_tokens: int
    seed: int
    exchange: str
    num_nodes: int
    phase: Phase = "unknown"
    num_scores: int = 0

    @property
    def setting(self) -> Setting:
        """The setting of the stacks, as in a replay."""
        shape = self.shape
        return Setting(
            seed=self.seed,
            shared_cost=shape.shared_cost,
            top_k=shape.top_k,
            layers=self.layers,
            phase=self.phase,
            num_scores=self.num_scores,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """This rank's tokens of one step, on its device.

    ids [T, L, k] int64: the recorded experts. scores [T, L, E] float32: the recorded scores, None if no router policy
    of the job needs them. decode [T] bool: tokens that such a policy may reroute. phase: of the step.
    """

    ids: torch.Tensor
    scores: torch.Tensor | None
    decode: torch.Tensor
    phase: Phase


@dataclass(frozen=True, slots=True)
class Place:
    """The rank, group and device of this process. group: None for a job of one process without torch.distributed."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    device: torch.device
    dtype: torch.dtype


class Model(Protocol):
    """Runs a step of this rank's tokens through all layers under one stack. text: a description of its input."""

    layers: list[list[ExpertParallelMoE]]
    """[stack][layer]."""
    text: str

    def begin(self, step: int, tokens: Tokens) -> None:
        """Prepares a step once for all stacks. Collective, not timed."""
        ...

    def run(self, stack: int, step: int, tokens: Tokens, poison: bool) -> None:
        """Runs the step under a stack. poison: set hidden states to NaN (an injected fault)."""
        ...


class RandomLayers:
    """Layers with random weights; all take the same random hidden states, and the recorded experts replace the choice.

    Weights depend only on layer and logical expert, so every stack computes the same outputs.
    """

    text = "random hidden states"

    def __init__(self, job: Job, place: Place, clock: PhaseClock) -> None:
        self.layers = build_layers(job, place, clock)
        drawn = generator(torch.device("cpu"), "hidden", job.seed, place.rank)
        hidden = torch.randn(max(job.max_tokens, 1), job.shape.hidden, generator=drawn)
        self._hidden = hidden.to(place.device, place.dtype)

    def begin(self, step: int, tokens: Tokens) -> None:
        """Nothing."""

    def run(self, stack: int, step: int, tokens: Tokens, poison: bool) -> None:
        hidden = self._hidden[: len(tokens.ids)]
        if poison:
            hidden = torch.full_like(hidden, torch.nan)
        for number, layer in enumerate(self.layers[stack]):
            scores = None
            if tokens.scores is not None and layer.balancer.bound.stack.router.acts:
                scores = tokens.scores[:, number]
            ids = tokens.ids[:, number]
            layer(hidden, step=step, forced_ids=ids, forced_scores=scores, decode=tokens.decode)


def build_layers(job: Job, place: Place, clock: PhaseClock, model: Any = None) -> list[list[ExpertParallelMoE]]:
    """The expert-parallel layers, [stack][layer]. model: `ModelWeights`, or None for random weights. Collective."""
    exchanges: dict[int, Any] = {}  # by the number of slots of a rank
    collective: Any = "auto"
    built = []
    for of_job in job.stacks:
        layers = []
        for number, layer in enumerate(job.layers):
            slots = of_job.placement.physical_to_logical[number : number + 1]
            placement = replace(of_job.placement, physical_to_logical=slots)
            per_rank = placement.slots_per_rank
            built_layer = build_layer(
                job.shape,
                of_job.stack,
                placement,
                layer=layer,
                seed=job.seed,
                group=place.group,
                device=place.device,
                dtype=place.dtype,
                exchange=exchanges.get(per_rank, job.exchange),
                max_tokens=max(job.max_tokens, 1),
                weights=model,
                router=None if model is None else model.router(layer, place.device, place.dtype),
                clock=clock,
                collective=collective,
            )
            exchanges[per_rank], collective = built_layer.exchange, built_layer.balancer.collective
            layers.append(built_layer)
        built.append(layers)
    return built


def run_job(
    job: Job,
    place: Place,
    model: Model,
    clock: PhaseClock,
    watch: Watch,
    telemetry: TelemetryWriter,
    *,
    first: int = 0,
    trial: Trial | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> None:
    """Runs the steps from index `first`. In each step the stacks take turns, and each step begins with the next stack,
    so that a drift of the machine affects all equally. The first step also runs once before, untimed, to warm up.
    Collective.

    Raises PhaseError if scores are NaN or infinite, and OSError if telemetry cannot be written.
    """
    watch.layer_index = {layer: number for number, layer in enumerate(job.layers)}
    nodes = node_of_rank(place.num_ranks, job.num_nodes).to(place.device)
    rows = _Rows(place, nodes)
    num_stacks = len(job.stacks)
    done = first
    for block in job.blocks(first):
        for number, step in enumerate(block.steps.tolist()):
            tokens = tokens_of(block, number, job, place)
            hit = trial is not None and (trial.rank, trial.step) == (place.rank, step)
            if hit and trial is not None and trial.kind == "short":
                return
            model.begin(step, tokens)
            if watch.turn < 0:
                for stack in range(num_stacks):
                    model.run(stack, step, tokens, False)
                clock.times()
                watch.turn = done * num_stacks
            for turn in range(num_stacks):
                stack = (done + turn) % num_stacks
                model.run(stack, step, tokens, hit and trial is not None and trial.kind == "nan")
                for layer in model.layers[stack]:
                    layer.raise_if_bad()
                times = clock.times()
                for layer in model.layers[stack]:
                    assert layer.record is not None
                    rows.add(stack, layer.record, job.stacks[stack].placement.slots_per_rank, times)
                watch.turn += 1
            clock.enter("telemetry", step, -1)
            telemetry.append(rows.take())
            clock.enter("idle")
            clock.times()
            done += 1
            progress(1)


def tokens_of(block: TokenBlock, number: int, job: Job, place: Place) -> Tokens:
    """This rank's tokens of the block's step with index `number`."""
    mine = np.flatnonzero((block.token_step == number) & (block.source_rank == place.rank))
    # Contiguous per layer.
    by_layer = np.ascontiguousarray(block.expert_ids[mine].transpose(1, 0, 2), dtype=np.int64)
    ids = torch.from_numpy(by_layer).to(place.device).transpose(0, 1)
    phase = job.phase if block.phase is None else block.phase[number]
    anew = block.phase is None or phase in ROUTED_ANEW
    scores = None
    if anew and block.scores is not None:
        scores = scores_by_expert(block, mine, job.shape.num_experts).to(place.device)
    return Tokens(ids, scores, torch.full((len(mine),), anew, device=place.device), phase)


class _Rows:
    """The telemetry of one step; counts are copied from the device in one transfer."""

    def __init__(self, place: Place, node_of_rank: torch.Tensor) -> None:
        self._place, self._nodes = place, node_of_rank
        self._heads: list[tuple[int, int, int]] = []
        self._counts: list[torch.Tensor] = []
        self._times: list[list[float]] = []

    def add(
        self, stack: int, record: LayerRecord, slots_per_rank: int, times: dict[tuple[int, int, str], float]
    ) -> None:
        self._heads.append((record.step, stack, record.layer))
        self._counts.append(count_row(record, self._place.rank, self._nodes, slots_per_rank))
        self._times.append([times.get((record.step, record.layer, phase), 0.0) for phase in LAYER_PHASES])

    def take(self) -> dict[str, Sequence[Any] | Array]:
        counts = torch.stack(self._counts).cpu().numpy()
        heads = np.array(self._heads, dtype=np.int64)
        times = np.array(self._times)
        columns: dict[str, Sequence[Any] | Array] = {"step": heads[:, 0]}
        columns |= {"stack": heads[:, 1].astype(np.int16), "layer": heads[:, 2].astype(np.int32)}
        columns |= {name: counts[:, number] for number, name in enumerate(COUNTS)}
        columns["rank"] = np.full(len(heads), self._place.rank, dtype=np.int32)
        columns["rows_to"] = counts[:, len(COUNTS) :].astype(np.int32)
        columns |= {f"{phase}_us": times[:, number] for number, phase in enumerate(LAYER_PHASES)}
        self._heads, self._counts, self._times = [], [], []
        return columns


def count_row(record: LayerRecord, rank: int, node_of_rank: torch.Tensor, slots_per_rank: int) -> torch.Tensor:
    """The counts of telemetry in order, then rows_to: [len(COUNTS) + R] int64 on the record's device."""
    num_ranks = len(node_of_rank)
    served = torch.where(record.physical >= 0, record.physical // slots_per_rank, num_ranks)
    shared = record.shared_rank
    shared = torch.full_like(served[:, 0], num_ranks) if shared is None else torch.where(shared >= 0, shared, num_ranks)
    nodes = torch.cat([node_of_rank, node_of_rank.new_full((1,), -1)])

    def leaving(ranks: torch.Tensor, by_node: bool) -> torch.Tensor:
        away = nodes[ranks] != node_of_rank[rank] if by_node else ranks != rank
        return ((ranks < num_ranks) & away).sum()

    sent = torch.zeros(len(served), num_ranks + 1, dtype=torch.bool, device=served.device)
    sent.scatter_(1, torch.cat([served, shared[:, None]], 1), True)
    values = [
        torch.full((), len(served), device=served.device),
        (record.ids >= 0).sum(),
        record.received.sum(),
        record.received_shared.reshape(()),
        (record.received > 0).sum(),
        leaving(served, False),
        leaving(served, True),
        leaving(shared, False),
        leaving(shared, True),
    ]
    return torch.cat([torch.stack(values), sent[:, :num_ranks].sum(0)])
