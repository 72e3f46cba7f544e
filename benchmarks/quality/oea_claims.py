"""Checks the claims of the paper on opportunistic expert activation (arXiv 2511.02237, section 4) on this model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quality.figures import standard_error
from quality.frontier import Point, loss_at

SURE = 2.0
"""A difference counts if it exceeds this many standard errors."""
Pair: TypeAlias = tuple[Point | None, Point | None, dict[str, Any]]
"""Two policies, None if not measured, and numbers that describe them. The claim says that the first loses less."""


@dataclass(frozen=True, slots=True)
class Claim:
    """words: the claim. holds: whether it holds here within two standard errors, None if nothing could be compared.
    worst, mean: of the differences in nats per token, which the claim says are at most zero. detail: all of them.

    Frontiers are straight lines between points, so a convex frontier makes a point between two of ours look too good.
    """

    words: str
    holds: bool | None
    worst: float | None
    mean: float | None
    detail: list[dict[str, Any]]


def check_claims(points: Sequence[Point], top_k: int, batch_size: int = 16) -> list[Claim]:
    """Checks the claims on the points of `batch_size`, of all families."""
    here = [point for point in points if point.batch_size == batch_size]
    by_router = {(p.trial.router, p.trial.ranks): p for p in here}
    batch = f"batch {batch_size}"

    def own(k0: int) -> Point | None:
        return by_router.get((f"oea(k0={k0})", 1))

    def beside(router: str, wider: Sequence[dict[str, int]] = ({},)) -> list[Pair]:
        """OEA and another router, written with {k0} and {kmax}, at each k0 and at each kmax of `wider`."""
        names = [{"k0": k0} | more for k0 in range(1, top_k) for more in wider]
        return [(own(numbers["k0"]), by_router.get((router.format(**numbers), 1)), numbers) for numbers in names]

    def frontiers(words: str, family: str) -> Claim:
        simple = [point for point in here if point.trial.family in ("oea", "topk")]
        return _frontiers(words, simple, [point for point in here if point.trial.family == family])

    claims = [
        _paired(f"OEA loses no more than pruning at the same k0, {batch}", beside("pruned(k0={k0})")),
        frontiers(f"OEA's frontier is at or under pruning's, {batch}", "pruned"),
        frontiers(f"OEA's frontier is at or under lynx's, {batch}", "lynx"),
        frontiers(f"OEA's frontier is at or under that of masking low demand, {batch}", "mask-low-demand"),
        frontiers("the simplified form is as good as any of the sweep at its number of experts", "oea general"),
        _paired(
            f"maxp = k hurts: considering only a token's k best experts loses more, {batch}",
            beside(f"oea(k0={{k0}},maxp={top_k})"),
            by_much=True,
        ),
        _paired(
            f"kmax > k does not help, {batch}",
            beside("oea(k0={k0},kmax={kmax})", [{"kmax": top_k + 1}, {"kmax": top_k + 2}]),
        ),
    ]
    for ranks in (4, 8):
        pairs: list[Pair] = []
        for k0 in range(1, top_k):
            filled, plain = by_router.get((f"oea-ep(k0={k0})", ranks)), own(k0)
            names: dict[str, Any] = {"k0": k0}
            if filled is not None and plain is not None:
                names |= {"most_on_a_rank": filled.active[ranks], "most_on_a_rank_oea": plain.active[ranks]}
            pairs.append((filled, plain, names))
        claims.append(_paired(f"oea-ep loses no more than oea at the same k0, {ranks} ranks, {batch}", pairs))
    return claims


def _paired(words: str, pairs: Sequence[Pair], by_much: bool = False) -> Claim:
    """A claim on pairs, compared sequence by sequence.

    It holds if in no pair the first loses significantly more than the second and the mean difference is not above
    zero; with by_much, if in every pair the first loses significantly less."""
    detail = []
    for better, worse, names in pairs:
        if better is None or worse is None:
            continue
        gap = better.by_sequence - worse.by_sequence
        detail.append({**names, "difference": float(gap.mean()), "standard_error": standard_error(gap)})
    chance = -SURE if by_much else SURE
    return _claim(words, detail, lambda row: row["difference"] <= chance * row["standard_error"])


def _frontiers(words: str, ours: Sequence[Point], theirs: Sequence[Point]) -> Claim:
    """Compares each point of another policy with OEA's frontier at the same number of active experts."""
    detail = []
    for point in theirs:
        loss = loss_at(ours, point.active[1])
        if loss is not None:
            names = {"router": point.trial.router, "active": point.active[1]}
            chance = standard_error(point.by_sequence)
            detail.append({**names, "difference": loss - point.delta, "standard_error": chance})
    return _claim(words, detail, lambda row: row["difference"] <= SURE * row["standard_error"])


def _claim(words: str, detail: list[dict[str, Any]], passes: Callable[[dict[str, Any]], bool]) -> Claim:
    if not detail:
        return Claim(words, None, None, None, [])
    gaps = [row["difference"] for row in detail]
    mean = sum(gaps) / len(gaps)
    return Claim(words, all(passes(row) for row in detail) and mean <= 0, max(gaps), mean, detail)
