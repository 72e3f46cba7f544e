"""The dispatch kernels, run on the host, give the same integers as the policies for the tokens of every rank."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.dispatch import Dispatcher, Rule
from epsim.kernels.dispatch import cuda as dispatch_cuda
from epsim.kernels.dispatch.rule import SharedRule
from epsim.placement.base import Placement
from epsim.policies.apply import BoundStack
from epsim.policies.hashing import ordinal
from epsim.policies.stack import parse_stack
from tests.kernels.dispatch.host import (
    SMALL,
    STACKS,
    HostDispatcher,
    arguments_of,
    bound_stack,
    build,
    check,
    found_on,
    ordinals,
    random_ids,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory)


def random_placement(rng: np.random.Generator, layers: int, experts: int, ranks: int, spare: int) -> Placement:
    """Every expert once and copies drawn with replacement, some of them twice on a rank; some slots are empty; in up to
    3 nodes."""
    physical = -(-(experts + spare) // ranks) * ranks
    slots = np.tile(np.arange(experts), (layers, 1))
    more = np.minimum(rng.geometric(0.2, (layers, physical - experts)) - 1, experts - 1)
    more = np.where(rng.random(more.shape) < 0.2, -1, more)
    slots = rng.permuted(np.concatenate([slots, more], axis=1), axis=1)
    return Placement(torch.from_numpy(slots), experts, ranks, int(rng.integers(1, min(ranks, 3) + 1)))


def dispatchers_of(
    library: ctypes.CDLL, text: str, placement: Placement, top_k: int, cost: float, most: int, descending: bool = False
) -> tuple[list[Dispatcher], BoundStack]:
    bound = bound_stack(text, placement, top_k, cost, seed=-5)
    found: list[Dispatcher] = []
    for rank in range(placement.num_ranks):
        plain, named = arguments_of(bound, rank, most)
        found.append(HostDispatcher(library, descending, *plain, **named))
    return found, bound


@pytest.mark.parametrize("text", STACKS)
@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.booleans(),
)
def test_random_batches(
    library: ctypes.CDLL, text: str, seed: int, ranks: int, spare: int, top_k: int, cost: float, descending: bool
) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, experts=int(rng.integers(top_k, 20)), ranks=ranks, spare=spare)
    tokens = rng.integers(0, 130, ranks) * (rng.random(ranks) < 0.8)
    dispatchers, bound = dispatchers_of(library, text, placement, top_k, cost, 130, descending)
    blanks = float(rng.choice([0.0, 0.2]))
    ids = random_ids(rng, tokens.tolist(), 2, placement.num_experts, top_k, blanks)
    check(bound, dispatchers, ids, step=int(rng.integers(0, 2**40)))


@pytest.mark.parametrize("text", STACKS)
def test_hostile_batches(library: ctypes.CDLL, text: str) -> None:
    rng = np.random.default_rng(1)
    placement = random_placement(rng, layers=2, experts=9, ranks=3, spare=30)
    dispatchers, bound = dispatchers_of(library, text, placement, 2, 1.0, 300)
    none = torch.empty(0, 2, 2, dtype=torch.int64)
    same = torch.zeros(300, 2, 2, dtype=torch.int64)  # one expert, twice a token
    for ids in (
        [none, none, none],
        [same, same, same],
        [none, same, none],
        [same - 1, same - 1, none],
        [same + 8, same[:64], same[:63] - 1],
        random_ids(rng, [300, 64, 63], 2, 9, 2, 0.0),
    ):
        check(bound, dispatchers, ids, step=3)


@pytest.mark.parametrize("text", ["lplb", "lplb(counts=gathered)+waterfill", "lplb+waterfill(candidates=all)"])
def test_more_ranks_than_a_warp_has_lanes(library: ctypes.CDLL, text: str) -> None:
    rng = np.random.default_rng(2)
    placement = random_placement(rng, layers=1, experts=40, ranks=70, spare=500)
    dispatchers, bound = dispatchers_of(library, text, placement, 8, 1.0, 80)
    tokens = rng.integers(0, 80, 70) * (rng.random(70) < 0.7)
    ids = random_ids(rng, tokens.tolist(), 1, 40, 8, 0.1)
    check(bound, dispatchers, ids, step=0, ranks=(0, 2, 33, 69))


def test_of_equally_light_ranks_above_the_waterline_the_first_takes_the_token(library: ctypes.CDLL) -> None:
    placement = Placement(torch.arange(4)[None], 4, 4)
    dispatchers, bound = dispatchers_of(library, "even+waterfill", placement, 2, 0.01, 300)
    # Ranks serve 300, 200, 200 and 0; the waterline is near 180, and rank 0's own tokens visit ranks 2 and 1.
    visits, heavy = torch.tensor([2, 1]).expand(100, 1, 2), torch.tensor([0, -1]).expand(300, 1, 2)
    ids = [visits, heavy, visits, visits[:0]]
    check(bound, dispatchers, ids, step=0)
    shared = found_on(dispatchers, [part[:, 0].contiguous() for part in ids], 0, 0, [0])[0][1]
    assert torch.equal(shared, torch.ones(100, dtype=torch.int64))


@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.integers(1, 9), st.booleans())
@settings(max_examples=20)
def test_tokens_are_counted_in_order(
    library: ctypes.CDLL, seed: int, tokens: int, top_k: int, descending: bool
) -> None:
    rng = np.random.default_rng(seed)
    placement = Placement(torch.arange(12)[None], 12, 1)
    (dispatcher,), _ = dispatchers_of(library, "even", placement, top_k, 0.0, 700, descending)
    ids = torch.from_numpy(rng.integers(-1, rng.integers(1, 13), (tokens, top_k)))
    counts = dispatcher.count(ids)
    flat = ids.flatten()
    assert counts.tolist() == [*torch.bincount(flat[flat >= 0], minlength=12).tolist(), int((ids >= 0).any(1).sum())]
    assert torch.equal(ordinals(dispatcher, ids), torch.where(flat >= 0, ordinal(flat), -1))


def test_rules() -> None:
    def rule(text: str, cost: float = 1.0) -> Rule:
        stack = parse_stack(text)
        return Rule.of(stack.split, stack.shared, cost, 0)

    collectives = {
        "lplb": "all_reduce",
        "lplb-sampled": "all_reduce",
        "lplb(counts=gathered)": "all_gather",
        "even": "none",
        "static+waterfill(counts=local)": "none",
        "lplb+waterfill(counts=local)": "all_reduce",
        "lplb+waterfill": "all_gather",
        "even+waterfill": "all_gather",
    }
    for text, collective in collectives.items():
        assert rule(text).collective == collective, text
        assert rule(text).uncovered() is None
    assert rule("lplb+waterfill", cost=0).collective == "all_reduce"
    assert rule("lplb+waterfill", cost=0).shared == SharedRule("none")
    timed = "lplb(objective=time,a=1,b=2)"
    assert rule(timed).uncovered() == "split lplb(objective=time) has no kernel"
    for text in ("lplb-ipm", "random+waterfill", "lplb-sampled+waterfill(counts=local)"):
        assert rule(text).uncovered() is not None, text


def test_what_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    placement = Placement(torch.arange(1025)[None], 1025, 1)
    with pytest.raises(ValueError, match="1025 experts"):
        dispatchers_of(library, "even", placement, 1, 0.0, 10)
    placement = Placement(torch.tensor([[0, 1, 2, 0]]), 3, 2)
    with pytest.raises(ValueError, match="random has no kernel"):
        dispatchers_of(library, "random+waterfill", placement, 1, 1.0, 10)
    (dispatcher, _), _ = dispatchers_of(library, "lplb(counts=gathered)", placement, 2, 0.0, 10)
    with pytest.raises(ValueError, match=r"ids are \[11, 2\]"):
        dispatcher.count(torch.zeros(11, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"counts are \[4\]"):
        dispatcher.assign(0, dispatcher.count(torch.zeros(10, 2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"ids are .* on meta, not .* on cpu"):
        dispatcher.count(torch.zeros(10, 2, dtype=torch.int64, device="meta"))
    rows = dispatcher.count(torch.zeros(10, 2, dtype=torch.int64)).repeat(2, 1)
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=rf"layer {layer} is outside 0\.\.0"):
            dispatcher.assign(layer, rows)
    bound = bound_stack("even", placement, 2, 0.0, 0)
    for rank in (-1, 2):
        plain, named = arguments_of(bound, rank, 10)
        with pytest.raises(ValueError, match=f"rank {rank}, nodes of 2 ranks and 1 layers do not fit"):
            HostDispatcher(library, False, *plain, **named)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_they_compile_for_hopper_without_spills(tmp_path: Path) -> None:
    text = tmp_path / "dispatch.cu"
    text.write_text(dispatch_cuda.source())
    options = ["-arch=sm_90", "-std=c++17", "--fmad=false", "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
    options += [f"-D{name}={value}" for name, value in dispatch_cuda.Sizes().definitions.items()]
    built = subprocess.run(
        ["nvcc", *options, "-o", tmp_path / "dispatch.cubin", text], check=True, capture_output=True, text=True
    )
    assert built.stderr.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 5
    assert SMALL.definitions != dispatch_cuda.Sizes().definitions
