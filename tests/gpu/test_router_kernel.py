"""The router kernel chooses the same experts as the policy on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epsim.kernels.router import Rule, reroute, route_logits
from epsim.policies.base import RouterWork
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand
from epsim.policies.routing.schedule import parse_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
POLICIES = [Oea("3"), Oea("8"), Oea("6@4/3@16"), Oea("5", p=0.6, kmax=9, maxp=20), Oea("2@400", maxp=4)]


def rule_of(policy: Oea) -> Rule:
    return Rule(parse_schedule(policy.k0, "oea", 2).steps, policy.p, policy.kmax, policy.maxp)


def work_of(batches: int, tokens: int, experts: int, ties: bool) -> RouterWork:
    source = torch.Generator().manual_seed(tokens + experts)
    scores = (2 * torch.randn(batches, tokens, experts, generator=source)).softmax(-1)
    if ties:
        scores = (scores * 256).ceil() / 256
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :8].clone()
    ids[:, -(tokens // 8) :] = -1
    weights = scores.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    return RouterWork(scores, scores, ids, weights, torch.rand(batches, tokens, generator=source) < 0.9)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("experts", [64, 128, 512])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 100, 512])
@pytest.mark.parametrize("ties", [False, True])
def test_takes_what_the_policy_takes(policy: Oea, experts: int, tokens: int, ties: bool) -> None:
    work = work_of(3, tokens, experts, ties)
    wanted = policy.route(work)
    tensors = (work.scores, work.weight_basis, work.expert_ids, work.weights, work.decode)
    ids, weights, active = reroute(rule_of(policy), *(tensor.cuda() for tensor in tensors))
    assert torch.equal(ids.cpu(), wanted.expert_ids)
    torch.testing.assert_close(weights.cpu(), wanted.weights, rtol=3e-6, atol=1e-9)
    if bool(work.decode.all()):
        assert active.tolist() == [len(set(batch.flatten().tolist()) - {-1}) for batch in wanted.expert_ids]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_from_logits_in_a_graph(tokens: int, renormalise: bool) -> None:
    policy = Oea("4", p=0.5, kmax=9, maxp=24)
    logits, live = torch.empty(tokens, 128, device="cuda"), torch.rand(tokens, device="cuda") < 0.8
    logits.normal_()
    route_logits(rule_of(policy), logits, 8, renormalise, 2.5, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights, _ = route_logits(rule_of(policy), logits, 8, renormalise, 2.5, live)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        here = logits.cpu()
        chance = here.softmax(-1)
        chosen = here.topk(8, dim=-1).indices
        own = chance.gather(-1, chosen)
        own = 2.5 * (own / own.sum(-1, keepdim=True) if renormalise else own)
        padding = ~live.cpu()[:, None]
        work = RouterWork(here, chance, chosen.masked_fill(padding, -1), own.masked_fill(padding, 0.0), ~padding[:, 0])
        wanted = policy.route(work)
        assert torch.equal(ids.cpu(), wanted.expert_ids)
        torch.testing.assert_close(weights.cpu(), wanted.weights, rtol=1e-5, atol=1e-8)


ROUTERS: list[Any] = [
    Pruned("3"),
    Pruned("6@4/3@16"),
    *POLICIES,
    OeaEp("3"),
    OeaEp("5@4/3@16"),
    Lynx(20),
    MaskLowDemand(3),
]
TENSORS = ("scores", "weight_basis", "expert_ids", "weights", "decode")
Total = Callable[[torch.Tensor], torch.Tensor]


def held(experts: int, ranks: int) -> torch.Tensor:
    """[E, R] bool: one to three copies."""
    source = torch.Generator().manual_seed(experts)
    place = torch.rand(experts, ranks, generator=source).argsort(-1).argsort(-1)
    return place < torch.randint(1, 4, (experts, 1), generator=source)


def part_of(work: RouterWork, part: slice, total: Total, device: str = "cpu") -> RouterWork:
    tensors = {name: getattr(work, name)[:, part].to(device) for name in TENSORS}
    assert work.holds is not None
    # The policies' own choice has the same tensor for both.
    return RouterWork(**tensors | {"weight_basis": tensors["scores"]}, holds=work.holds.to(device), total=total)


def asked(policy: Any, work: RouterWork, part: slice) -> list[torch.Tensor]:
    """What a part's tensor operations sum on a CPU: one, or none."""
    found: list[torch.Tensor] = []

    def keep(numbers: torch.Tensor) -> torch.Tensor:
        found.append(numbers)
        return numbers

    policy.route(part_of(work, part, keep))
    return found


@pytest.mark.parametrize("policy", ROUTERS, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "cut"), [(20, 128, 7), (700, 128, 3), (300, 512, 150), (9, 128, 0)])
@pytest.mark.parametrize("ties", [False, True])
def test_parts_of_a_batch_sum_and_take_what_the_policy_does(
    policy: Any, tokens: int, experts: int, cut: int, ties: bool
) -> None:
    work = dataclasses.replace(work_of(2, tokens, experts, ties), holds=held(experts, 8))
    parts = [slice(0, cut), slice(cut, tokens)]
    numbers = [asked(policy, work, part) for part in parts]
    for part, own in zip(parts, numbers):
        summed = torch.stack([message[0] for message in numbers]).sum(0) if own else None
        got: list[torch.Tensor] = []

        def total(message: torch.Tensor, got: list[torch.Tensor] = got, summed: Any = summed) -> torch.Tensor:
            got.append(message.cpu())
            answer: torch.Tensor = summed.cuda()
            return answer

        found = policy.route(part_of(work, part, total, "cuda"))
        wanted = policy.route(part_of(work, part, lambda _, summed=summed: summed))  # type: ignore[misc]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, own, strict=True))
        assert torch.equal(found.expert_ids.cpu(), wanted.expert_ids)
        torch.testing.assert_close(found.weights.cpu(), wanted.weights, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("policy", ROUTERS, ids=str)
def test_a_part_is_captured_without_waiting(policy: Any) -> None:
    works = [dataclasses.replace(work_of(1, 20, 128, seed % 2 > 0), holds=held(128, 4)) for seed in range(2)]
    mine, theirs = slice(0, 9), slice(9, 20)
    other = [message.cuda() for message in asked(policy, works[0], theirs)]
    static = part_of(works[0], mine, lambda message: message + other[0], "cuda")
    policy.route(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            routed = policy.route(static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for work in works:
        fresh = part_of(work, mine, static.total, "cuda")
        for name in TENSORS:
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        wanted = policy.route(part_of(work, mine, lambda message: message + other[0].cpu()))
        assert torch.equal(routed.expert_ids.cpu(), wanted.expert_ids)
