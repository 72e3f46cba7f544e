"""Which exchange a job uses, and why."""

from __future__ import annotations

import torch
import torch.distributed as dist

from epsim.runtime.exchange.base import Exchange
from epsim.runtime.exchange.collectives import TorchExchange

EXCHANGES = ("auto", "deep_ep", "torch")


def choose_exchange(
    name: str,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    hidden: int,
    slots_per_rank: int,
    columns: int,
    max_tokens: int,
    fp8: bool = False,
    fixed_size: bool = False,
) -> Exchange:
    """`torch`, `deep_ep`, or `auto`: deep_ep where it can serve, else torch. Collective.

    slots_per_rank: the shared one among them. columns: slots a token takes. max_tokens: the most of a rank in a step.
    fp8: hidden states travel as float8 with a scale for each block of 128. fixed_size: rows received always as many as
    the worst case has, so that nothing waits for the device; both for deep_ep only. Raises ValueError where deep_ep is
    asked for and cannot serve.
    """
    if name not in EXCHANGES:
        raise ValueError(f"exchange {name!r} is none of {', '.join(EXCHANGES)}")
    if name == "torch":
        return TorchExchange(group, slots_per_rank, "asked for")
    from epsim.runtime.exchange.deep_ep import DeepEPExchange, obstacle

    size = dist.get_world_size(group) if dist.is_initialized() else 1
    why_not = obstacle(device, dtype, size, hidden, slots_per_rank, columns)
    if why_not is None:
        why = "asked for" if name == "deep_ep" else "it is installed and serves this shape"
        return DeepEPExchange(group, slots_per_rank, hidden, max_tokens, fp8, fixed_size, why)
    if name == "deep_ep":
        raise ValueError(f"exchange deep_ep cannot serve here: {why_not}; use --exchange torch")
    return TorchExchange(group, slots_per_rank, f"no deep_ep: {why_not}")
