"""Dispatch and combine by the kernels of DeepEP over NVLink (github.com/deepseek-ai/DeepEP, `Buffer`, normal mode)."""

import importlib
from typing import Any

import torch
import torch.distributed as dist

from epsim.runtime.exchange.base import Received

RANKS = (2, 4, 8)
MOST_SLOTS = 128
MOST_COLUMNS = 32
MOST_HIDDEN = 8184
BLOCK = 128
"""Number of values that share a scale in float8."""
NUM_SMS = 64
"""Multiprocessors for DeepEP's kernels. DeepEP's default of 20 leaves the others to concurrent kernels. Here nothing
runs at the same time as an exchange, and with 64 it takes half the time (benchmarks/runtime.py)."""


def load() -> Any:
    """The module deep_ep, or the reason why it cannot be used. Any version with the class `Buffer` can be used."""
    try:
        module = importlib.import_module("deep_ep")
    except Exception as error:  # its libraries may raise errors other than ImportError
        return f"import deep_ep fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    if not hasattr(module, "Buffer"):
        return f"this deep_ep ({getattr(module, '__version__', 'of unknown version')}) has no Buffer"
    return module


def obstacle(
    device: torch.device, dtype: torch.dtype, size: int, hidden: int, slots_per_rank: int, columns: int
) -> str | None:
    """The reason why deep_ep does not support the job, or None."""
    if device.type != "cuda":
        return "it needs GPUs"
    if size not in RANKS:
        return f"{size} ranks, but it supports {', '.join(map(str, RANKS))} ranks in a node"
    if slots_per_rank > MOST_SLOTS:
        return f"{slots_per_rank} slots per rank with the shared expert, but it supports {MOST_SLOTS}"
    if columns > MOST_COLUMNS:
        return f"{columns} experts per token, but it supports {MOST_COLUMNS}"
    if dtype != torch.bfloat16 or hidden > MOST_HIDDEN or hidden % 8:
        return f"hidden size {hidden} of {dtype}, but it supports bfloat16 and multiples of 8 up to {MOST_HIDDEN}"
    module = load()
    return module if isinstance(module, str) else None


class DeepEPExchange:
    """DeepEP's exchange with one buffer, which all layers of a shape can share.

    fp8: dispatch is in float8; combine is always in bfloat16. fixed_size: the number of received rows is always the
    worst case, R * max_tokens. Then the host never waits for the device, and a layer can be captured in a CUDA graph.
    num_sms: the number of multiprocessors for DeepEP's kernels.
    """

    name = "deep_ep"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        slots_per_rank: int,
        hidden: int,
        max_tokens: int,
        fp8: bool = False,
        fixed_size: bool = False,
        why: str = "asked for",
        num_sms: int = NUM_SMS,
    ) -> None:
        module = load()
        assert not isinstance(module, str), module
        if fp8 and hidden % BLOCK:
            raise ValueError(
                f"hidden size {hidden} is not a multiple of {BLOCK}, the block that shares a scale in float8"
            )
        group = group or dist.group.WORLD
        assert group is not None
        self.size, self.slots_per_rank, self.fp8, self.why = dist.get_world_size(group), slots_per_rank, fp8, why
        self.worst = self.size * max_tokens if fixed_size else 0
        self.max_tokens, self.host_sync = max_tokens, not fixed_size
        # DeepEP's dispatch within a node holds the GIL while it waits for counts.
        self.holds_interpreter = self.host_sync
        if num_sms < 2 or num_sms % 2:
            raise ValueError(f"{num_sms} multiprocessors for deep_ep: give an even number")
        module.Buffer.set_num_sms(num_sms)  # applies to configurations that are created later
        self.configs = (module.Buffer.get_dispatch_config(self.size), module.Buffer.get_combine_config(self.size))
        num_bytes = max(config.get_nvl_buffer_size_hint(hidden * 2, self.size) for config in self.configs)
        # Destroyed explicitly: destroy() waits for all ranks, so the garbage collector must not call it.
        self.buffer = module.Buffer(group=group, num_nvl_bytes=num_bytes, num_rdma_bytes=0, explicitly_destroy=True)

    def dispatch(self, hidden: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> Received:
        """hidden [T, H] bfloat16, slots [T, K] int64, weights [T, K] float32."""
        if len(hidden) > self.max_tokens:
            raise ValueError(f"{len(hidden)} tokens, more than max_tokens {self.max_tokens}")
        num_tokens = len(hidden)
        if not len(hidden):  # Some versions crash without rows, so a rank without tokens passes a row that is not sent.
            hidden = hidden.new_zeros(1, hidden.shape[1])
            slots, weights = slots.new_full((1, slots.shape[1]), -1), weights.new_zeros(1, weights.shape[1])
        payload: Any = hidden.contiguous()
        if self.fp8:
            from epsim.runtime.grouped import to_float8

            payload = to_float8(payload)
        per_rank, _, per_slot, in_rank, _ = self.buffer.get_dispatch_layout(slots, self.size * self.slots_per_rank)
        got, got_slots, got_weights, _, handle, _ = self.buffer.dispatch(
            payload,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=slots,
            topk_weights=weights,
            num_worst_tokens=self.worst,
            config=self.configs[0],
        )
        rows, scales = got if self.fp8 else (got, None)
        return Received(rows, scales, got_slots, got_weights, (handle, num_tokens))

    def combine(self, outputs: torch.Tensor, received: Received) -> torch.Tensor:
        handle, num_tokens = received.handle
        total: torch.Tensor = self.buffer.combine(outputs, handle, config=self.configs[1])[0]
        return total if len(total) == num_tokens else total[:num_tokens]

    def close(self) -> None:
        self.buffer.destroy()
