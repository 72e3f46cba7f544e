"""router.cu, compiled for the host, chooses the same experts as the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.kernels.router import Rule, cuda
from epsim.policies.base import Routed, RouterWork
from epsim.policies.routing.oea import Oea
from epsim.policies.routing.schedule import parse_schedule

Build = Callable[..., Callable[..., None]]


def run_on_host(
    on_host: Build,
    policy: Oea,
    scores: torch.Tensor,
    top_k: int,
    given: dict[str, torch.Tensor],
    renormalise: bool = True,
    order: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    tokens, experts = scores.shape
    rule = Rule(parse_schedule(policy.k0, "oea", 2).steps, policy.p, policy.kmax, policy.maxp)
    assert cuda.uncovered(rule, tokens, experts, top_k) is None
    wanted = cuda.definitions(tokens, experts)
    source = cuda.source().replace((Path(cuda.__file__).parent / "cluster.cuh").read_text(), "")
    run = on_host(source, "cluster.h", "oea", wanted)
    width = min(max(policy.kmax or 0, top_k), experts)
    out = {"ids": torch.full((tokens, width), -7), "weights": torch.full((tokens, width), torch.nan)}
    out["active"] = torch.zeros((), dtype=torch.int64)
    argument = cuda.arguments_of(rule, scores, top_k, 1.0, renormalise, {"scores": scores} | given | out)
    run(argument, wanted["CLUSTER"], cuda.threads_of(tokens), 256, order)
    return out["ids"], out["weights"], int(out["active"])


def drawn(tokens: int, experts: int, top_k: int, seed: int, ties: bool) -> RouterWork:
    source = torch.Generator().manual_seed(seed)
    scores = (2 * torch.randn(tokens, experts, generator=source)).softmax(-1)
    if ties:
        scores = (scores * 64).ceil() / 64
        scores[torch.rand(scores.shape, generator=source) < 0.1] = -torch.inf
        scores[0, 0] = torch.nan
    ids = scores.nan_to_num(nan=-torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :top_k].clone()
    if ties:  # A choice that is not the best by score, as one within groups.
        ids = torch.rand(tokens, experts, generator=source).topk(top_k, dim=1).indices
        ids[torch.rand(ids.shape, generator=source) < 0.2] = -1
    ids[tokens // 2 : tokens // 2 + tokens // 4] = -1
    weight_basis = scores.nan_to_num(nan=0.0).clamp(min=0)
    weights = weight_basis.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    decode = torch.rand(tokens, generator=source) < 0.8
    return RouterWork(scores, weight_basis, ids, weights, decode)


def given_of(work: RouterWork) -> dict[str, Any]:
    return {
        "weight_basis": work.weight_basis,
        "choice": work.expert_ids,
        "choice_weights": work.weights,
        "selected": work.decode,
    }


def check(result: tuple[torch.Tensor, torch.Tensor, int], wanted: Routed) -> None:
    ids, weights, active = result
    assert torch.equal(ids, wanted.expert_ids)
    torch.testing.assert_close(weights, wanted.weights, rtol=2e-6, atol=1e-9)
    assert active >= len(set(ids.flatten().tolist()) - {-1})


@pytest.mark.parametrize(
    "policy", [Oea("3"), Oea("1"), Oea("4@3/2@9"), Oea("4", p=0.6, kmax=9, maxp=12), Oea("2@40", maxp=2)], ids=str
)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 40, 4), (16, 128, 8), (21, 64, 6), (150, 32, 5)])
@pytest.mark.parametrize("ties", [False, True])
def test_takes_what_the_policy_takes(
    on_host: Build, policy: Oea, tokens: int, experts: int, top_k: int, ties: bool
) -> None:
    work = drawn(tokens, experts, top_k, tokens, ties)
    given = given_of(work)
    check(run_on_host(on_host, policy, work.scores, top_k, given, order=int(ties) * 5), policy.route(work))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("policy", [Oea("3"), Oea("4", p=0.4, kmax=9, maxp=12), Oea("2@40", maxp=2)], ids=str)
def test_from_logits(on_host: Build, policy: Oea, renormalise: bool) -> None:
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 70, generator=source) * 2
    live = torch.rand(20, generator=source) < 0.7
    chance = logits.softmax(-1)
    ids = logits.topk(6, dim=-1).indices
    weights = chance.gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    padded = ids.masked_fill(~live[:, None], -1)
    work = RouterWork(
        logits, chance, padded, weights.masked_fill(~live[:, None], 0.0), torch.ones(20, dtype=torch.bool)
    )
    found = run_on_host(on_host, policy, logits, 6, {"selected": live}, renormalise)
    check(found, policy.route(work))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 18), st.integers(1, 6), st.sampled_from([1.0, 0.5, 0.8]))
def test_any_batch(on_host: Build, seed: int, tokens: int, k0: int, p: float) -> None:
    work = drawn(tokens, 48, 6, seed, ties=bool(seed % 2))
    policy = Oea(str(k0), p=p, kmax=[None, 7][seed % 2], maxp=[None, 9, 48][seed % 3])
    given = given_of(work)
    check(run_on_host(on_host, policy, work.scores, 6, given), policy.route(work))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rule": Rule(((2, 7),))}, "each with a k0 from 1 to k .6"),
        ({"rule": Rule(((2, 0),))}, "each with a k0 from 1 to k .6"),
        ({"rule": Rule(((9, 4), (4, 2)))}, "give ascending batch sizes"),
        ({"rule": Rule(())}, "give ascending batch sizes"),
        ({"rule": Rule(((2, 3),), kmax=5)}, "kmax 5 is less than k 6"),
        ({"rule": Rule(((2, 3),), maxp=2)}, "maxp 2 is less than k0 3"),
        ({"rule": Rule(((2, 3),), kmax=13)}, "kmax 13, but there are 12 experts"),
        ({"scores": torch.zeros(5, 12, dtype=torch.bfloat16)}, r"scores: \[5, 12\] torch.bfloat16"),
        ({"scores": torch.zeros(12)}, r"not \[..., B, E\]"),
        ({"scores": torch.zeros(513, 12)}, "513 tokens, not up to 512"),
        ({"choice": torch.zeros(5, 6, dtype=torch.int32)}, r"choice: \[5, 6\] torch.int32 .* not \[5, 6\] torch.int64"),
        ({"choice": torch.zeros(5, 5, dtype=torch.int64)}, r"choice: \[5, 5\] torch.int64 .* not \[5, 6\]"),
        ({"weight_basis": torch.zeros(5, 11)}, r"weight_basis: \[5, 11\]"),
        ({"selected": torch.ones(5)}, r"selected: \[5\] torch.float32 .* not \[5\] torch.bool"),
        ({"selected": torch.ones(4, dtype=torch.bool)}, r"selected: \[4\]"),
    ],
)
def test_what_the_kernel_would_misread_is_told(change: dict[str, Any], says: str) -> None:
    work = drawn(5, 12, 6, 0, False)
    given = given_of(work)
    cuda.check(Rule(((2, 3),)), work.scores, 6, given)
    given |= {name: value for name, value in change.items() if name in given}
    with pytest.raises(ValueError, match=says):
        cuda.check(change.get("rule", Rule(((2, 3),))), change.get("scores", work.scores), 6, given)
