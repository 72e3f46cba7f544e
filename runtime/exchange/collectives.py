"""Dispatch and combine by torch.distributed's all-to-all: NCCL on GPUs, gloo on CPUs. Sizes are read on the host."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from epsim.runtime.exchange.base import Received


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """token [n] int64: the token of each row that was sent, in the order of ranks. sent, got: the number of rows to and
    from each rank. num_tokens: T."""

    token: torch.Tensor
    sent: list[int]
    got: list[int]
    num_tokens: int
    dtype: torch.dtype


class TorchExchange:
    """Dispatch makes three all-to-alls: sizes; slots and weights; hidden states. Combine makes one; sums in float32."""

    name = "torch"
    host_sync = True
    holds_interpreter = False

    def __init__(self, group: dist.ProcessGroup | None, slots_per_rank: int, why: str = "asked for") -> None:
        self.group, self.slots_per_rank, self.why = group, slots_per_rank, why
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0

    def dispatch(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> Received:
        """hidden [T, H], slots [T, K] int64, weights [T, K] float32."""
        num_tokens, columns = slots.shape
        rank_of = torch.where(slots >= 0, slots // self.slots_per_rank, self.size)
        visits = torch.zeros(self.size + 1, num_tokens, dtype=torch.bool, device=slots.device)
        visits.scatter_(0, rank_of.T, True)
        rank, token = visits[: self.size].nonzero(as_tuple=True)
        here = rank_of[token] == rank[:, None]
        local = torch.where(here, slots[token] - rank[:, None] * self.slots_per_rank, -1).to(torch.int32)
        given = torch.where(here, weights[token], 0.0)
        counts = visits[: self.size].sum(1)
        if self.size == 1:
            handle = Handle(token, [len(token)], [len(token)], num_tokens, hidden.dtype)
            return Received(hidden[token], None, local.to(torch.int64), given, handle)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, got = torch.stack([counts, arriving]).tolist()
        handle = Handle(token, sent, got, num_tokens, hidden.dtype)
        about = self._moved(torch.cat([local, given.view(torch.int32)], dim=1), sent, got)
        rows = self._moved(hidden[token], sent, got)
        return Received(
            rows, None, about[:, :columns].to(torch.int64), about[:, columns:].contiguous().view(torch.float32), handle
        )

    def combine(self, outputs: torch.Tensor, received: Received) -> torch.Tensor:
        handle: Handle = received.handle
        back = outputs if self.size == 1 else self._moved(outputs, handle.got, handle.sent)
        total = torch.zeros(handle.num_tokens, outputs.shape[1], dtype=torch.float32, device=outputs.device)
        total.index_add_(0, handle.token, back.float())
        return total.to(handle.dtype)

    def close(self) -> None:
        """Does nothing: this exchange shares no memory."""

    def _moved(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """Sends rows [sum(sent), n] to their ranks, receives [sum(got), n]. As bytes, because gloo lacks bfloat16."""
        result = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(
            result.view(torch.uint8), rows.contiguous().view(torch.uint8), got, sent, group=self.group
        )
        return result
