"""What a search found. `answers` writes it as JSON, `words` as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from epsim.engines.base import Setup, System
from epsim.score.time_metrics import about_long_steps
from epsim.tuning.candidates import Candidate
from epsim.tuning.conditions import FEWER, MORE, Condition, by_tokens, with_other_experts
from epsim.tuning.final import Finals
from epsim.tuning.gains import Interval
from epsim.tuning.memory import Memory
from epsim.tuning.migration import Migration
from epsim.tuning.race import Round
from epsim.tuning.scorer import Part, Problem


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """A candidate that rebalances, compared with the same candidate planned once.

    payback: the number of steps after which a rebalance has saved as much time as it takes; None if it never does.
    """

    candidate: Candidate
    gain: Interval
    migration: Migration
    payback: float | None


@dataclass(frozen=True, eq=False)
class Findings:
    """The candidates of a search, the steps on which they were compared, and the scores.

    candidates: all candidates, the baseline first. picks: for each system the cheapest of the fastest candidates that
    it can run; under None, of all candidates. rebalanced: the fastest candidate that rebalances. intervals: the
    rebalance intervals that fit the trace. choose, report: the steps used for choosing, and the held-out steps. finals:
    the finalists on the held-out steps. used: gives a candidate's bytes of weights per GPU. runs: whether a system can
    run a candidate. worth: throughput gains below this share do not count. quality_loss: the loss that the user
    accepts, in the user's words.
    """

    problem: Problem
    candidates: Sequence[Candidate]
    rounds: Sequence[Round]
    picks: Mapping[System | None, Candidate]
    rebalanced: Candidate | None
    intervals: tuple[int, ...]
    choose: Part
    report: Part
    finals: Finals
    memory: Memory
    used: Callable[[Candidate], float]
    runs: Callable[[System, Candidate], bool]
    worth: float
    setup: Setup
    quality_loss: str

    @property
    def base(self) -> Candidate:
        """The baseline, with which all others are compared."""
        return self.candidates[0]

    @property
    def best(self) -> Candidate:
        """The pick of all candidates."""
        return self.picks[None]

    @property
    def others(self) -> list[Candidate]:
        """The finalists without the baseline."""
        return [candidate for candidate in self.finals.times if candidate != self.base]

    def fastest_other(self, system: System | None = None) -> Candidate | None:
        """The fastest finalist except the baseline, of those that the system can run; None if there are none."""
        others = [candidate for candidate in self.others if system is None or self.runs(system, candidate)]
        return max(others, key=lambda candidate: self.gain(candidate).mean, default=None)

    def gain(self, candidate: Candidate, over: Candidate | None = None) -> Interval:
        """A finalist's throughput gain over the baseline, or over another finalist, on the held-out steps."""
        over = self.base if over is None else over
        if candidate == over:
            return Interval(0.0, 0.0, 0.0)
        times = self.finals.times
        return self.problem.gain(times[candidate].step_us, times[over].step_us)

    def advised(self, system: System | None = None) -> bool:
        """Whether the pick is clearly faster than the baseline, by at least `worth`."""
        return self.picks[system] != self.base and self.gain(self.picks[system]).clear(self.worth)

    def to_run(self, system: System | None = None) -> Candidate:
        """The pick if it is advised, or if the system cannot run the baseline; otherwise the baseline."""
        use_pick = self.advised(system) or (system is not None and system.lacks(self.base.deployment))
        return self.picks[system] if use_pick else self.base

    @property
    def long_steps(self) -> str:
        """A warning about scored steps that are too long for one forward pass; "" if there are none."""
        step_indices, step_us = [self.finals.step_indices], [self.finals.times[self.base].step_us]
        if self.rounds[-1].num_layers == self.problem.meta.num_layers:
            step_indices.append(self.rounds[-1].step_indices)
            step_us.append(self.rounds[-1].times[self.base].step_us)
        return about_long_steps(np.concatenate(step_us), self.problem.tokens(np.concatenate(step_indices)))

    @cached_property
    def rebalancing(self) -> Rebalancing | None:
        """What rebalancing gains and costs; None if no candidate that rebalances was scored."""
        candidate = self.rebalanced
        if candidate is None or candidate.interval is None:
            return None
        times, once = self.finals.times[candidate], self.finals.times[candidate.planned_once]
        assert times.migration is not None
        # The time that a rebalance saves in a step. The step times contain a share of the rebalance's own time.
        saved = once.mean_us - (times.mean_us - times.migration.us / candidate.interval)
        payback = times.migration.us / saved if saved > 0 else None
        return Rebalancing(candidate, self.gain(candidate, candidate.planned_once), times.migration, payback)

    @cached_property
    def conditions(self) -> list[Condition]:
        """The gain of the advised candidate with fewer tokens. If none is advised, the gain of the fastest finalist
        except the baseline with more tokens."""
        if self.advised():
            return by_tokens(self.problem, self.best, self.base, self.report, FEWER)
        fastest = self.fastest_other()
        return [] if fastest is None else by_tokens(self.problem, fastest, self.base, self.report, MORE)

    @cached_property
    def other_experts(self) -> Condition | None:
        """The gain of the advised candidate if other experts are hot than those that its placement was planned for;
        None if no candidate is advised."""
        return with_other_experts(self.problem, self.best, self.base, self.report) if self.advised() else None
