"""A GPU and its links: specifications and measured rates (epsim/machines/cards/*.toml)."""

import math
from dataclasses import dataclass

from epsim.cards import build, read_card

MOST_RATE = 1e5
"""More GB/s or TFLOPS than any device has: a larger number has the wrong unit."""
LEAST_MEMORY_RATE = 10
"""Fewer GB/s than any device has: a smaller number is in TB/s."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one level of an exchange: time = bytes / rate(bytes).

    gb_per_s: the rate at each size of `at_bytes` (ascending; bytes of the busiest rank). Rates between two sizes are
    interpolated over the logarithm of the size. Outside the sizes the nearest rate is used. A single rate needs no
    size.
    """

    gb_per_s: tuple[float, ...]
    at_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.at_bytes or (1.0,) * len(self.gb_per_s)
        if not self.gb_per_s or len(sizes) != len(self.gb_per_s) or (len(sizes) > 1 and not self.at_bytes):
            raise ValueError("gb_per_s needs one rate, or one for each of at_bytes")
        if min(self.gb_per_s) <= 0 or min(sizes) <= 0 or (list(sizes) != sorted(set(sizes)) and len(sizes) > 1):
            raise ValueError("rates and sizes must be above 0, and sizes ascending")
        if max(self.gb_per_s) > MOST_RATE:
            raise ValueError(f"a rate of {max(self.gb_per_s):g} GB/s: give GB/s, not bytes per second")
        steps = zip(self.gb_per_s, self.gb_per_s[1:], sizes, sizes[1:], strict=False)
        if any(slow * math.log(size / small) < fast - slow for slow, fast, small, size in steps):
            raise ValueError("gb_per_s rises faster than at_bytes: more bytes would take less time")


@dataclass(frozen=True, slots=True)
class ExchangeRates:
    """Rates of the dispatch and combine kernels of one exchange.

    dispatch_alpha_us, combine_alpha_us: time of a call without bytes within a node; nodes_alpha_us: what an exchange
    between nodes adds. nvlink, rdma: rates of each level. Bytes on NVLink include those that stay on their rank,
    because the kernels copy them too. Bytes on RDMA are those that leave the node. forward: rates of NVLink when
    kernels also forward data from other nodes; None for the same as `nvlink`.
    """

    dispatch_alpha_us: float
    combine_alpha_us: float
    nodes_alpha_us: float
    nvlink_dispatch: Link
    nvlink_combine: Link
    rdma_dispatch: Link
    rdma_combine: Link
    forward_dispatch: Link | None = None
    forward_combine: Link | None = None

    def __post_init__(self) -> None:
        _not_negative(self, ("dispatch_alpha_us", "combine_alpha_us", "nodes_alpha_us"))


@dataclass(frozen=True, slots=True)
class PolicyCosts:
    """Measured microseconds per layer that policies add.

    all_reduce_us, all_reduce_nodes_us: an all-reduce of a layer's counts, within a node and between nodes. solve_us: a
    split by `epsim.kernels.split`. published_solve_us: LPLB's interior point method. assign_us: assigning tokens to
    physical experts. waterfill_us: dispatch of the shared expert. timed_us: a split with objective=time (default:
    solve_us). joint_us: `waterfill-joint` (default: waterfill_us). router_us: a router policy (default: assign_us)."""

    all_reduce_us: float
    all_reduce_nodes_us: float
    solve_us: float
    published_solve_us: float
    assign_us: float
    waterfill_us: float
    timed_us: float | None = None
    joint_us: float | None = None
    router_us: float | None = None

    def __post_init__(self) -> None:
        _not_negative(self, tuple(name for name in self.__slots__ if getattr(self, name) is not None))

    def us(self, name: str) -> float:
        """The cost of that name, or its default."""
        defaults = {"timed_us": "solve_us", "joint_us": "waterfill_us", "router_us": "assign_us"}
        cost: float | None = getattr(self, name)
        return self.us(defaults[name]) if cost is None else cost


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a node with `ranks_per_node` GPUs.

    memory_gb: capacity. memory_gb_per_s, bf16_tflops, fp8_tflops: rates that kernels reach, not peaks. kernel_us: fixed
    time of the expert kernels. tile: grouped GEMMs pad each expert's tokens to a multiple of this number of rows. sms:
    multiprocessors; exchange_sms: those that an exchange uses while it overlaps computation. source: where the numbers
    come from. tables: JSON files in the same folder, measured by `epsim calibrate` (`epsim.cost.calibrated`).
    shared_grouped: whether a local shared expert is part of the grouped computation, as in epsim's runtime.
    """

    name: str
    source: str
    memory_gb: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    kernel_us: float
    tile: int
    ranks_per_node: int
    sms: int
    exchange_sms: int
    normal: ExchangeRates
    low_latency: ExchangeRates
    policy: PolicyCosts
    tables: tuple[str, ...] = ()
    shared_grouped: bool = False

    def __post_init__(self) -> None:
        for name in ("memory_gb", "memory_gb_per_s", "bf16_tflops", "fp8_tflops", "tile", "ranks_per_node", "sms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, give a number above 0")
            if name not in ("tile", "ranks_per_node", "sms") and getattr(self, name) > MOST_RATE:
                raise ValueError(f"{name} is {getattr(self, name):g}: give GB, GB/s and TFLOPS")
        if self.memory_gb_per_s < LEAST_MEMORY_RATE:
            raise ValueError(f"memory_gb_per_s is {self.memory_gb_per_s:g}: give GB/s, not TB/s")
        _not_negative(self, ("kernel_us", "exchange_sms"))
        if self.exchange_sms >= self.sms:
            raise ValueError(f"exchange_sms {self.exchange_sms} leaves none of {self.sms} SMs for computation")


def load_hardware(name: str, option: str = "--hardware") -> Hardware:
    """Loads shipped hardware (`h100`, `h200`, `h800`, `b200`) or a TOML file by its path. Raises ValueError in one
    line, which names `option`."""
    return build(Hardware, *read_card("machines", option, name))


def _not_negative(spec: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}, give 0 or more")
