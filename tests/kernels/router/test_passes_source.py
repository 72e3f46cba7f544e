"""passes.cu, compiled for the host, gives the numbers that the policy sums over ranks, and the same experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.router import Passes, Plan, Rule, cuda
from epsim.kernels.router.passes import uncovered
from epsim.policies.base import Routed, Router, RouterWork
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand
from epsim.policies.routing.schedule import parse_schedule
from tests.kernels.router.test_router_source import drawn

Build = Callable[..., Callable[..., None]]
POLICIES: list[Any] = [
    Pruned("2"),
    Pruned("3@9/2@30"),
    Oea("3"),
    Oea("4@3/2@9"),
    Oea("4", p=0.6, kmax=9, maxp=12),
    Oea("2@60", maxp=2),
    OeaEp("2"),
    OeaEp("3@9/1@30"),
    Lynx(9),
    Lynx(400),
    MaskLowDemand(3),
    MaskLowDemand(60),
]


def plan_of(policy: Any) -> Plan:
    if isinstance(policy, Lynx | MaskLowDemand):
        number = policy.keep if isinstance(policy, Lynx) else policy.least
        assert number is not None
        return Plan("popular" if isinstance(policy, Lynx) else "least", number=number)
    steps = parse_schedule(policy.k0, policy.name, 1).steps
    if isinstance(policy, Oea):
        return Plan("union", Rule(parse_schedule(policy.k0, "oea", 2).steps, policy.p, policy.kmax, policy.maxp))
    if isinstance(policy, OeaEp):
        return Plan("ranks", Rule(parse_schedule(policy.k0, "oea-ep", 2).steps))
    return Plan("base", Rule(steps))


def on_the_host(on_host: Build, order: int) -> type[Passes]:
    """The same, its kernels by the emulator."""

    class OnHost(Passes):
        def _launch(self, name: str, cluster: int, blocks: int, shared: int, argument: Any) -> None:
            text = cuda.source("passes.cu").replace((Path(cuda.__file__).parent / "cluster.cuh").read_text(), "")
            experts = -(-self.tensors["scores"].shape[-1] // 32) * 32
            if blocks:
                run = on_host(text, "cluster.h", name, {"EXPERTS": experts, "CLUSTER": cluster})
                run(argument, blocks, 96, shared, order)

    return OnHost


def rows(work: RouterWork, part: slice, total: Callable[[torch.Tensor], torch.Tensor]) -> RouterWork:
    names = ("scores", "weight_basis", "expert_ids", "weights", "decode")
    return dataclasses.replace(work, total=total, **{name: getattr(work, name)[part] for name in names})


def summed_by(policy: Router, parts: list[RouterWork]) -> tuple[list[torch.Tensor], list[Routed]]:
    """What the policy's tensor operations sum, a part each, and what each part's tokens then take."""
    messages: list[torch.Tensor] = []

    def keep(numbers: torch.Tensor) -> torch.Tensor:
        messages.append(numbers)
        return numbers

    for part in parts:
        policy.route(dataclasses.replace(part, total=keep))
    whole = torch.stack(messages).sum(0) if messages else torch.empty(0)
    return messages, [policy.route(dataclasses.replace(part, total=lambda _: whole)) for part in parts]


def draw_holds(experts: int, ranks: int, copies: int, seed: int) -> torch.Tensor:
    """[E, R] bool: 1 to `copies` ranks each."""
    source = torch.Generator().manual_seed(seed)
    chance = torch.rand(experts, ranks, generator=source)
    number = torch.randint(1, copies + 1, (experts, 1), generator=source)
    return chance.argsort(-1).argsort(-1) < number


def compare(passes: type[Passes], policy: Any, work: RouterWork, cuts: list[int]) -> None:
    parts = [rows(work, slice(a, b), work.total) for a, b in zip([0, *cuts], [*cuts, len(work.decode)], strict=True)]
    messages, wanted = summed_by(policy, parts)
    plan = plan_of(policy)
    assert plan.settled == (not messages) == (not policy.whole_batch)
    runs = [
        passes.of(plan, part.scores, part.weight_basis, part.expert_ids, part.weights, part.decode, part.holds)
        for part in parts
    ]
    if messages:
        for run, message in zip(runs, messages, strict=True):
            assert torch.equal(run.demand(), message)
    for run, routed in zip(runs, wanted, strict=True):
        ids, weights = run.answer(torch.stack(messages).sum(0) if messages else None)
        assert torch.equal(ids, routed.expert_ids)
        torch.testing.assert_close(weights, routed.weights, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "cuts"), [(60, 70, 5, [21, 21, 50]), (9, 128, 8, [])])
@pytest.mark.parametrize("ties", [False, True])
def test_each_rank_sums_and_takes_what_the_policy_does(
    on_host: Build, policy: Any, tokens: int, experts: int, top_k: int, cuts: list[int], ties: bool
) -> None:
    work = drawn(tokens, experts, top_k, tokens, ties)
    work = dataclasses.replace(work, holds=draw_holds(experts, 4, 1 + 2 * ties, tokens))
    compare(on_the_host(on_host, int(ties) * 5), policy, work, cuts)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 40), copies=st.integers(1, 4), tokens=st.integers(1, 14))
def test_which_experts_find_room(on_host: Build, seed: int, ranks: int, copies: int, tokens: int) -> None:
    work = drawn(tokens, 50, 6, seed, False)
    work = dataclasses.replace(work, holds=draw_holds(50, ranks, min(copies, ranks), seed))
    compare(on_the_host(on_host, 0), OeaEp(str(1 + seed % 3)), work, [tokens // 2])


def test_batches_along_leading_axes(on_host: Build) -> None:
    works = [drawn(7, 40, 4, seed, bool(seed % 2)) for seed in range(3)]
    names = ("scores", "weight_basis", "expert_ids", "weights", "decode")
    holds = torch.stack([draw_holds(40, 3, 2, seed) for seed in range(3)])
    tensors = {name: torch.stack([getattr(work, name) for work in works]) for name in names}
    policy = OeaEp("2")
    run = on_the_host(on_host, 0).of(plan_of(policy), **tensors, holds=holds)
    ids, _ = run.answer(run.demand())
    for index, work in enumerate(works):
        alone = policy.route(dataclasses.replace(work, holds=holds[index]))
        assert torch.equal(ids[index], alone.expert_ids)


def test_what_is_not_covered_is_said() -> None:
    assert uncovered(Plan("union", Rule(((2, 3),))), 128, 8, 0) is None
    assert "600 experts" in str(uncovered(Plan("popular", number=3), 600, 8, 0))
    assert "kmax 4 is less than k 8" in str(uncovered(Plan("union", Rule(((2, 3),), kmax=4)), 128, 8, 0))
    assert "65 ranks, more than 64" in str(uncovered(Plan("ranks", Rule(((2, 3),))), 128, 8, 65))
