"""The interface of an exchange: dispatch sends tokens to the ranks that serve them, combine returns the summed outputs.

Slots are numbered over all ranks: local slot i of rank r has the number r * slots_per_rank + i. slots_per_rank includes
the slot of the shared expert, which is the last slot of a rank. All ranks have the same number of slots. No token is
assigned to an empty slot. A row is a token on a rank that serves it: a token is sent to a rank once, even if the rank
serves several of its experts.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True, eq=False)
class Received:
    """The N rows that a rank received.

    hidden [N, H]: in the layer's dtype, or in float8_e4m3fn with scales [N, H / 128] float32, one per block of 128
    values. slots [N, K] int64: the row's local slots on this rank, -1 for slots of other ranks. weights [N, K] float32:
    the weights of these slots. If N is a fixed worst case, unused rows come last: their slots are -1, and their values
    are undefined. handle: the data with which `combine` returns the rows.
    """

    hidden: torch.Tensor
    scales: torch.Tensor | None
    slots: torch.Tensor
    weights: torch.Tensor
    handle: Any


class Exchange(Protocol):
    """Dispatch and combine. Both are collective: all ranks call them in each layer and step, even without tokens.

    name: `torch` or `deep_ep`. why: the reason for choosing this exchange, in one line.
    host_sync: whether a call waits for the device. If so, it cannot be captured in a CUDA graph.
    holds_interpreter: whether `dispatch` holds the GIL while it waits for other ranks, so that other threads stop.
    """

    name: str
    why: str
    host_sync: bool
    holds_interpreter: bool

    def dispatch(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> Received:
        """hidden [T, H], slots [T, K] int64 (-1 for none), weights [T, K] float32."""
        ...

    def combine(self, outputs: torch.Tensor, received: Received) -> torch.Tensor:
        """outputs [N, H]: each row's weighted sum over its local slots -> [T, H], the sum over ranks."""
        ...

    def close(self) -> None:
        """Releases the memory shared with other ranks. Collective. Call it before the process group is destroyed."""
        ...
