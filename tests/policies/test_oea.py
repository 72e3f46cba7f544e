"""Routers by the tokens of their batch: against Algorithm 1 read literally, and by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epsim.policies.base import Routed, RouterWork
from epsim.policies.routing.oea import Oea, Pruned
from epsim.policies.routing.ranks import OeaEp
from epsim.policies.routing.rivals import Lynx, MaskLowDemand
from epsim.policies.routing.schedule import parse_schedule
from epsim.policies.stack import parse_stack
from tests.policies.oea_reading import two_phases


def work_of(scores: Any, top_k: int, **changes: Any) -> RouterWork:
    """scores [..., B, E]: what softmax gave; the model's choice is its top k of them, renormalised."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    decode = torch.ones(scores.shape[:-1], dtype=torch.bool)
    return dataclasses.replace(RouterWork(scores, scores, ids, weights, decode), **changes)


def draw_scores(seed: int, batch: int, experts: int, ties: bool = False) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.gumbel(size=experts) + rng.gumbel(size=(batch, experts))
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    result: np.ndarray[Any, Any] = np.ceil(scores * 20) / 64 if ties else scores
    return result.astype(np.float32).astype(np.float64)


def experts_of(routed: Routed) -> list[list[int]]:
    return [sorted(e for e in row if e >= 0) for row in routed.expert_ids.flatten(0, -2).tolist()]


def active(routed: Routed) -> set[int]:
    return {e for row in experts_of(routed) for e in row}


@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(2, 12),
    top_k=st.integers(1, 6),
    less=st.integers(0, 5),
    more=st.integers(-3, 3),
    p=st.sampled_from([1.0, 0.9, 0.6, 0.3]),
    beyond=st.sampled_from([None, 0, 1, 3]),
    ties=st.booleans(),
)
def test_oea_is_the_two_phases(
    seed: int, batch: int, top_k: int, less: int, more: int, p: float, beyond: int | None, ties: bool
) -> None:
    scores = draw_scores(seed, batch, 12, ties)
    k0 = max(top_k - less, 1)
    kmax = min(max(top_k + more, k0), 12)
    maxp = None if beyond is None else k0 + beyond
    routed = Oea(str(k0), p=p, kmax=kmax, maxp=maxp).route(work_of(scores, top_k))
    experts, weights = two_phases(scores, k0, kmax, p, maxp)
    assert experts_of(routed) == experts
    for row, ids, wanted in zip(routed.weights.tolist(), routed.expert_ids.tolist(), weights, strict=True):
        assert {e: w for e, w in zip(ids, row, strict=True) if e >= 0} == pytest.approx(wanted, rel=1e-5)
        assert all(w == 0 for e, w in zip(ids, row, strict=True) if e < 0)


@given(seed=st.integers(0, 10**6), batch=st.integers(2, 20), k0=st.integers(1, 4), ties=st.booleans())
def test_the_simple_form_is_top_k_of_the_scores_masked_to_the_union(seed: int, batch: int, k0: int, ties: bool) -> None:
    scores = torch.as_tensor(draw_scores(seed, batch, 16, ties), dtype=torch.float32)
    work = work_of(scores, 4)
    routed = Oea(str(k0)).route(work)
    loaded = torch.tensor(sorted(set(work.expert_ids[:, :k0].flatten().tolist())))
    masked = torch.full_like(scores, -1.0)
    masked[:, loaded] = scores[:, loaded]
    best = masked.sort(dim=-1, descending=True, stable=True)
    wanted = torch.where(best.values >= 0, best.indices, -1)[:, :4]
    assert torch.equal(routed.expert_ids, wanted)
    assert active(routed) == set(loaded.tolist()) == active(Pruned(str(k0)).route(work))


def test_k_of_k_changes_nothing_even_where_recorded_scores_tie() -> None:
    scores = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.1, 0.4, 0.3, 0.2]])
    work = work_of(scores, 2)
    work = dataclasses.replace(work, expert_ids=torch.tensor([[3, 2], [1, 2]]))
    routed = Oea("2").route(work)
    assert experts_of(routed) == [[2, 3], [1, 2]]
    torch.testing.assert_close(routed.weights[1], torch.tensor([4 / 7, 3 / 7]))


def test_batches_do_not_touch_each_other() -> None:
    scores = np.stack([np.stack([draw_scores(3 * i + j, 5, 8) for j in range(3)]) for i in range(2)])
    work = work_of(scores, 3)
    for router in (Pruned("2"), Oea("1"), Lynx(3), MaskLowDemand(2), OeaEp("1")):
        held = torch.eye(4, dtype=torch.bool).repeat_interleave(2, 0)
        whole = router.route(dataclasses.replace(work, holds=held))
        for i in range(2):
            for j in range(3):
                one = router.route(work_of(scores[i, j], 3, holds=held))
                assert torch.equal(whole.expert_ids[i, j], one.expert_ids)
                assert torch.equal(whole.weights[i, j], one.weights)


def test_padding_wakes_no_expert_and_counts_for_no_batch_size() -> None:
    scores = draw_scores(1, 6, 8)
    work = work_of(scores, 3)
    padded = dataclasses.replace(work, expert_ids=work.expert_ids.clone())
    padded.expert_ids[4:] = -1
    for router in (Pruned("1"), Oea("2@4/1@5"), Oea("1"), Lynx(3), MaskLowDemand(2)):
        routed = router.route(padded)
        alone = router.route(work_of(scores[:4], 3))
        assert torch.equal(routed.expert_ids[:4], alone.expert_ids)
        assert (routed.expert_ids[4:] == -1).all()


def test_one_token_keeps_k_and_k0_follows_the_batch() -> None:
    scores = draw_scores(2, 20, 16)
    for size, k0 in ((1, 4), (2, 4), (3, 4), (4, 3), (15, 3), (16, 1), (20, 1)):
        work = work_of(scores[:size], 4)
        loaded = set(work.expert_ids[:, :k0].flatten().tolist())
        routed = Oea("3@4/1@16").route(work)
        assert active(routed) == loaded
        for row, ids in zip(scores[:size], experts_of(routed), strict=True):
            assert ids == sorted(sorted(loaded, key=lambda e: -row[e])[:4])
        assert experts_of(Pruned("3@4/1@16").route(work)) == [sorted(row) for row in work.expert_ids[:, :k0].tolist()]
        assert experts_of(Pruned("2").route(work)) == [sorted(row) for row in work.expert_ids[:, :2].tolist()]
    one = work_of(scores[:1], 4)
    for alone in (Oea("1"), Oea("1", kmax=2, maxp=2, p=0.1), OeaEp("1")):
        routed = alone.route(dataclasses.replace(one, holds=torch.eye(16, dtype=torch.bool)))
        assert torch.equal(routed.expert_ids, one.expert_ids)
        torch.testing.assert_close(routed.weights, one.weights)
    two = Oea("1@3", kmax=2).route(work_of(np.stack([scores[:2], scores[2:4]]), 4))
    assert torch.equal(two.expert_ids.flatten(0, 1), work_of(scores[:4], 4).expert_ids)
    assert (Oea("1@3", kmax=2).route(work_of(scores[:3], 4)).expert_ids[:, 2:] == -1).all()


def test_prefill_keeps_its_choice_and_its_experts_are_read_anyway() -> None:
    scores = draw_scores(5, 8, 12)
    decode = torch.tensor([True] * 5 + [False] * 3)
    work = work_of(scores, 3, decode=decode)
    routed = Oea("1").route(work)
    assert torch.equal(routed.expert_ids[5:], work.expert_ids[5:])
    assert torch.equal(routed.weights[5:], work.weights[5:])
    loaded = set(work.expert_ids[:5, 0].tolist()) | set(work.expert_ids[5:].flatten().tolist())
    assert active(routed) == loaded
    for row, ids in zip(scores[:5], routed.expert_ids[:5].tolist(), strict=True):
        assert ids == sorted(loaded, key=lambda e: -row[e])[:3]
    nobody = dataclasses.replace(work, decode=torch.zeros(8, dtype=torch.bool))
    for router in (Pruned("1"), Oea("1"), Lynx(2), MaskLowDemand(3)):
        assert torch.equal(router.route(nobody).expert_ids, work.expert_ids)


def test_scores_that_are_not_known_are_never_taken() -> None:
    scores = torch.as_tensor(draw_scores(7, 9, 16), dtype=torch.float32)
    work = work_of(scores, 4)
    known = torch.full_like(scores, -torch.inf).scatter(1, work.expert_ids, scores.gather(1, work.expert_ids))
    work = dataclasses.replace(work, scores=known, weight_basis=known.clamp(min=0))
    limited = Oea("2", maxp=4).route(work_of(scores, 4))
    routed = Oea("2").route(work)
    assert experts_of(routed) == experts_of(limited)
    torch.testing.assert_close(routed.weights, limited.weights)


def test_weights_follow_what_the_model_weighs_by() -> None:
    """DeepSeek-V3 chooses by sigmoid plus bias, weights by the sigmoid, and scales by 2.5."""
    weight_basis = torch.tensor([[0.9, 0.5, 0.3, 0.2], [0.1, 0.4, 0.8, 0.6]])
    scores = weight_basis + torch.tensor([0.0, 0.0, 0.0, 0.5])
    ids = torch.tensor([[0, 3], [3, 2]])
    weights = weight_basis.gather(1, ids)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    work = RouterWork(scores, weight_basis, ids, weights, torch.ones(2, dtype=torch.bool))
    routed = Oea("1").route(work)  # base 0 and 3
    assert routed.expert_ids.tolist() == [[0, 3], [3, 0]]
    torch.testing.assert_close(routed.weights, 2.5 * torch.tensor([[9 / 11, 2 / 11], [6 / 7, 1 / 7]]))


def test_lynx_and_mask_by_hand() -> None:
    ids = [[0, 1], [0, 2], [3, 0], [2, 5]]
    scores = torch.full((4, 6), 0.01)
    for row, (first, second) in enumerate(ids):
        scores[row, first], scores[row, second] = 0.5, 0.3
    scores[3, 4] = 0.1
    work = work_of(scores, 2)
    # Demand: 0 three times, 2 twice, 1, 3, 5 once.
    assert experts_of(Lynx(3).route(work)) == [[0, 1], [0, 2], [0, 1], [0, 2]]
    assert experts_of(Lynx(1).route(work)) == [[0]] * 4
    assert experts_of(Lynx(6).route(work)) == [sorted(row) for row in ids]
    assert experts_of(MaskLowDemand(2).route(work)) == [[0, 2]] * 4
    assert experts_of(MaskLowDemand(3).route(work)) == [[0]] * 4
    assert experts_of(MaskLowDemand(4).route(work)) == [sorted(row) for row in ids]
    assert Lynx(1).route(work).weights.tolist() == [[1, 0]] * 4


def _in_parts(router: Any, work: RouterWork, parts: list[slice]) -> list[Routed]:
    """Each part's rows by a source rank of its own, whose sums are those of all."""
    messages: list[list[torch.Tensor]] = []

    def collect(kept: list[torch.Tensor], answers: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def total(counts: torch.Tensor) -> torch.Tensor:
            kept.append(counts)
            return answers[len(kept) - 1] if len(kept) <= len(answers) else counts

        return total

    def run(answers: list[torch.Tensor]) -> list[Routed]:
        found = []
        messages.clear()
        for part in parts:
            kept: list[torch.Tensor] = []
            own = RouterWork(
                work.scores[part],
                work.weight_basis[part],
                work.expert_ids[part],
                work.weights[part],
                work.decode[part],
                work.holds,
                collect(kept, answers),
            )
            found.append(router.route(own))
            messages.append(kept)
        return found

    run([])
    answers: list[torch.Tensor] = []
    while len(answers) < len(messages[0]):
        number = len(answers)
        answers.append(torch.stack([kept[number] for kept in messages]).sum(0))
        last = run(answers)
    return last


@pytest.mark.parametrize(
    "router", [Pruned("2@4"), Oea("2"), Oea("3@3/1@9", p=0.8), OeaEp("2"), Lynx(5), MaskLowDemand(2)]
)
def test_a_source_ranks_part_alone_is_its_part_of_the_whole_by_one_collective(router: Any) -> None:
    work = work_of(draw_scores(11, 14, 16), 4, holds=torch.eye(4, dtype=torch.bool).repeat_interleave(4, 0))
    calls = []

    def count(counts: torch.Tensor) -> torch.Tensor:
        calls.append(counts.numel())
        assert counts.dtype == torch.int64
        return counts

    whole = router.route(dataclasses.replace(work, total=count))
    assert len(calls) == 1
    assert calls[0] <= 5 * 17
    parts = [slice(0, 6), slice(6, 6), slice(6, 14)]  # One rank has no tokens.
    for part, own in zip(parts, _in_parts(router, work, parts), strict=True):
        assert torch.equal(own.expert_ids, whole.expert_ids[part])
        assert torch.equal(own.weights, whole.weights[part])


def test_schedules() -> None:
    schedule = parse_schedule("6@4/3@16", "oea", 2)
    sizes = torch.tensor([1, 3, 4, 15, 16, 500])
    assert schedule.place(sizes).tolist() == [0, 0, 1, 1, 2, 2]
    assert str(schedule) == "6@4/3@16"
    assert str(parse_schedule("3@2", "oea", 2)) == "3"
    assert str(parse_schedule("3@2", "pruned", 1)) == "3@2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("oea", "'oea' needs k0=: write oea(k0=...)"),
        ("oea(p=0.5)", "needs k0="),
        ("lynx", "'lynx' needs keep="),
        ("oea(k0=three)", "oea: k0=three is neither a number nor k0@batch/k0@batch/..., such as 6@4/3@16"),
        ("oea(k0=3/2@4)", "neither a number nor"),
        ("oea(k0=0)", "oea: k0=0: give 1 or more"),
        ("oea(k0=3@1)", "a batch of one token keeps the model's k; batch sizes begin at 2"),
        ("oea(k0=3@8/2@8)", "batch sizes must ascend"),
        ("oea(k0=3,kmax=2)", "oea: kmax=2 is less than k0=3"),
        ("oea(k0=3,maxp=2)", "oea: maxp=2 is less than k0=3"),
        ("oea(k0=3,p=0)", "p=0.0: give a share above 0 and up to 1"),
        ("oea(k0=3,union=all)", "choose batch or rank"),
        ("lynx(keep=0)", "lynx: keep=0: give 1 or more"),
        ("mask-low-demand(least=-1)", "least=-1: give 1 or more"),
    ],
)
def test_mistakes_are_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_stack(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "contiguous+oea(k0=3)",
        "eplb+oea(k0=6@4/3@16,p=0.7,kmax=9,maxp=32,union=rank)+lplb",
        "eplb+oea-ep(k0=2)+one-copy",
        "contiguous+pruned(k0=5)",
        "contiguous+lynx(keep=20)",
        "contiguous+mask-low-demand(least=2)",
    ],
)
def test_text_round_trips(text: str) -> None:
    assert str(parse_stack(text)) == text


def test_what_does_not_fit_the_model() -> None:
    work = work_of(draw_scores(0, 4, 8), 2)
    with pytest.raises(ValueError, match=r"oea\(k0=3\): k0 is 3, but a token has 2 experts: give at most 2"):
        Oea("3").route(work)
    with pytest.raises(ValueError, match="kmax=9, but the model has 8 experts"):
        Oea("2", kmax=9).route(work)
    with pytest.raises(ValueError, match="which rank holds which expert: give --ranks"):
        OeaEp("1").route(work)
