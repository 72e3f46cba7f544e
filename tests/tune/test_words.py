"""The sentences of tune's answers, on findings made by hand."""

from __future__ import annotations

from typing import cast

import pytest

from epsim.engines import SYSTEMS
from epsim.policies.stack import parse_stack
from epsim.tuning.candidates import Candidate
from epsim.tuning.findings import Findings
from epsim.tuning.race import Interval
from epsim.tuning.words import percent, verdict

BASE, EPLB = Candidate(parse_stack("contiguous"), 0), Candidate(parse_stack("eplb+lplb"), 32)
CLEAR, SMALL, UNCLEAR = Interval(0.031, 0.029, 0.033), Interval(0.004, 0.003, 0.005), Interval(0.02, -0.01, 0.05)


def findings(best: Candidate, gain: Interval, base: Candidate = BASE) -> Findings:
    """The pick of all candidates and of every system, with its gain on the held-out steps."""

    class Known(Findings):
        def gain(self, candidate: Candidate, over: Candidate | None = None) -> Interval:
            return Interval(0.0, 0.0, 0.0) if candidate == base else gain

    nothing = cast("dict[str, object]", dict.fromkeys(Findings.__dataclass_fields__))
    picks = dict.fromkeys((None, *SYSTEMS), best)
    used = {base: 10e9, best: 10e9 if best == base else 12.2e9}.__getitem__
    return Known(**nothing | {"candidates": [base, best], "picks": picks, "used": used, "worth": 0.005})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("best", "gain", "expected"),
    [
        (
            EPLB,
            CLEAR,
            "Use eplb+lplb r32: predicted throughput changes by +3.1% (95% interval +2.9% to +3.3%) compared with "
            "contiguous r0. It takes +2.2 GB of weights per GPU.",
        ),
        (BASE, CLEAR, "Keep contiguous r0: no candidate gains enough to be worth more memory or moving parts."),
        (
            EPLB,
            UNCLEAR,
            "Keep contiguous r0: eplb+lplb r32 was the best on the steps used for choosing, but on the held-out steps "
            "its throughput changes by +2.0% (95% interval -1.0% to +5.0%).",
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


def test_a_gain_without_an_interval_says_why() -> None:
    assert percent(Interval(0.031, None, None)) == "+3.1% (too few steps for an interval)"
