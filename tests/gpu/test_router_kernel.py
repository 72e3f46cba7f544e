"""The router kernel takes the experts that the policy takes on the CPU."""

from __future__ import annotations

import pytest
import torch

from epsim.kernels.router import Rule, reroute, route_logits
from epsim.policies.base import RouterWork
from epsim.policies.routing.oea import Oea
from epsim.policies.routing.schedule import parse_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
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
    tensors = (work.scores, work.weighs, work.expert_ids, work.weights, work.decode)
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
