"""The results of a replay do not depend on how its steps are cut into blocks, or on the number of threads."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.cost.calibrated import Calibration
from epsim.cost.experts_time import ExpertsTime
from epsim.cost.layer_time import LayerTiming
from epsim.placement.base import Cluster
from epsim.policies import apply
from epsim.policies.grammar import policy_text
from epsim.policies.routing import block as routing_block
from epsim.policies.routing.oea import Oea
from epsim.policies.stack import PolicyStack, parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.results import ResultsData
from epsim.traces.store import StoredTrace, TraceWriter
from epsim.traces.trace import Block, TokenBlock, TraceMeta
from tests.policies.registered import every, stack_of, write_example
from tests.score.test_properties import EXCHANGE, FORMS, H200, V3

LAYERS, RANKS, EXPERTS, TOP_K = 9, 8, 24, 8
"""At least 8 of each: NumPy and torch add fewer numbers in order, but more in several partial sums."""
MODEL = dataclasses.replace(V3, num_experts=EXPERTS, top_k=TOP_K)
SIZES = (70, 9, 0, 300, 5, 41, 1, 64)
"""Tokens of each step."""
CLUSTER = Cluster(RANKS, 2, 8, 2)
SHARED = ("local", "waterfill", "waterfill-joint", "waterfill-joint(candidates=visited)")
SPLITS = ("lplb", "random")


@dataclasses.dataclass(frozen=True)
class Sizes:
    steps: tuple[int, ...] = SIZES
    layers: int = LAYERS
    cluster: Cluster = CLUSTER
    cost: float = 1.0


def draw_trace(folder: Path, level: str, sizes: Sizes, seed: int) -> StoredTrace:
    """Skewed tokens with all scores. Every third step is a prefill step, and the last token has no experts."""
    rng = np.random.default_rng(seed)
    step = np.repeat(np.arange(len(sizes.steps)), sizes.steps)
    num_ranks = sizes.cluster.num_ranks
    source = np.concatenate([np.sort(rng.integers(0, num_ranks, size)) for size in sizes.steps]).astype(np.int64)
    scores = rng.dirichlet(np.full(EXPERTS, 0.3), (len(step), sizes.layers)).astype(np.float16)
    ids = np.argsort(-scores.astype(float), axis=2, kind="stable")[..., :TOP_K].astype(np.int16)
    ids[-1:] = -1
    phase = np.array(["decode" if number % 3 else "prefill" for number in range(len(sizes.steps))], dtype=object)
    block: Block = TokenBlock(2 * np.arange(len(sizes.steps)) + 5, step, source, ids, scores, phase=phase)
    assert isinstance(block, TokenBlock)
    known = EXPERTS if level == "tokens" else 0
    if level != "tokens":
        block = block.to_rank_counts(num_ranks, EXPERTS) if level == "rank_counts" else block.to_counts(EXPERTS)
    meta = TraceMeta(
        level, sizes.layers, EXPERTS, TOP_K, 0 if level == "counts" else num_ranks,  # type: ignore[arg-type]
        shared_cost=sizes.cost, phase="mixed", num_scores=known,
    )  # fmt: skip
    with TraceWriter(folder / "trace.parquet", meta) as writer:
        writer.append(block)
    return StoredTrace(folder / "trace.parquet")


def pays(reader: Any) -> bool:
    """Whether the reader's budget is enough for the model."""
    try:
        reader.bytes_read(*torch.ones(2, 1).double(), MODEL.hidden, MODEL.intermediate, MODEL.weight_bytes, TOP_K)
    except ValueError:
        return False
    return True


def every_stack() -> list[PolicyStack]:
    """Each split with each shared policy, under the default router and one that gives more experts than the model's k,
    and each placement, router and reader in a few stacks."""
    eplb, wide, splits, shared = parse_stack("eplb"), Oea("2", kmax=12), every("split"), every("shared")
    stacks = [
        stack_of(placement=eplb.placement, split=split, shared=share, router=router)
        for router, split, share in itertools.product((eplb.router, wide), splits, shared)
    ]
    some = ("eplb", "eplb+lplb+waterfill", "eplb+random", "eplb+lplb+waterfill-joint(candidates=visited)")
    for text, router in itertools.product(some, (*every("router"), wide)):
        stacks.append(dataclasses.replace(parse_stack(text), router=router))
    stacks += [
        dataclasses.replace(parse_stack("eplb+lplb"), reader=reader) for reader in every("reader") if pays(reader)
    ]
    placements = [each for each in every("placement") if each.name != "searched"]  # a search stops by the clock
    stacks += [dataclasses.replace(parse_stack("static+waterfill"), placement=each) for each in placements]
    return [stack for stack in dict.fromkeys(stacks) if stack is not None]


def few_stacks() -> list[PolicyStack]:
    """Every split and every shared policy with a few of the others, and the other policies once or twice."""
    few, seen = [], set()
    for stack in every_stack():
        reader = (stack.reader.name, getattr(stack.reader, "quota", ""), getattr(stack.reader, "score", ""))
        split, shared = policy_text(stack.split), policy_text(stack.shared)
        if stack.reader.acts:
            wanted = reader not in seen
            seen.add(reader)
        elif stack.router.acts:
            wanted = split == "lplb" and shared == SHARED[-1]
        else:
            wanted = split in SPLITS or shared in SHARED
        few += [stack] * wanted
    return few


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The places at which two results differ, and the values there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [place for key in one for place in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [place for n, pair in enumerate(zip(one, other)) for place in differences(*pair, f"{path}[{n}]")]
    return [] if one == other else [f"{path}: {one!r} is not {other!r}"]


def check_cuts(
    trace: StoredTrace,
    stacks: Sequence[PolicyStack],
    sizes: Sizes,
    cuts: Sequence[tuple[int, int, int]],
    roofline: bool = True,
) -> None:
    """Compares the results of cuts with those of one block. A cut: steps of a block, threads, and the most elements of
    an intermediate tensor."""
    able = []
    for stack in stacks:
        try:
            stack.check_level(trace.meta.level, True, sizes.cost > 0)
        except ValueError:
            continue
        able.append(("", stack))
    cluster = sizes.cluster
    timings = [
        LayerTiming(
            ExpertsTime(H200, MODEL, FORMS), cluster.num_nodes, measured=Calibration(H200, exchange=(EXCHANGE,))
        )
    ]
    if roofline:
        timings.append(LayerTiming(ExpertsTime(H200, MODEL), cluster.num_nodes))

    def results(steps: int, threads: int, cells: int) -> list[ResultsData]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("epsim.score.statistics.NUM_RESAMPLES", 8)
            patch.setattr("epsim.replaying._steps_a_block", lambda *_: steps)
            patch.setattr(apply, "CELLS", cells)
            patch.setattr(routing_block, "CELLS", cells)
            patch.setenv("EPSIM_THREADS", str(threads))
            return [
                replay(trace, ReplayOptions(cluster, tuple(able), timing=timing, plan_share=0.1)) for timing in timings
            ]

    assert len({stack for _, stack in able}) == len(able) > 0
    whole = results(len(sizes.steps), 1, 1 << 30)
    assert whole[0]["stacks"][0]["metrics"]["layer_time_us"]["mean"] > 0
    for cut in cuts:
        assert differences(results(*cut), whole) == [], cut


@pytest.mark.parametrize("level", ["counts", "rank_counts", "tokens"])
def test_blocks_and_threads(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes()
    write_example(tmp_path, monkeypatch, EXPERTS, RANKS, range(LAYERS))
    cuts = [(1, 2, 1 << 30), (2, 1, 1), (7, 2, 1 << 30)]
    check_cuts(draw_trace(tmp_path, level, sizes, 1), few_stacks(), sizes, cuts, roofline=False)


@pytest.mark.long
@settings(max_examples=6)
@given(st.sampled_from(["counts", "rank_counts", "tokens", "tokens"]), st.integers(0, 2**32 - 1))
def test_any_blocks_of_any_stacks(level: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_layers, num_steps = int(rng.choice([1, 2, 6, 8, 24])), int(rng.integers(1, 12)), rng.integers(3, 30)
    nodes = int(rng.choice([nodes for nodes in (1, 2, 3, 8) if num_ranks % nodes == 0]))
    sizes = Sizes(
        tuple((rng.exponential(60, num_steps) * (rng.random(num_steps) < 0.8)).astype(int).tolist()),
        num_layers,
        Cluster(num_ranks, nodes, num_ranks * int(rng.integers(1, 4)), nodes),
        float(rng.choice([0.0, 0.3, 1.0, 2.0])),
    )
    stacks = every_stack()
    drawn = [stacks[number] for number in rng.choice(len(stacks), 25, replace=False)]
    some = list(dict.fromkeys([parse_stack("eplb+lplb"), *drawn]))  # counts suffice for the first
    cuts = [
        (steps, int(rng.integers(1, 3)), int(rng.choice([1, 1 << 12, 1 << 18]))) for steps in (1, 2, 7, int(num_steps))
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        write_example(Path(folder), patch, EXPERTS, num_ranks, range(num_layers))
        check_cuts(draw_trace(Path(folder), level, sizes, seed), some, sizes, cuts)
