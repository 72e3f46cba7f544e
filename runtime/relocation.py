"""Changes the placement of a running layer. Weights move in pieces between steps, so that no step waits long.

The slots that change are divided into waves. In a wave, at most as many experts arrive at a rank as it has spare rows,
and the placement after each wave has all experts. A rank receives the weights of arriving experts in spare rows. In
each step at most `bytes_per_step` bytes go into and out of each rank. When all experts of a wave have arrived, all
ranks switch to the wave's placement at the same step: their slots then refer to the new rows. So tokens always find
complete experts, and the switch itself copies nothing. All ranks compute the same plan from the two placements.

A slot that becomes empty needs no spare row and moves no bytes. A slot that was empty is filled like any other slot.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from epsim.placement.base import Placement
from epsim.runtime.balance import Balancer
from epsim.runtime.layer import ExpertParallelMoE


@dataclass(frozen=True, slots=True)
class Move:
    """The expert in slot `source` is copied to slot `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes begin..end of a move. move: its index in the wave."""

    move: int
    begin: int
    end: int


def plan_waves(old: list[int], new: list[int], num_ranks: int, spare: int) -> list[list[int]]:
    """The slots that change in each wave. old, new [P]: the expert in each slot, -1 for an empty slot.

    A slot with the last copy of an expert changes in the same wave as a slot at which this expert arrives.
    Raises ValueError if `spare` rows per rank are too few.
    """
    per_rank = len(old) // num_ranks
    now, pending = list(old), [slot for slot in range(len(old)) if old[slot] != new[slot]]
    waves: list[list[int]] = []
    while pending:
        wave: list[int] = []
        after = list(now)
        for slot in pending:
            if slot in wave:
                continue
            trial, result = [*wave, slot], list(after)
            result[slot] = new[slot]
            lost = now[slot]
            while lost >= 0 and lost not in result:
                arriving = next(other for other in pending if other not in trial and new[other] == lost)
                trial.append(arriving)
                result[arriving] = lost
                lost = now[arriving]
            used = [0] * num_ranks
            for chosen in trial:
                used[chosen // per_rank] += new[chosen] >= 0
            if max(used) <= spare:
                wave, after = trial, result
        if not wave:
            raise ValueError(
                f"{spare} spare slots per rank are too few for this relocation: give more ({per_rank} always suffice)"
            )
        waves.append(wave)
        now = after
        pending = [slot for slot in pending if slot not in wave]
    return waves


def plan_moves(now: list[int], new: list[int], wave: list[int], per_rank: int) -> list[Move]:
    """The source of each arriving expert: a copy on the same rank or, if there is none, a copy on the rank that sends
    the fewest experts so far."""
    given: dict[int, int] = {}
    moves = []
    for target in wave:
        if new[target] < 0:
            continue
        holders = [slot for slot, expert in enumerate(now) if expert == new[target]]
        on_rank = [slot for slot in holders if slot // per_rank == target // per_rank]
        source = on_rank[0] if on_rank else min(holders, key=lambda slot: (given.get(slot // per_rank, 0), slot))
        if not on_rank:
            given[source // per_rank] = given.get(source // per_rank, 0) + 1
        moves.append(Move(source, target))
    return moves


def plan_pieces(moves: list[Move], per_rank: int, num_bytes: int, most: int) -> list[list[Piece]]:
    """The pieces of each step, in the order of moves. At most `most` bytes go into and out of each rank in a step."""
    left = dict.fromkeys(range(len(moves)), 0)
    steps: list[list[Piece]] = []
    while left:
        into: dict[int, int] = {}
        out: dict[int, int] = {}
        step = []
        for move, begin in list(left.items()):
            source, target = moves[move].source // per_rank, moves[move].target // per_rank
            size = min(num_bytes - begin, most - into.get(target, 0), most - out.get(source, 0))
            if size <= 0:
                continue
            into[target], out[source] = into.get(target, 0) + size, out.get(source, 0) + size
            step.append(Piece(move, begin, begin + size))
            left[move] = begin + size
            if begin + size == num_bytes:
                del left[move]
        steps.append(step)
    return steps


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    moves: list[Move]
    steps: list[list[Piece]]
    balancer: Balancer


class Relocation:
    """Moves a layer to a new placement [1, P]. Creating it is collective: all ranks must pass the same placement.

    num_steps: how many calls of `advance` are needed. done: whether the new placement is in use.

        relocation = Relocation(layer, placement, bytes_per_step=1 << 20)
        while not relocation.done:
            output = layer(hidden, step=step)
            relocation.advance(step)
    """

    def __init__(self, layer: ExpertParallelMoE, placement: Placement, bytes_per_step: int) -> None:
        """Raises ValueError if the placement does not fit the layer, if ranks pass different ones, if the spare slots
        are too few, or if another relocation of the layer has not ended."""
        balancer, experts = layer.balancer, layer.experts
        if layer.moving:
            raise ValueError(f"layer {layer.layer} has a relocation in progress: call its advance() until it is done")
        if bytes_per_step < 1:
            raise ValueError(f"bytes per step {bytes_per_step}: give at least 1")
        old = balancer.placement
        same = (placement.num_layers, placement.num_physical, placement.num_experts, placement.num_ranks)
        if same != (1, old.num_physical, old.num_experts, old.num_ranks):
            raise ValueError(
                f"a placement of {placement.num_layers} layers, {placement.num_physical} slots, "
                f"{placement.num_experts} experts and {placement.num_ranks} ranks cannot follow one of 1 layer, "
                f"{old.num_physical} slots, {old.num_experts} experts and {old.num_ranks} ranks"
            )
        self.layer, self.collective = layer, balancer.collective
        self._check_agreement(placement, bytes_per_step)
        self.per_rank = old.slots_per_rank
        now, new = old.physical_to_logical[0].tolist(), placement.physical_to_logical[0].tolist()
        gate_up, down = experts.bytes_of(row=0)
        self._parts = (gate_up.numel(), gate_up.numel() + down.numel())
        self._waves: list[Wave] = []
        for slots in plan_waves(now, new, old.num_ranks, len(experts.spare_rows)):
            moves = plan_moves(now, new, slots, self.per_rank)
            for slot in slots:
                now[slot] = new[slot]
            table = torch.tensor([now], device=old.physical_to_logical.device)
            steps = plan_pieces(moves, self.per_rank, self._parts[1], bytes_per_step) or [[]]
            self._waves.append(Wave(moves, steps, balancer.on(replace(old, physical_to_logical=table))))
        self.num_steps = sum(len(wave.steps) for wave in self._waves)
        self._wave, self._step = 0, 0
        self._rows: dict[int, int] = {}
        layer.moving = bool(self._waves)

    @property
    def done(self) -> bool:
        return self._wave == len(self._waves)

    def advance(self, step: int) -> int:
        """Moves the pieces of the next step. After the last pieces of a wave, the slots change. Collective. Call it
        between two steps. Returns the number of bytes that this rank received."""
        if self.done:
            return 0
        clock, wave = self.layer.clock, self._waves[self._wave]
        clock.enter("relocate", step, self.layer.layer)
        if not self._rows:
            targets = [move.target for move in wave.moves if move.target // self.per_rank == self.collective.rank]
            self._rows = dict(zip(targets, self.layer.experts.spare_rows))
        received = self._transfer(wave, wave.steps[self._step])
        self._step += 1
        if self._step == len(wave.steps):
            self.layer.experts.switch({slot % self.per_rank: row for slot, row in self._rows.items()})
            self.layer.balancer = wave.balancer
            self._wave, self._step, self._rows = self._wave + 1, 0, {}
            self.layer.moving = not self.done
        clock.enter("idle")
        return received

    def _transfer(self, wave: Wave, pieces: list[Piece]) -> int:
        rank, operations, received = self.collective.rank, [], 0
        for piece in pieces:
            move = wave.moves[piece.move]
            source, target = move.source // self.per_rank, move.target // self.per_rank
            if rank not in (source, target):
                continue
            given = self._bytes(piece, slot=move.source % self.per_rank) if rank == source else []
            taken = self._bytes(piece, row=self._rows[move.target]) if rank == target else []
            received += sum(part.numel() for part in taken)
            if source == target:
                for from_part, to_part in zip(given, taken):
                    to_part.copy_(from_part)
                continue
            operations += [self._operation(dist.isend, part, target) for part in given]
            operations += [self._operation(dist.irecv, part, source) for part in taken]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received

    def _operation(self, kind: object, part: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, part, group=self.collective.group, group_peer=peer)  # type: ignore[arg-type]

    def _bytes(self, piece: Piece, slot: int | None = None, row: int | None = None) -> list[torch.Tensor]:
        """The bytes of a piece in a slot or a row, as slices of gate_up and down without empty ones."""
        gate_up, down = self.layer.experts.bytes_of(slot, row)
        cut = self._parts[0]
        parts = [gate_up[piece.begin : min(piece.end, cut)], down[max(piece.begin - cut, 0) : max(piece.end - cut, 0)]]
        return [part for part in parts if part.numel()]

    def _check_agreement(self, placement: Placement, bytes_per_step: int) -> None:
        """Checks by a small collective that all ranks passed the same arguments. It also opens NCCL's connections."""
        if self.collective.size == 1:
            return
        device = self.layer.experts.gate_up.device
        name = int(placement.version, 16) ^ (bytes_per_step << 4)
        mine = torch.tensor([name % 2**48], dtype=torch.int64, device=device)
        names = [torch.empty_like(mine) for _ in range(self.collective.size)]
        dist.all_gather(names, mine, group=self.collective.group)
        different = [rank for rank, other in enumerate(names) if int(other) != int(names[0])]
        if different:
            raise ValueError(f"rank {different[0]} was given another placement or bytes_per_step than rank 0")
        rank, size = self.collective.rank, self.collective.size
        first = []
        for away in range(1, size):  # any two ranks may exchange weights
            first.append(self._operation(dist.isend, mine, (rank + away) % size))
            first.append(self._operation(dist.irecv, torch.empty_like(mine), (rank - away) % size))
        for work in dist.batch_isend_irecv(first):
            work.wait()
