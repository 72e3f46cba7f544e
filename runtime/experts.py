"""The experts of one rank: their weights by local slot, and the computation of received rows."""

import torch
import torch.nn.functional as F

from epsim.kernels.experts import MOST_TOKENS, decode
from epsim.models.shapes import LayerShape
from epsim.runtime.exchange.base import Received
from epsim.runtime.weights import Weights, WeightSource


class Experts(torch.nn.Module):
    """Local slots 0..S-1 hold routed experts; slot S holds the shared expert if the shape has one.

    Weights are stored in rows, and each slot refers to a row. A moved expert arrives in a spare row, and its slot then
    changes to this row. An empty slot has a row of zeros, which no token reads and which a relocation may fill.
    gate_up [rows, 2 I, H], down [rows, H, I]; row_of_slot [S + shared] int64. The shared expert is the last row, or has
    tensors of its own (`shared_gate_up`, `shared_down`) if its width differs from that of the routed experts.
    decode_up_to: on a GPU and in bfloat16, batches of up to this many rows are computed by `epsim.kernels.experts`,
    larger ones by grouped products.
    """

    decode_up_to = MOST_TOKENS

    def __init__(
        self,
        shape: LayerShape,
        layer: int,
        local_experts: list[int],
        weights: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        spare: int = 0,
    ) -> None:
        """local_experts: the expert in each local slot, -1 for an empty slot. spare: rows for experts that a relocation
        moves to this rank."""
        super().__init__()
        self.shape, self.layer, self.num_slots, self.dtype = shape, layer, len(local_experts), dtype
        self.apart = shape.has_shared and shape.shared_intermediate != shape.intermediate
        together = shape.has_shared and not self.apart
        num_rows = self.num_slots + spare + together
        size = (num_rows, 2 * shape.intermediate, shape.hidden)
        self.gate_up: torch.Tensor
        self.down: torch.Tensor
        self.row_of_slot: torch.Tensor
        self.register_buffer("gate_up", torch.zeros(size, device=device, dtype=dtype))
        self.register_buffer(
            "down", torch.zeros(num_rows, shape.hidden, shape.intermediate, device=device, dtype=dtype)
        )
        for row, expert in enumerate(local_experts):
            if expert >= 0:
                self._put(row, weights.routed(layer, expert))
        if together:
            self._put(num_rows - 1, weights.shared(layer))
        if self.apart:
            gate_up, down = weights.shared(layer)
            self.shared_gate_up: torch.Tensor
            self.shared_down: torch.Tensor
            self.register_buffer("shared_gate_up", gate_up.to(device, dtype)[None].contiguous())
            self.register_buffer("shared_down", down.to(device, dtype)[None].contiguous())
        rows = [*range(self.num_slots), num_rows - 1] if shape.has_shared else [*range(self.num_slots)]
        self._rows = rows
        self.register_buffer("row_of_slot", torch.tensor(rows, device=device))
        self.spare_rows = list(range(self.num_slots, self.num_slots + spare))

    def _put(self, row: int, weights: Weights) -> None:
        gate_up, down = weights
        self.gate_up[row].copy_(gate_up)
        self.down[row].copy_(down)

    def bytes_of(self, slot: int | None = None, row: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of a slot or of a row (gate_up, down), as flat byte tensors that share its memory."""
        at = row if slot is None else self._rows[slot]
        assert at is not None
        return self.gate_up[at].view(-1).view(torch.uint8), self.down[at].view(-1).view(torch.uint8)

    def switch(self, rows: dict[int, int]) -> None:
        """Changes the rows of slots. rows: the new row of each such slot, which is a spare row. The old row of the slot
        becomes a spare row."""
        for slot, row in rows.items():
            self.spare_rows.remove(row)
            self.spare_rows.append(self._rows[slot])
            self._rows[slot] = row
        # In place, because captured CUDA graphs read this tensor.
        self.row_of_slot.copy_(torch.tensor(self._rows))

    def forward(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns outputs [N, H], the weighted sum of each row over its local slots, and counts [S + shared] int64, the
        number of rows that each slot served."""
        if not received.hidden.is_cuda:
            return self._plain(received)
        small = 0 < len(received.hidden) <= self.decode_up_to and received.scales is None
        if small and self.dtype == torch.bfloat16 and not self.apart:
            counts = torch.empty_like(self.row_of_slot)
            weights = (self.gate_up, self.down, self.row_of_slot, counts)
            return decode(received.hidden, received.slots, received.weights, *weights), counts
        return self._grouped(received)

    def _grouped(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        from epsim.runtime.grouped import compute

        slots, weights = received.slots, (self.gate_up, self.down)
        if not self.apart:
            return compute(received, slots, weights, self.row_of_slot, fill=False)
        # A shared expert whose width differs is computed in a second pass.
        is_shared, shared_weights = slots == self.num_slots, (self.shared_gate_up, self.shared_down)
        first, counts = compute(
            received, slots.masked_fill(is_shared, -1), weights, self.row_of_slot[: self.num_slots], fill=True
        )
        alone = torch.where(is_shared, 0, -1)
        second, more = compute(received, alone, shared_weights, self.row_of_slot.new_zeros(1), fill=True)
        return first + second, torch.cat([counts, more])

    def _plain(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, slots = received.hidden.to(self.dtype), received.slots
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        num_slots = self.num_slots + self.shape.has_shared
        counts = torch.bincount(slots.flatten() + 1, minlength=num_slots + 1)[1:]
        for slot in counts.nonzero()[:, 0].tolist():
            row, column = (slots == slot).nonzero(as_tuple=True)
            gate_up, down = self._weights(slot)
            output = mlp(hidden[row], gate_up, down)
            total.index_add_(0, row, output.float() * received.weights[row, column, None])
        return total.to(self.dtype), counts

    def _weights(self, slot: int) -> Weights:
        if self.apart and slot == self.num_slots:
            return self.shared_gate_up[0], self.shared_down[0]
        row = self._rows[slot]
        return self.gate_up[row], self.down[row]


def mlp(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """hidden [n, H], gate_up [2 I, H], down [H, I] -> down(silu(gate) * up) [n, H]."""
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
