"""The memory of a GPU: what weights take, and how many physical experts fit."""

import re
from dataclasses import dataclass

from epsim.models.spec import ModelSpec
from epsim.report.content import amount

GB = 1e9
_UNITS = {"": GB, "gb": GB, "gib": 2.0**30, "tb": 1e12, "mb": 1e6}


def parse_memory(text: str) -> float:
    """`141GB`, `80GiB` or `141` (GB) -> bytes. Raises ValueError."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if parts is None else _UNITS.get(parts[2].lower())
    if parts is None or unit is None or float(parts[1]) <= 0:
        raise ValueError(f"--memory-per-gpu {text}: give an amount above 0 such as 141GB or 80GiB")
    return float(parts[1]) * unit


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one GPU.

    total: all bytes. kept_share: the share of them that is kept free for KV cache, activations, embeddings and buffers.
    Attention is assumed to be data-parallel: every GPU holds all weights of attention, dense layers and the shared
    expert, and its slots of the routed experts. Engines allocate the same number of slots on every GPU and in every
    layer, so an empty slot takes as much memory as a filled one.
    """

    model: ModelSpec
    total: float
    kept_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.kept_share < 1:
            raise ValueError(f"--kv-share {self.kept_share}: give a share from 0 to below 1")

    @property
    def limit(self) -> float:
        """The bytes that weights may take."""
        return self.total * (1 - self.kept_share)

    @property
    def slot_bytes(self) -> float:
        """The bytes of one physical expert in every layer."""
        return self.model.moe_layers * self.model.expert_bytes

    @property
    def fixed_bytes(self) -> float:
        """The bytes of all weights except routed experts and embeddings. Embeddings are not in the model's
        specification. They are part of the share that is kept free."""
        model = self.model
        width = 1.0 if model.compute == "fp8" else 2.0
        layers = model.moe_layers + model.dense_layers
        shared = model.moe_layers * 3 * model.hidden * model.shared_intermediate * model.weight_bytes
        return shared + width * (layers * model.rest_parameters + model.dense_layers * model.dense_parameters)

    def used(self, slots: int, moving: bool = False) -> float:
        """The bytes of weights on a GPU with `slots` slots per layer. moving: whether the candidate rebalances, which
        needs the slots of one more layer as a buffer."""
        return self.fixed_bytes + slots * (self.slot_bytes + moving * self.model.expert_bytes)

    def most_slots(self, num_gpus: int) -> int:
        """The largest number of slots per GPU and layer that fits. Raises ValueError if the model does not fit on
        num_gpus GPUs."""
        most = int((self.limit - self.fixed_bytes) // self.slot_bytes) if self.limit > self.fixed_bytes else 0
        least = -(-self.model.num_experts // num_gpus)
        if most < least:
            raise ValueError(
                f"{self.model.name} needs {amount(self.used(least))} for weights on each of {num_gpus} GPUs, but "
                f"only {amount(self.limit)} of {amount(self.total)} are for weights (--kv-share {self.kept_share:g} "
                "keeps the rest free): give more --gpus or --memory-per-gpu, or a smaller --kv-share"
            )
        return most
