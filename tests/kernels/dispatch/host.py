"""Runs the dispatch kernels on the host (grid.h), and the policies on the same tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.kernels.dispatch import Dispatcher, Rule
from epsim.kernels.dispatch import cuda as dispatch_cuda
from epsim.kernels.dispatch.cuda import ARGUMENTS, Sizes
from epsim.kernels.split import prepare, solve, solve_gathered
from epsim.placement.base import Placement
from epsim.policies.apply import BoundStack, Setting, bind
from epsim.policies.base import Batch, SharedWork, local_index
from epsim.policies.nearest import nearest_slots
from epsim.policies.rounding import fixed_point
from epsim.policies.stack import parse_stack
from tests.kernels.compiled import compiled

STACKS = (
    "lplb",
    "lplb(counts=gathered)",
    "even",
    "static",
    "random",
    "lplb-sampled",
    "lplb+waterfill",
    "lplb+waterfill(candidates=all,load=routed+local)",
    "lplb+waterfill(load=routed+local,counts=local)",
    "lplb(counts=gathered)+waterfill(load=routed+local)",
    "lplb(counts=gathered)+waterfill(candidates=all,counts=local)",
    "even+waterfill(candidates=all,counts=local)",
    "static+waterfill",
    "static+waterfill(candidates=all,load=routed+local,counts=local)",
)
SMALL = Sizes(threads=64, count_threads=64, count_blocks=4, items=2, sources=2, most_blocks=3)


def build(factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source, kernels = dispatch_cuda.source(), Path(dispatch_cuda.__file__).parents[1]
    for on_device in ("dispatch/cluster.cuh", "split/device.cuh"):
        source = source.replace((kernels / on_device).read_text(), "")
    return compiled(
        factory,
        source,
        Path(__file__).with_name("grid.h"),
        [f"-D{name}={value}" for name, value in SMALL.definitions.items()],
    )


class HostDispatcher(Dispatcher):
    """A Dispatcher whose launches run on the host."""

    def __init__(self, library: ctypes.CDLL, descending: bool, *args: Any, **kwargs: Any) -> None:
        self.library, self.descending = library, descending
        super().__init__(*args, device=torch.device("cpu"), sizes=SMALL, **kwargs)

    def _compile(self) -> None:
        assert self.library.bytes_of_arguments() == ARGUMENTS.itemsize

    def _launch(self, name: str, grid: tuple[int, ...], early: bool = False) -> None:
        assert self._shared_bytes(name) <= 1 << 17
        across, down = (*grid, 1)[:2]
        place = ctypes.c_void_p(self._arguments.ctypes.data)
        line = self.library.run_on_host(
            name.encode(), across, down, self.sizes.threads_of(name), place, int(self.descending)
        )
        assert line == 0, f"{name}: threads part at line {line}"

    def _solve(self, loads: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        if not self.rule.gathered:
            return solve(self.structure, loads, layer).split
        counts = torch.zeros(self.structure.num_layers, self.structure.num_experts, dtype=torch.int64)
        counts[layer] = loads
        return solve_gathered(self.structure, counts).split[layer]


def bound_stack(text: str, placement: Placement, top_k: int, cost: float, seed: int) -> BoundStack:
    layers = tuple(3 + 2 * layer for layer in range(placement.num_layers))
    return bind(parse_stack(text), placement, Setting(seed, cost, top_k, layers))


def arguments_of(bound: BoundStack, rank: int, max_tokens: int) -> tuple[tuple[Any, Rule], dict[str, Any]]:
    """The arguments of a Dispatcher for a rank, except the device."""
    placement, setting = bound.copies.placement, bound.setting
    structure = prepare(placement.physical_to_logical.cpu(), placement.num_ranks, placement.num_experts)
    rule = Rule.of(bound.split, bound.stack.shared, setting.shared_cost, setting.seed)
    keywords = {
        "rank": rank,
        "node_of_rank": placement.node_of_rank,
        "layers": setting.layers,
        "top_k": setting.top_k,
        "max_tokens": max_tokens,
        "nearest": nearest_slots(bound.copies) if rule.follow == "nearest" else None,
    }
    return (structure, rule), keywords


def expected(bound: BoundStack, ids: list[torch.Tensor], step: int) -> tuple[list[Any], list[Any]]:
    """ids: of each source rank [N_r, L, k] -> by rank the policies' physical experts [N_r, L, k], and ranks of the
    shared expert [N_r, L] (None without one)."""
    copies, setting = bound.copies, bound.setting
    sizes = [len(part) for part in ids]
    source = torch.arange(len(ids)).repeat_interleave(torch.tensor(sizes))
    token_step = torch.zeros_like(source)
    batch = Batch(
        torch.tensor([step]),
        torch.tensor(setting.layers),
        token_step,
        source,
        torch.cat(ids),
        local_index(token_step, source),
    )
    counts = bound._by_source(batch, batch.expert_ids, copies.placement.num_experts)
    fixed = fixed_point(bound.split.fractions(counts.sum(2), copies), copies)
    physical = bound.split.physical_ids(batch, counts, fixed, copies, setting.seed)
    shared: list[Any] = [None] * len(ids)
    if bound.has_shared:
        by_source = copies.per_rank(bound._by_source(batch, physical, copies.placement.num_physical))
        work = SharedWork(
            cost=setting.shared_cost,
            seed=setting.seed,
            top_k=setting.top_k,
            most_experts=bound.most_experts,
            steps=batch.steps,
            layers=batch.layers,
            routed=by_source.sum(2),
            routed_by_source=by_source,
            tokens=bound._tokens(counts, batch),
            node_of_rank=copies.node_of_rank,
            batch=batch,
            expert_ranks=bound._ranks(physical),
        )
        shared = list(torch.split(bound.stack.shared.token_ranks(work), sizes))
    return list(torch.split(physical, sizes)), shared


def found_on(
    dispatchers: list[Dispatcher], ids: list[torch.Tensor], layer: int, step: int, ranks: Iterable[int]
) -> dict[int, Any]:
    """Some ranks' `Assigned` of one layer (cloned); the collective is done here. ids: [N_r, k] of each rank."""
    for dispatcher in dispatchers:
        dispatcher.step.fill_(step)
    counted = [dispatcher.count(part).clone() for dispatcher, part in zip(dispatchers, ids)]
    rows = torch.stack(counted)
    collective = dispatchers[0].rule.collective
    found = {}
    for rank in ranks:
        dispatcher, own = dispatchers[rank], counted[rank]
        counts = {"none": own, "all_reduce": rows.sum(0), "all_gather": rows}[collective]
        assigned = dispatcher.assign(layer, counts)
        shared = None if assigned.shared_rank is None else assigned.shared_rank.clone()
        found[rank] = (assigned.physical.clone(), shared, assigned.slots.clone())
    return found


def check(
    bound: BoundStack,
    dispatchers: list[Dispatcher],
    ids: list[torch.Tensor],
    step: int,
    ranks: Iterable[int] | None = None,
) -> None:
    """Compares the tokens of all or some ranks with the policies, in every layer."""
    ranks = range(len(dispatchers)) if ranks is None else ranks
    placement = bound.copies.placement
    physical, shared = expected(bound, [part.cpu() for part in ids], step)
    for layer in range(placement.num_layers):
        found = found_on(dispatchers, [part[:, layer].contiguous() for part in ids], layer, step, ranks)
        for rank, (slots, shared_rank, numbered) in found.items():
            want = physical[rank][:, layer]
            assert torch.equal(slots.cpu(), want), f"layer {layer}, rank {rank}"
            if shared[rank] is None:
                assert shared_rank is None
                continue
            on = shared[rank][:, layer]
            assert torch.equal(shared_rank.cpu(), on), f"layer {layer}, rank {rank}, shared"
            width = placement.slots_per_rank
            routed = torch.where(want >= 0, want + want // width, -1)
            last = torch.where(on >= 0, on * (width + 1) + width, -1)
            assert torch.equal(numbered.cpu(), torch.cat((routed, last[:, None]), 1))


def ordinals(dispatcher: Dispatcher, ids: torch.Tensor) -> torch.Tensor:
    """Of ids [N, k] that were just counted: each one's index among its equals, -1 for empty slots, [N * k]."""
    words = dispatcher._words.flatten()[: ids.numel()].cpu().to(torch.int64) & 0xFFFFFFFF
    there = words != 0xFFFFFFFF
    assert torch.equal(torch.where(there, words >> 22, -1), ids.flatten())
    return torch.where(there, words & (1 << 22) - 1, -1)


def random_ids(
    rng: np.random.Generator, tokens: list[int], layers: int, experts: int, top_k: int, blanks: float
) -> list[torch.Tensor]:
    """[N_r, L, k] of each rank: distinct experts of skewed popularity; a part of the slots empty, and of the tokens."""
    found = []
    popularity = 2 * rng.gumbel(size=(layers, experts))
    for num in tokens:
        keys = popularity + rng.gumbel(size=(num, layers, experts))
        ids = np.argsort(-keys, axis=2)[:, :, :top_k]
        ids = np.where(rng.random(ids.shape) < blanks, -1, ids)
        ids = np.where(rng.random((num, layers, 1)) < blanks / 2, -1, ids)
        found.append(torch.from_numpy(ids))
    return found
