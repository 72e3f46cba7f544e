"""The time of a model's router: scores of all experts, the choice of each token's experts, and their weights."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from epsim.cost.curve import check_axis, check_times, curve
from epsim.models.spec import ModelSpec


@dataclass(frozen=True)
class RouterTable:
    """A router measured on one device by `epsim calibrate`, with the runtime layer's operations for tokens' weights.

    hidden, num_experts, top_k, groups, top_groups: of the model. tokens [n]: per rank, ascending. us [n]: microseconds
    of a router that chooses the experts. given_us [n]: microseconds if a trace gives the experts and the router only
    computes their weights, as in runs. One of the two may be empty if it was not measured.
    """

    device: str
    command: str
    hidden: int
    num_experts: int
    top_k: int
    groups: int
    top_groups: int
    tokens: tuple[float, ...]
    us: tuple[float, ...]
    given_us: tuple[float, ...]
    kind: Literal["router"] = "router"
    versions: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        check_axis("tokens", self.tokens)
        for name in ("us", "given_us"):
            check_times(name, getattr(self, name))
            if len(getattr(self, name)) not in (0, len(self.tokens)):
                raise ValueError(f"{name} must be {len(self.tokens)} numbers, one for each of tokens")
        if not self.us and not self.given_us:
            raise ValueError("us and given_us are empty: give one of them")

    def fits(self, model: ModelSpec, given: bool) -> bool:
        """Whether the table is for this model's router. given: whether the experts come from a trace."""
        names = ("hidden", "num_experts", "top_k", "groups", "top_groups")
        same = all(getattr(self, name) == getattr(model, name) for name in names)
        return same and bool(self.given_us if given else self.us)

    def time(self, tokens: Tensor, given: bool) -> Tensor:
        """Microseconds [...] for tokens [...] per rank. given: whether the experts come from a trace."""
        return curve(self.tokens, self.given_us if given else self.us, tokens)
