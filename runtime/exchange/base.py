"""What an exchange is: tokens go to the ranks that serve them, and what those computed comes back summed.

Slots are numbered over all ranks: rank r has local slots 0..slots_per_rank-1, the shared expert's last where there is
one, and slot number r * slots_per_rank + local. A row is a token on a rank that serves any of its slots: a token goes
to a rank once, however many of its experts are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True, eq=False)
class Received:
    """What a rank got: N rows, in one order that `handle` knows.

    hidden [N, H]: in the layer's dtype, or float8_e4m3fn with `scales` [N, H / 128] float32, one a block of 128.
    slots [N, K] int64: the row's local slots on this rank, -1 elsewhere. weights [N, K] float32: theirs.
    Where N is a worst case (`num_worst_tokens`), rows beyond the real ones hold garbage and no slot.
    handle: what `combine` needs.
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    slots: torch.Tensor
    weights: torch.Tensor
    handle: Any


class Exchange(Protocol):
    """Two collectives. Every rank calls both in every layer of every step, ranks without tokens too.

    name: `torch` or `deep_ep`. why: one line that says why it was chosen.
    host_sync: whether a call waits for the device, so that it cannot be captured in a CUDA graph.
    holds_interpreter: whether `dispatch` waits for the other ranks with Python's interpreter held, so that no other
    thread of the process runs meanwhile.
    """

    name: str
    why: str
    host_sync: bool
    holds_interpreter: bool

    def dispatch(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> Received:
        """hidden [T, H], slots [T, K] int64 (-1 for none), weights [T, K] float32."""
        ...

    def combine(self, outputs: torch.Tensor, received: Received) -> torch.Tensor:
        """outputs [N, H]: of each row the weighted sum over its local slots -> [T, H], summed over ranks."""
        ...

    def close(self) -> None:
        """Gives back what it holds of peers' memory. Collective; before the process group is destroyed."""
        ...
