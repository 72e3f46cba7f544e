"""The sentences of tune's answers, on findings made by hand."""

from __future__ import annotations

from typing import cast

import pytest

from epsim.engines import SYSTEMS
from epsim.policies.stack import parse_stack
from epsim.tuning.candidates import Candidate
from epsim.tuning.conditions import Condition
from epsim.tuning.findings import Findings
from epsim.tuning.gains import Interval
from epsim.tuning.words import _never_pays, _no_gain, _system, verdict

BASE, EPLB = Candidate(parse_stack("contiguous"), 0), Candidate(parse_stack("eplb+lplb"), 32)
CLEAR, SMALL, UNCLEAR = Interval(0.031, 0.029, 0.033), Interval(0.004, 0.003, 0.005), Interval(0.02, -0.01, 0.05)
SLOWER, ALONE = Interval(-0.02, -0.03, -0.01), Interval(0.02, None, None)


def findings(best: Candidate, gain: Interval, base: Candidate = BASE) -> Findings:
    """The pick of all candidates and of every system. `gain` is that of all candidates except the baseline."""
    candidates = list(dict.fromkeys([base, best, EPLB]))

    class Known(Findings):
        def gain(self, candidate: Candidate, over: Candidate | None = None) -> Interval:
            return Interval(0.0, 0.0, 0.0) if candidate == base else gain

        @property
        def others(self) -> list[Candidate]:
            return candidates[1:]

    nothing = cast("dict[str, object]", dict.fromkeys(Findings.__dataclass_fields__))
    picks = dict.fromkeys((None, *SYSTEMS), best)
    used = {base: 10e9, best: 10e9 if best == base else 12.2e9}.__getitem__
    known = {"candidates": candidates, "picks": picks, "used": used, "worth": 0.005, "runs": lambda system, c: True}
    return Known(**nothing | known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("best", "gain", "expected"),
    [
        (
            EPLB,
            CLEAR,
            "Use eplb+lplb r32: predicted throughput changes by +3.1% (95% interval +2.9% to +3.3%) compared with "
            "contiguous r0. It takes +2.2 GB of weights per GPU.",
        ),
        (BASE, SMALL, "Keep contiguous r0: no candidate gains enough to be worth more memory or moving parts."),
        (
            BASE,
            CLEAR,
            "Keep contiguous r0: eplb+lplb r32 changes throughput by +3.1% (95% interval +2.9% to +3.3%), but on the "
            "steps used for choosing it was not clearly faster than contiguous r0, which costs less.",
        ),
        (
            BASE,
            UNCLEAR,
            "Keep contiguous r0: eplb+lplb r32 changes throughput by +2.0% (95% interval -1.0% to +5.0%), but the "
            "held-out steps show no clear difference.",
        ),
        (
            EPLB,
            UNCLEAR,
            "Keep contiguous r0: eplb+lplb r32, which was chosen on the earlier steps, changes throughput by +2.0% "
            "(95% interval -1.0% to +5.0%) on the held-out steps.",
        ),
    ],
)
def test_the_verdict_says_what_to_do(best: Candidate, gain: Interval, expected: str) -> None:
    assert verdict(findings(best, gain)) == expected


def test_advice_needs_a_clear_gain_that_is_large_enough() -> None:
    assert findings(EPLB, CLEAR).advised()
    assert not any(findings(EPLB, gain).advised() for gain in (SMALL, UNCLEAR, Interval(0.031, None, None)))
    assert not findings(BASE, CLEAR).advised()


def test_vllm_runs_its_pick_where_it_cannot_run_the_baseline() -> None:
    """Redundant experts need EPLB there, so experts in order with redundant ones do not run."""
    base = Candidate(parse_stack("contiguous"), 4)
    unclear = findings(EPLB, UNCLEAR, base)
    assert [unclear.to_run(system) for system in (None, *SYSTEMS)] == [base, base, EPLB]
    assert findings(EPLB, UNCLEAR).to_run(SYSTEMS[1]) == BASE


@pytest.mark.parametrize(
    ("gain", "reason"),
    [
        (CLEAR, "not clearly faster than contiguous r0"),
        (SMALL, "gains below 0.5% do not justify"),
        (UNCLEAR, "show no clear difference"),
        (SLOWER, "slower than the baseline"),
        (ALONE, "too few steps"),
    ],
)
def test_every_sentence_has_the_gain_of_the_table_and_its_reason(gain: Interval, reason: str) -> None:
    known = findings(BASE, gain)
    for text in (_no_gain(known), _system(known, SYSTEMS[0])):
        assert f"eplb+lplb r32 changes throughput by {gain}:" in text.replace(", changes", " changes")
        assert reason in text


def never_pays(gain: Interval, *more: Interval) -> str:
    known = findings(BASE, gain)
    known.__dict__["conditions"] = [Condition("", 100.0 * 2**n, g) for n, g in enumerate((gain, *more))]
    return _never_pays(known)


def test_what_more_tokens_would_bring_follows_from_the_gains() -> None:
    assert "It pays with 400 tokens per GPU and step (here 100): +3.1%" in never_pays(SMALL, SMALL, CLEAR)
    assert "It still does not clearly pay with 400 tokens per GPU and step (here 100): +2.0% (95% interval -1.0%" in (
        never_pays(UNCLEAR, SMALL, UNCLEAR)
    )
    # A gain that the held-out steps show is not called none.
    assert never_pays(CLEAR, CLEAR).startswith("eplb+lplb r32 pays on the held-out steps.")
