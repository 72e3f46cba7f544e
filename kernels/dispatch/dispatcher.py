"""The dispatch of one source rank: tables of a placement, buffers, and the order of kernel launches."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epsim.kernels.dispatch import cuda
from epsim.kernels.dispatch.cuda import ARGUMENTS, Sizes, first_link
from epsim.kernels.dispatch.rule import Rule, SharedRule, SplitRule
from epsim.kernels.split import SplitStructure
from epsim.kernels.split import cuda as split_cuda
from epsim.kernels.split.launch import launch
from epsim.kernels.split.solver import EXACT, MAX_SWEEPS


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """The result of `Dispatcher.assign` for N tokens. The next `assign` overwrites it.

    physical [N, k] int64: physical experts, numbered as in the placement; -1 for none.
    shared_rank [N] int64: the rank that serves a token's shared expert, -1 for a token without experts; None if the
    model has no shared expert.
    slots [N, k + 1] int64: physical experts and, in column k, the shared expert. Here each rank has one more slot, the
    last one, for the shared expert. Equal to `physical` if the model has no shared expert.
    """

    physical: torch.Tensor
    shared_rank: torch.Tensor | None
    slots: torch.Tensor


class Dispatcher:
    """Maps a source rank's top-k ids to physical experts, for all layers of a placement.

        counts = dispatcher.count(ids)
        # The caller now runs dispatcher.rule.collective, which sums counts over ranks or gathers them to [R, E + 1].
        assigned = dispatcher.assign(layer, counts)

    Both calls run on PyTorch's current stream, allocate nothing and do not wait for the device. They can be captured in
    a CUDA graph for a fixed number of tokens. Random draws depend on the step number, `step` [1] int64 on the device.
    The caller writes it before each step and before each replay of a graph.
    The results are the same integers as those of epsim.policies for the tokens of this rank.
    """

    def __init__(
        self,
        structure: SplitStructure,
        rule: Rule,
        *,
        rank: int,
        node_of_rank: torch.Tensor,
        layers: tuple[int, ...],
        top_k: int,
        max_tokens: int,
        device: torch.device,
        nearest: torch.Tensor | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """Compiles the kernels.

        node_of_rank [R]: the node of each rank, ascending. layers: the model's layer numbers. max_tokens: the most
        tokens of any rank in a step. nearest [L, R, E] int64: for the split `static`, the slot that serves an expert's
        tokens of each source rank. Raises ValueError if `Rule.uncovered` returns a reason, or if sizes are too large.
        """
        num_ranks, num_experts, num_slots = structure.num_ranks, structure.num_experts, structure.num_physical
        slots = structure.physical_to_logical
        ordered = slots.sort(1).values
        if not bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any()):
            rule = replace(rule, split=SplitRule())  # no expert has several copies, as in BoundStack.split
        reason = rule.uncovered()
        if reason:
            raise ValueError(reason)
        limits = cuda.MOST_EXPERTS, cuda.MOST_SLOTS, cuda.MOST_ASSIGNMENTS
        if any(size > most for size, most in zip((num_experts, num_slots, max_tokens * top_k), limits)):
            raise ValueError(
                f"{num_experts} experts, {num_slots} slots and {max_tokens} tokens of top-{top_k} are more than the "
                f"kernels take: {limits[0]}, {limits[1]} and {limits[2]} assignments"
            )
        if not 0 <= rank < num_ranks or node_of_rank.shape != (num_ranks,) or len(layers) != structure.num_layers:
            raise ValueError(
                f"rank {rank}, nodes of {node_of_rank.numel()} ranks and {len(layers)} layers do not fit "
                f"a placement of {num_ranks} ranks and {structure.num_layers} layers"
            )
        if max_tokens * top_k * num_ranks >= 1 << 31:
            raise ValueError(f"{num_ranks} ranks of {max_tokens} tokens of top-{top_k} are 2^31 assignments or more")
        if rule.follow == "nearest" and nearest is None:
            raise ValueError(f"split {rule.names[0]} needs the table of nearest slots")
        self.structure, self.rule, self.rank, self.device = structure, rule, rank, device
        self.top_k, self.max_tokens = top_k, max_tokens
        self.sizes = sizes or Sizes(items=8 if max_tokens * top_k <= 1 << 16 else 16)
        if not 1 <= top_k <= self.sizes.threads:
            raise ValueError(f"top-{top_k}: the kernels take 1 to {self.sizes.threads}")

        # Empty slots come last, each as an expert with 0 copies.
        expert_of_slot = torch.where(slots < 0, num_experts, slots)
        order = expert_of_slot.argsort(dim=1, stable=True)
        expert = expert_of_slot.gather(1, order)
        first = torch.searchsorted(expert, torch.arange(num_experts + 1).expand(len(slots), -1).contiguous())
        index = torch.arange(num_slots) - first.gather(1, expert)
        number = torch.nn.functional.pad(first.diff(dim=1), (0, 1)).gather(1, expert)
        nodes = node_of_rank.cpu()
        node = torch.stack((torch.searchsorted(nodes, nodes), torch.searchsorted(nodes, nodes, right=True)))
        tables = {"first": first, "copies": torch.stack((order, expert % num_experts, index, number), -1)}
        if nearest is not None:
            tables["nearest"] = nearest
        self._tables = {name: self._table(table) for name, table in tables.items()}
        self._addresses = {name: [part.data_ptr() for part in table] for name, table in self._tables.items()}
        self._node = self._table(node)

        def empty(*shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.step, self._counts, self._rank_counts, self._loads = empty(1), *(empty(num_experts + 1) for _ in range(3))
        self._words = empty(max_tokens, top_k, kind=torch.int32)
        self._ends, self._routed = empty(num_slots, kind=torch.int32), empty(num_ranks)
        self._physical, self._shared_rank = empty(max_tokens, top_k), empty(max_tokens)
        self._slots_out = empty(max_tokens, top_k + 1)
        self._layer = torch.arange(structure.num_layers, device=device)
        self._tokens = 0
        self._arguments = self._fixed_arguments()
        self._layer_keys = [first_link(number) for number in layers]
        self._compile()

    def count(self, ids: torch.Tensor) -> torch.Tensor:
        """The number of tokens of each expert, then the number of tokens with any expert, [E + 1] int64.

        ids [N, k] int64: logical experts, -1 for none. The caller may change the result; the next call does."""
        fits = ids.shape == (len(ids), self.top_k) and len(ids) <= self.max_tokens
        if not fits or not self._takes(ids):
            expected = f"[at most {self.max_tokens}, {self.top_k}] int64, contiguous, on {self._counts.device}"
            raise ValueError(f"ids are {list(ids.shape)} {ids.dtype} on {ids.device}, not {expected}")
        self._tokens = len(ids)
        self._arguments["ids"], self._arguments["tokens"] = ids.data_ptr(), len(ids)
        self._launch("count", (self.sizes.count_blocks,))
        return self._counts

    def assign(self, layer: int, counts: torch.Tensor) -> Assigned:
        """The physical experts of the tokens of the last `count`.

        layer: its index in the placement. counts: the result of `count` after the rule's collective, [E + 1] int64, or
        [R, E + 1] if all ranks' counts were gathered.
        """
        rule, structure, arguments = self.rule, self.structure, self._arguments
        width, gathers = structure.num_experts + 1, rule.collective == "all_gather"
        expected = (structure.num_ranks, width) if gathers else (width,)
        if counts.shape != expected or not self._takes(counts):
            wanted = f"{list(expected)} int64, contiguous, on {self._counts.device}"
            raise ValueError(f"counts are {list(counts.shape)} {counts.dtype} on {counts.device}, not {wanted}")
        if not 0 <= layer < structure.num_layers:
            raise ValueError(f"layer {layer} is outside 0..{structure.num_layers - 1}")
        loads = self._loads if gathers else counts
        arguments["rows"] = counts.data_ptr() if gathers else 0
        arguments["loads"], arguments["layer_key"] = loads.data_ptr(), self._layer_keys[layer]
        for name, addresses in self._addresses.items():
            arguments[name] = addresses[layer]
        if gathers:
            self._launch("total", (-(-width // 32),))
        split = None
        if rule.solves:
            split = self._solve(loads[None, : structure.num_experts], self._layer[layer : layer + 1])
        arguments["split"] = 0 if split is None else split.data_ptr()
        # The next kernel may begin before the split ends: before it waits, it reads only results of `count`.
        if rule.gathered:
            self._launch("quotas", (-(-structure.num_experts // (self.sizes.threads // 32)),), early=True)
        elif rule.sees_all_ranks:
            across = -(-structure.num_physical // self.sizes.threads)
            self._launch("serve", (across, -(-structure.num_ranks // self.sizes.sources)), early=rule.solves)
        if self._tokens:
            blocks = -(-self._tokens // (self.sizes.threads // self.top_k))
            self._launch("assign", (min(blocks, self.sizes.most_blocks),), early=rule.solves or rule.sees_all_ranks)
        physical = self._physical[: self._tokens]
        if rule.shared == SharedRule("none"):
            return Assigned(physical, None, physical)
        return Assigned(physical, self._shared_rank[: self._tokens], self._slots_out[: self._tokens])

    def _takes(self, given: torch.Tensor) -> bool:
        """Whether the kernels can read the tensor. They get only its address, so they cannot check it."""
        return given.dtype == torch.int64 and given.is_contiguous() and given.device == self._counts.device

    def _solve(self, loads: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """loads [1, E], layer [1] -> split [1, P]."""
        whole = self.rule.gathered
        tol = 0.0 if whole else 1e-4
        limits = MAX_SWEEPS, EXACT
        return split_cuda.solve(self.structure, loads, layer, tol, None, *limits, whole, True, self._solved).split

    def _table(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).to(torch.int16).to(self.device).contiguous()

    def _fixed_arguments(self) -> npt.NDArray[Any]:
        rule, structure = self.rule, self.structure
        arguments = np.zeros(1, ARGUMENTS)
        for name in cuda.BUFFERS:
            arguments[name] = getattr(self, "step" if name == "step" else f"_{name}").data_ptr()
        assert rule.shared is not None
        values = {
            "node": self._node.data_ptr(),
            "seed_key": first_link(rule.seed),
            "cost": round(rule.cost * (1 << cuda.COST_BITS)),
            "top_k": self.top_k,
            "experts": structure.num_experts,
            "slots": structure.num_physical,
            "ranks": structure.num_ranks,
            "rank": self.rank,
            "follow": cuda.FOLLOW[rule.follow],
            "shared": cuda.CANDIDATES[rule.shared.candidates],
            "global": rule.sees_all_ranks,
            "plus_local": rule.shared.plus_local,
        }
        for name, value in values.items():
            arguments[name] = value
        return arguments

    def _shared_bytes(self, name: str) -> int:
        sizes = self.structure.num_experts, self.structure.num_physical, self.structure.num_ranks
        return cuda.shared_bytes(name, self.sizes, *sizes)

    def _compile(self) -> None:
        self._index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self._kernels = {}
        for name in ("count", "total", "quotas", "serve", "assign"):
            threads, shared = self.sizes.threads_of(name), self._shared_bytes(name)
            self._kernels[name] = cuda.kernel(self._index, self.sizes, name, shared), threads, shared
        if self.rule.solves:
            slots, whole = self.structure.num_physical, self.rule.gathered
            self._solved = split_cuda.empty(1, slots, self.device, integral=True, whole=whole, want_split=True)
            self._solve(self._loads[None, : self.structure.num_experts], self._layer[:1])

    def _launch(self, name: str, grid: tuple[int, ...], early: bool = False) -> None:
        """early: the kernel may begin before the previous one has ended."""
        function, threads, shared = self._kernels[name]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self._index):
            launch(function, grid, threads, shared, stream, self._arguments, early)
