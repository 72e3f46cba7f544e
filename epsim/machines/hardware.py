"""What a GPU and its links can do: specifications and the rates measured on them (epsim/machines/cards/*.toml)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from epsim.cards import build, read_card

MOST_RATE = 1e5
"""GB/s and TFLOPS that no device reaches: a larger figure is of another unit."""
LEAST_MEMORY_RATE = 10
"""GB/s: a smaller figure is in TB/s."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one level of an exchange: time = bytes / rate(bytes).

    gb_per_s: the rate at each of `at_bytes` (ascending; bytes of the busiest rank), between them by the logarithm of
    the size and outside them the nearest; a single rate needs no sizes.
    """

    gb_per_s: tuple[float, ...]
    at_bytes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.at_bytes or (1.0,) * len(self.gb_per_s)
        if not self.gb_per_s or len(sizes) != len(self.gb_per_s) or (len(sizes) > 1 and not self.at_bytes):
            raise ValueError("gb_per_s needs one rate, or as many as there are at_bytes")
        if min(self.gb_per_s) <= 0 or min(sizes) <= 0 or (list(sizes) != sorted(set(sizes)) and len(sizes) > 1):
            raise ValueError("rates and sizes must be above 0, and sizes ascending")
        if max(self.gb_per_s) > MOST_RATE:
            raise ValueError(f"a rate of {max(self.gb_per_s):g} GB/s: give GB/s, not bytes a second")
        steps = zip(self.gb_per_s, self.gb_per_s[1:], sizes, sizes[1:], strict=False)
        if any(slow * math.log(size / small) < fast - slow for slow, fast, small, size in steps):
            raise ValueError("gb_per_s rises faster than at_bytes: more bytes would take less time")


@dataclass(frozen=True, slots=True)
class ExchangeRates:
    """Dispatch and combine of one kind of kernel.

    alpha_us: what a call costs without bytes, within a node and, on top, between nodes. nvlink, rdma: rates of each
    level; bytes on NVLink include those that stay on their own rank, which the kernels copy as well, bytes on RDMA are
    those that leave the node. forward: NVLink's rates where kernels also forward what comes from other nodes; left out,
    they are NVLink's.
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
    """Microseconds a layer that policies add, as measured. all_reduce_us: one of a layer's counts, within a node and
    between nodes. solve_us: of a split by `epsim.kernels.split`; published_solve_us: of LPLB's interior point method.
    assign_us: from fractions to physical experts; waterfill_us: the shared expert's placing.
    Left out: timed_us, of a split by time, costs what solve_us says, joint_us, of `waterfill-joint`, what waterfill_us
    says, and router_us, of a router policy, what assign_us says."""

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

    @property
    def of_timed(self) -> float:
        return self.solve_us if self.timed_us is None else self.timed_us

    @property
    def of_joint(self) -> float:
        return self.waterfill_us if self.joint_us is None else self.joint_us

    @property
    def of_router(self) -> float:
        return self.assign_us if self.router_us is None else self.router_us


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a node of `ranks_per_node`.

    memory_gb: capacity. memory_gb_per_s, bf16_tflops, fp8_tflops: what kernels reach, not peaks. kernel_us: fixed cost
    of the expert computation's kernels. tile: rows to which grouped GEMMs pad each expert's tokens. exchange_sms of
    `sms` are taken by an exchange that runs beside computation. source: where the numbers come from.
    tables: JSON files beside this one that `epsim calibrate` measured (`epsim.cost.calibrated`), used where they fit.
    shared_grouped: whether a shared expert that stays on its token's rank is one more expert of the grouped computation
    (as in this project's runtime), rather than computed by itself.
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
            raise ValueError(f"exchange_sms {self.exchange_sms} leaves none of {self.sms} SMs to compute")


def load_hardware(name: str, option: str = "--hardware") -> Hardware:
    """`h100`, `h200`, `h800`, `b200`, or the path of a TOML file. option: named where it is unknown. Raises ValueError
    in one line."""
    content, where = read_card("machines", option, name)
    found = build(Hardware, content, where)
    assert isinstance(found, Hardware)
    return found


def _not_negative(spec: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}, give 0 or more")
