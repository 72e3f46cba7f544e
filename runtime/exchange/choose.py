"""Chooses the exchange of a job."""

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
    """The exchange `name`: `torch`, `deep_ep`, or `auto` (deep_ep if it supports the job, else torch). Collective.

    slots_per_rank: includes the slot of the shared expert. columns: slots per token. max_tokens: the most tokens of a
    rank in a step. fp8: dispatch sends hidden states in float8, with a scale per block of 128 values. fixed_size: the
    number of received rows is always the worst case, so that the host never waits for the device. fp8 and fixed_size
    apply to deep_ep only. Raises ValueError if name is `deep_ep` and deep_ep does not support the job.
    """
    if name not in EXCHANGES:
        raise ValueError(f"exchange {name!r} is not one of {', '.join(EXCHANGES)}")
    if name == "torch":
        return TorchExchange(group, slots_per_rank, "asked for")
    from epsim.runtime.exchange.deep_ep import DeepEPExchange, obstacle

    size = dist.get_world_size(group) if dist.is_initialized() else 1
    why_not = obstacle(device, dtype, size, hidden, slots_per_rank, columns)
    if why_not is None:
        why = "asked for" if name == "deep_ep" else "it is installed and supports this job"
        return DeepEPExchange(group, slots_per_rank, hidden, max_tokens, fp8, fixed_size, why)
    if name == "deep_ep":
        raise ValueError(f"exchange deep_ep cannot be used here: {why_not}; use --exchange torch")
    return TorchExchange(group, slots_per_rank, f"no deep_ep: {why_not}")
