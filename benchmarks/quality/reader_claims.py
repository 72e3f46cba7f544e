"""Compares top-k with a threshold in pairs, and checks the paper's claims."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quality.figures import Figures, Floats, standard_error
from quality.oea_claims import SURE


@dataclass(frozen=True, slots=True)
class Row:
    """claim, published: in the paper's words and numbers. ours: what was measured here. reproduced: None if that cannot
    be decided here."""

    claim: str
    published: str
    ours: str
    reproduced: bool | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The same score with two rules for keeping channels, on the same text. difference: the loss of the second rule
    minus that of the first, in nats per token or as KL; positive if the first rule (top-k) is better."""

    domain: str
    budget: float
    difference: float
    standard_error: float

    @property
    def result(self) -> str:
        """Whether the first wins, ties or loses, by the paired standard error."""
        if abs(self.difference) <= SURE * self.standard_error:
            return "tie"
        return "win" if self.difference > 0 else "loss"


def pair(domain: str, budget: float, topk: Figures, threshold: Figures, by: str = "loss") -> Pair:
    gap: Floats = getattr(threshold, by) - getattr(topk, by)
    return Pair(domain, budget, float(gap.mean()), standard_error(gap))


def tally(pairs: Sequence[Pair]) -> dict[str, int]:
    """How often the first rule wins, ties and loses."""
    results = [one.result for one in pairs]
    return {name: results.count(name) for name in ("win", "tie", "loss")}


def spearman(x: Floats, y: Floats) -> float:
    """The rank correlation of x [n] and y [n]; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum().astype(np.float64)
    return (last - (counts - 1) / 2)[inverse]


def claim_rows(report: Mapping[str, Any]) -> list[Row]:
    """The paper's claims beside what `benchmarks/reader_quality.py` measured; what was not measured is left out.

    Published figures are of models thousands of times larger. A claim counts as reproduced if its direction, or the
    stated order of numbers, is found here.
    """
    return [row for make in _MAKERS for row in make(report)]


def _under_reading(report: Mapping[str, Any]) -> Iterator[Row]:
    shares = [row["threshold_keeps"] for row in report["pairs"]]
    yield Row(
        "on held-out text of each domain, a threshold reads another number of channels than calibrated",
        "fewer in 72 of 72 runs; calibrated for 18%, it reads 12.9% on average and at least 9.9%",
        f"{_span(shares)} times k over {len(shares)} runs, fewer in {sum(s < 0.99 for s in shares)}; "
        f"calibrated on one domain {_span([row['threshold_of_one_domain_keeps'] for row in report['pairs']])} times",
        max(abs(s - 1) for s in shares) > 0.05,
    )
    for budget, found in report.get("drift", {}).items():
        positions = list(found["by_position"].values())
        yield Row(
            f"the longer a generation, the fewer channels a threshold of {budget} keeps; top-k keeps k at every token",
            "71, 92 and 88% of the calibrated number at 6,000 tokens",
            f"{positions[0]:.3f} times k in the first 128 tokens, {positions[-1]:.3f} times in the last; top-k 1",
            positions[-1] < positions[0],
        )
        ratio = found["late_window_after_prompt"] / found["late_window_in_place"]
        words = f"a late window keeps more channels if it is moved to right after the prompt, threshold of {budget}"
        yield Row(words, "57% more", f"{ratio - 1:+.1%}", ratio > 1)
    if "drift" in report:
        shares = [share for found in report["drift"].values() for share in found["by_domain"].values()]
        yield Row(
            "in generation a threshold reads fewer channels than calibrated",
            "72 of 72 runs",
            f"{sum(s < 1 for s in shares)} of {len(shares)} runs; {_span(shares)} times k",
            all(s < 1 for s in shares),
        )
    found = report["kept_and_loss_spearman"]
    yield Row(
        "the number of channels that a threshold keeps hardly correlates with the loss of the next token (Spearman)",
        "-0.29 to +0.14",
        ", ".join(f"{value:+.2f} at {budget}" for budget, value in found.items()),
        all(abs(value) < 0.3 for value in found.values()),
    )


def _pairs(report: Mapping[str, Any]) -> Iterator[Row]:
    for key, words, published in (
        ("loss", "top-k against a threshold of the same score and budget", "10 wins, 30 ties, 3 losses of 43"),
        ("as_many_loss", "top-k limited to as many channels as the threshold reads", "37 wins or ties of 41"),
    ):
        loss, kl = report["tallies"][key], report["tallies"][key.replace("loss", "kl")]
        yield Row(
            f"{words} (paired, two standard errors)",
            published,
            f"in loss {_tally(loss)}; in KL {_tally(kl)}",
            loss["win"] + loss["tie"] >= 0.9 * sum(loss.values()),
        )


def _collapse(report: Mapping[str, Any]) -> Iterator[Row]:
    found = report.get("repetition")
    if not found:
        return
    budgets = [name.split()[1] for name in found if name.startswith("topk")]
    words = "; ".join(f"{b}: {found[f'threshold {b}']:.3f}, {found[f'topk {b}']:.3f}" for b in budgets)
    yield Row(
        "thresholds fall into loops where top-k does not (share of repeated 4-grams: threshold, top-k)",
        "Gemma 4 at 18%: 674 of 792 answers reach the limit, 145 with top-k",
        f"{words}; plain {found['plain']:.3f}",
        any(found[f"threshold {b}"] > found[f"topk {b}"] + 0.05 for b in budgets),
    )


def _screens(report: Mapping[str, Any]) -> Iterator[Row]:
    trials = report["trials"]
    for budget, published in ((0.135, "0.488 to 0.310"), (0.185, "0.245 to 0.187")):
        for kind, words in (("{} on", ""), ("packed {}", ", codes counted at 26 bytes a block")):
            names = [f"{kind.format(screen)} {budget}" for screen in ("full", "partial")]
            if any(name not in trials for name in names):
                continue
            full, partial = (trials[name] for name in names)
            yield Row(
                f"a partial screen has a lower KL than a full one at {budget:.1%}{words}",
                published,
                f"{full['kl']:.4f} to {partial['kl']:.4f} ({full['kept_channels']:.0f} and "
                f"{partial['kept_channels']:.0f} channels)",
                partial["kl"] < full["kl"],
            )
    for budget in (0.128, 0.178, 0.18, 0.28):
        on, off = (trials.get(f"partial {restore} {budget}") for restore in ("on", "off"))
        if on and off:
            words = f"restoring skipped channels lowers the KL at {budget:.1%} (without, with, at equal bytes)"
            published = "IFEval +11.6 points at 18%" if budget == 0.18 else ""
            yield Row(words, published, f"{off['kl']:.4f}, {on['kl']:.4f}", on["kl"] < off["kl"])


def _scores(report: Mapping[str, Any]) -> Iterator[Row]:
    trials = report["trials"]
    for name, budget, published in (
        ("int4-gate", 0.178, "2.8 times"),
        ("teal", 0.178, "5.1 times"),
        ("wina", 0.2, "28.4% of the accuracy, against 94.5% of the reader at 12.8%"),
        ("cats", 0.4, ""),
        ("cats", 0.5, ""),
    ):
        ours, other = trials.get(f"sketch {budget}"), trials.get(f"{name} {budget}")
        if ours and other:
            yield Row(
                f"KL with the {name} score / KL with the sketch at {budget:.1%}, without restoration",
                published,
                f"{other['kl'] / ours['kl']:.2f} times ({other['kl']:.4f} against {ours['kl']:.4f})",
                other["kl"] > ours["kl"],
            )
    if any(name.startswith("cats") for name in report["not_payable"]):
        yield Row("CATS reads whole gate rows", "", "a third of the bytes: CATS needs a budget of 33.4%", None)
    for budget in (0.178, 0.28):
        raw, scaled = trials.get(f"int4-gate {budget}"), trials.get(f"int4-gate in output units {budget}")
        if raw and scaled:
            ratio = raw["kl"] / scaled["kl"]
            words = f"scores in units of the output lower the KL of an int4 copy, {budget:.1%}"
            yield Row(words, "1.3 to 1.5 times", f"{ratio:.2f} times", ratio > 1)


def _kept_quality(report: Mapping[str, Any]) -> Iterator[Row]:
    for budget, published in ((0.128, ""), (0.178, "98.1% on average, 95.0% at worst"), (0.28, "within 10%")):
        shares = [
            row["topk"]["right"] / row["plain_right"]
            for row in report["pairs"]
            if row["budget"] == budget and row["plain_right"] > 0
        ]
        if shares:
            yield Row(
                f"share of the full model's accuracy (here: of the next token) that is kept at {budget:.1%}",
                published,
                f"{np.mean(shares):.1%} on average, {min(shares):.1%} at worst of {len(shares)} domains",
                None if not published else bool(np.mean(shares) >= (0.981 if budget == 0.178 else 0.9)),
            )


def _bytes(report: Mapping[str, Any]) -> Iterator[Row]:
    sizes = report["sizes"]
    of = sizes["published_models"].values()
    screens, maps, sketches = (
        [one[key] for one in of] for key in ("screen_of_read", "map_of_experts", "sketch_of_experts")
    )
    yield Row(
        "a block of 128 weights takes about 30 bytes of sketch instead of 256",
        "30",
        f"{sizes['packed_block_bytes']:.1f}; with rows padded to sectors "
        f"{', '.join(f'{256 * share / 2 * 3:.1f}' for share in dict.fromkeys(sketches))} in the three models",
        29 < sizes["packed_block_bytes"] < 31,
    )
    yield Row(
        "the sketch takes 7% of the memory of the weights, the restoring map 0.5%",
        "7%, 0.5%",
        f"{_span(sketches, '.3f')} and {_span(maps, '.4f')} of the experts' weights in the three models; "
        f"{sizes['sketch_of_experts']:.3f} and {sizes['map_of_experts']:.3f} here",
        0.06 < min(sketches) <= max(sketches) < 0.09 and max(maps) < 0.009,
    )
    yield Row(
        "a full sketch is 44 to 61% of the bytes read at 12.8 and 17.8%",
        "44 to 61%",
        f"{min(screens):.0%} to {max(screens):.0%} in the three models",
        0.4 < min(screens) <= max(screens) < 0.62,
    )
    yield Row(
        "the restoring map adds 0.5 to 0.8 percentage points to the bytes read",
        "0.5 to 0.8",
        f"{100 * min(maps):.2f} to {100 * max(maps):.2f} in the three models; "
        f"{100 * sizes['map_of_experts']:.2f} and more here, where rows are a quarter as long",
        0.005 < min(maps) <= max(maps) < 0.008,
    )


def _beyond(report: Mapping[str, Any]) -> Iterator[Row]:
    """Measurements beyond the paper: several ranks, a router policy together with the reader, and batches."""
    trials = report["trials"]
    whole = {name.split()[-1]: one for name, one in trials.items() if name.startswith("partial on")}
    for name, one in trials.items():
        if " ranks by " in name:
            ranks, _, _, by, budget = name.split()
            # Each rank reads its own map, so the quotas are compared with the best channels on equally many ranks.
            best = trials.get(f"{ranks} ranks by token {budget}")
            if by == "token" or best is None:
                continue
            words = f"{ranks} ranks that each keep their own best channels, quota={by}, {float(budget):.1%} (KL)"
            yield Row(words, "", f"{one['kl']:.4f}; the best channels of all ranks {best['kl']:.4f}", None)
        if name.startswith("one set for"):
            size, budget = name.split()[3], name.split()[-1]
            union = report.get("batches", {}).get(size) or report.get("batches", {}).get(int(size))
            reads = f", which reads {union['union']:.3f} of the bytes" if union else ""
            words = f"one set of channels for {size} tokens, {float(budget):.1%} of the active experts' bytes (KL)"
            each = f"with own channels for each token {whole[budget]['kl']:.4f}"
            yield Row(words, "future work", f"{one['kl']:.4f}; {each}{reads}", None)
        if "+reader" in name:
            router, budget = name.split("+")[0], name.split()[-1]
            alone = f"the router alone {trials[router]['kl']:.4f}, the reader alone {whole[budget]['kl']:.4f}"
            yield Row(f"{router} with a reader at {float(budget):.1%} (KL)", "", f"{one['kl']:.4f}; {alone}", None)
    if report.get("batches"):
        of_sizes = report["batches"].items()
        shares = [f"{size}: {one['union']:.3f} ({one['union_if_independent']:.3f})" for size, one in of_sizes]
        words = "share of the active experts' bytes that a batch reads, by batch size (if tokens chose independently)"
        yield Row(words, "", ", ".join(shares), None)


_MAKERS = (_under_reading, _pairs, _collapse, _screens, _scores, _kept_quality, _bytes, _beyond)


def _span(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _tally(counts: Mapping[str, int]) -> str:
    return f"{counts['win']} wins, {counts['tie']} ties, {counts['loss']} losses of {sum(counts.values())}"


def markdown(rows: Sequence[Row]) -> str:
    words: Mapping[bool | None, str] = {True: "yes", False: "no", None: "not told here"}
    lines = ["| claim | published | here | reproduced |", "|---|---|---|---|"]
    lines += [f"| {row.claim} | {row.published} | {row.ours} | {words[row.reproduced]} |" for row in rows]
    return "\n".join(lines) + "\n"
