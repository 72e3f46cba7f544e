"""One block scored: what each stack gets, and how often a split problem is solved for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from epsim.kernels.split import Solution, solve_batched, solve_peak
from epsim.placement.base import Placement
from epsim.policies import copies as copies_module
from epsim.policies.apply import Setting, bind
from epsim.policies.copies import Copies
from epsim.policies.stack import parse_stack
from epsim.score.block import score_block
from epsim.traces.trace import Block, TokenBlock

LAYERS, EXPERTS, RANKS, TOP_K, STEPS, TOKENS = 2, 12, 4, 3, 5, 40
SETTING = Setting(0, 0.5, TOP_K, (0, 1), num_scores=EXPERTS)


def block() -> TokenBlock:
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(STEPS * TOKENS, LAYERS, EXPERTS)) + 2 * rng.gumbel(size=(LAYERS, EXPERTS))
    ids = np.argsort(-scores, axis=2)[:, :, :TOP_K].astype(np.int16)
    steps, source = np.repeat(np.arange(STEPS), TOKENS), np.tile(np.arange(TOKENS) * RANKS // TOKENS, STEPS)
    return TokenBlock(np.arange(STEPS), steps, source, ids, np.exp(scores).astype(np.float32))


def placement(seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    slots = np.concatenate([np.tile(np.arange(EXPERTS), (LAYERS, 1)), rng.integers(0, EXPERTS, (LAYERS, 4))], axis=1)
    return Placement(torch.from_numpy(rng.permuted(slots, axis=1)), EXPERTS, RANKS, 2)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Every call of the solver: problems, and whether the split is wanted."""
    calls: list[tuple[int, bool]] = []

    def count(structure: Any, counts: torch.Tensor, **options: Any) -> Solution:
        calls.append((counts[..., 0].numel(), options["want_split"]))
        return solve_batched(structure, counts, **options)

    monkeypatch.setattr(copies_module, "solve_batched", count)
    return calls


@pytest.mark.parametrize("level", ["tokens", "rank_counts", "counts"])
@pytest.mark.parametrize(
    ("stacks", "wanted"),
    [(("even",), [False]), (("even", "even"), [False]), (("even", "lplb"), [True]), (("lplb", "even", "lplb"), [True])],
)
def test_an_optimum_is_solved_once(
    stacks: tuple[str, ...], wanted: list[bool], level: str, solved: list[tuple[int, bool]]
) -> None:
    """One call for all stacks of a placement; the split's own solution gives the optimum where a stack solves it."""
    tokens = block()
    given: Block = tokens
    if level != "tokens":
        given = tokens.to_counts(EXPERTS) if level == "counts" else tokens.to_rank_counts(RANKS, EXPERTS)
    shared: dict[str, Copies] = {}
    setting = Setting(0, 0.0, TOP_K, (0, 1))
    bounds = [bind(parse_stack(f"contiguous+{text}"), placement(1), setting, shared) for text in stacks]
    scores = score_block([given] * len(bounds), bounds).stacks
    assert solved == [(STEPS * LAYERS, want) for want in wanted]
    counts = torch.from_numpy(tokens.to_counts(EXPERTS).counts).reshape(-1, EXPERTS)
    structure = bounds[0].copies.once(copies_module.split_structure)
    expected = solve_peak(structure, counts, torch.arange(LAYERS).repeat(STEPS)).bound.reshape(STEPS, LAYERS)
    for score in scores:
        assert torch.equal(score.optimum, expected)


def test_each_stack_as_if_alone(solved: list[tuple[int, bool]]) -> None:
    """Placements and routers have problems of their own; a stack's load and metrics are those it has alone."""
    texts = ("even", "lplb", "lplb+waterfill", "oea(k0=1)+even", "oea(k0=1)+lplb", "lplb(counts=gathered)")
    shared: dict[str, Copies] = {}
    bounds = [bind(parse_stack(f"contiguous+{text}"), placement(1), SETTING, shared) for text in texts]
    bounds += [bind(parse_stack("contiguous+lplb"), placement(2), SETTING, shared)]
    tokens = block()
    together = score_block([tokens] * len(bounds), bounds)
    # One for each placement of the recorded tokens, and one for each stack with a router.
    assert sorted(want for _, want in solved) == [False, True, True, True]
    for bound, score in zip(bounds, together.stacks, strict=True):
        alone = score_block([tokens], [bound])
        assert torch.equal(score.load.total, bound.load(tokens).total)
        assert torch.equal(score.optimum, alone.stacks[0].optimum)
        for key, value in score.metrics.items():
            other = alone.stacks[0].metrics[key]
            assert value == other if isinstance(value, str) else torch.equal(value.nan_to_num(-1), other.nan_to_num(-1))  # type: ignore[union-attr]
        np.testing.assert_array_equal(alone.seen.keys, together.seen.keys)
    recorded = tokens.to_counts(EXPERTS).counts
    np.testing.assert_array_equal(together.seen.total, recorded.sum(0))
    np.testing.assert_array_equal(together.seen.busy_layers, [LAYERS] * STEPS)
    assert not torch.equal(together.stacks[0].optimum, together.stacks[3].optimum), "a router changes the counts"


def test_a_problem_that_a_gpu_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver on a GPU reports a bad problem by its status, which nothing else looks at."""
    solution = solve_batched(
        Copies(placement(1)).once(copies_module.split_structure), torch.ones(1, LAYERS, EXPERTS, dtype=torch.int64)
    )
    solution.status[0, 1] = 2
    monkeypatch.setattr(copies_module, "solve_batched", lambda *_, **options: solution)
    with pytest.raises(ValueError, match=r"2\^53"):
        score_block([block()], [bind(parse_stack("contiguous+lplb"), placement(1), SETTING)])


def test_copies_forget_unless_asked_to_remember(solved: list[tuple[int, bool]]) -> None:
    """A caller that reuses a tensor, as the runtime does, gets the answer for what the tensor holds now."""
    counts = torch.ones(1, LAYERS, EXPERTS, dtype=torch.int64)
    copies = Copies(placement(1))
    before = copies.optimum(counts)
    counts *= 7
    assert torch.equal(copies.optimum(counts), solve_batched(copies.once(copies_module.split_structure), counts).bound)
    assert (copies.optimum(counts) > before).all()
    assert len(solved) == 3
