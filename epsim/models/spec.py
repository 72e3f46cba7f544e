"""The shapes and weights of models that determine time and memory (epsim/models/cards/*.toml)."""

from dataclasses import dataclass
from typing import Literal

from epsim.cards import build, known_cards, read_card
from epsim.models.known import longest_start

SCALE_BLOCK = 128
"""Values of an FP8 row that share one float32 scale."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of `moe_layers` layers. Each has `num_experts` experts of width `intermediate`, `top_k` per token, and a
    shared expert of `shared_intermediate` (0 for none). With group-limited routing a token chooses from the best
    `top_groups` of `groups` expert groups (1 of 1: no groups).

    weight_bytes: bytes per expert parameter. compute: type of the expert GEMMs. dispatch: type of dispatched rows
    (combined rows are bf16). rest_parameters: parameters of attention, norms and router per layer. rest_us: other
    microseconds of a layer, which neither rest_parameters nor experts explain. dense_layers: number of layers without
    experts; each has `dense_parameters` besides `rest_parameters`. source: where the numbers come from.
    """

    name: str
    source: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    moe_layers: int
    weight_bytes: float
    compute: Literal["fp8", "bf16"]
    dispatch: Literal["fp8", "bf16"]
    rest_parameters: float
    rest_us: float
    shared_intermediate: int = 0
    groups: int = 1
    top_groups: int = 1
    dense_layers: int = 0
    dense_parameters: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "top_k", "moe_layers", "groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, give at least 1")
        for name in ("shared_intermediate", "rest_parameters", "rest_us", "dense_layers", "dense_parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, give 0 or more")
        if not self.weight_bytes > 0:
            raise ValueError(f"weight_bytes is {self.weight_bytes}, give a number above 0")
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"groups {self.groups}, top_groups {self.top_groups}: groups must divide the {self.num_experts} experts"
            )
        if self.top_k > self.num_experts // self.groups * self.top_groups:
            raise ValueError(f"top_k {self.top_k} is more than the experts that can be chosen")

    @property
    def shared_cost(self) -> float:
        """The shared expert's work in routed assignments (docs/contract.md section 1)."""
        return self.shared_intermediate / self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Bytes of a routed expert's weights: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate * self.weight_bytes

    @property
    def expert_flops(self) -> float:
        """FLOPs of one assignment: two per weight."""
        return 6.0 * self.hidden * self.intermediate

    @property
    def dispatch_row_bytes(self) -> float:
        """Bytes of a dispatched token: bf16, or fp8 with one float32 scale per 128 values."""
        return 2.0 * self.hidden if self.dispatch == "bf16" else self.hidden * (1 + 4 / SCALE_BLOCK)

    @property
    def combine_row_bytes(self) -> float:
        return 2.0 * self.hidden


def load_model(name: str) -> ModelSpec:
    """Loads a shipped model by name, or a TOML file by path. Raises ValueError in one line.

    A name may be longer than the shipped model's: `deepseek-ai/DeepSeek-V3-0324` gives `deepseek-v3`."""
    if not name.endswith(".toml"):
        name = longest_start(name, known_cards("models")) or name
    return build(ModelSpec, *read_card("models", "--model", name))
