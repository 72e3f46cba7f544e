"""What a user may say about a file that the file itself does not."""

from __future__ import annotations

from dataclasses import dataclass

from epsim.models.known import SCORE_RULES, ScoreRule
from epsim.traces.trace import MAX_EXPERTS, MAX_RANKS, MAX_SHARED_COST, PHASES, Phase

MOST = {"--top-k": MAX_EXPERTS, "--experts": MAX_EXPERTS, "--ranks": MAX_RANKS}
DEFAULT_BATCH = 64
DEFAULT_RANKS = 16
DEFAULT_STEP_TOKENS = 1024


def check_phase(option: str, phase: str) -> Phase:
    """The phase of that name. Raises ValueError, naming the option, for any other."""
    found = next((known for known in PHASES if known == phase), None)
    if found is None:
        raise ValueError(f"{option} {phase}: give one of {', '.join(PHASES)}")
    return found


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of an import; None: taken from the file or the model, else asked for or defaulted with a note.

    top_k, num_experts: routed experts a token chooses, and a layer has. model: its name; a known one fills in top_k,
    num_experts, shared_cost and score_rule. shared_cost: see TraceMeta. batch: places of the decode batch into which
    recordings by sequence are composed. ranks: source ranks among which composed or dealt tokens live.
    step_tokens: tokens a step, for token logs that know neither steps nor sequences. score_rule: from router logits
    to choices (`router_logits`).
    """

    top_k: int | None = None
    num_experts: int | None = None
    model: str | None = None
    phase: Phase | None = None
    shared_cost: float | None = None
    batch: int | None = None
    ranks: int | None = None
    step_tokens: int | None = None
    score_rule: ScoreRule | None = None

    def __post_init__(self) -> None:
        options = {"--top-k": self.top_k, "--experts": self.num_experts, "--batch": self.batch}
        options |= {"--ranks": self.ranks, "--step-tokens": self.step_tokens}
        for name, value in options.items():
            most = MOST.get(name, 2**31)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} {value}: give 1 or more" + (f", at most {most}" if value > most else ""))
        if self.top_k is not None and self.num_experts is not None and self.top_k > self.num_experts:
            raise ValueError(f"--top-k {self.top_k} is larger than --experts {self.num_experts}")
        if self.phase is not None:
            check_phase("--phase", self.phase)
        if self.score_rule is not None and self.score_rule not in SCORE_RULES:
            raise ValueError(f"--score-rule {self.score_rule}: give one of {', '.join(SCORE_RULES)}")
        if self.shared_cost is not None and not 0 <= self.shared_cost <= MAX_SHARED_COST:
            raise ValueError(f"--shared-cost {self.shared_cost}: give a number from 0 to {MAX_SHARED_COST:g}")
        if self.batch is not None and self.step_tokens is not None:
            raise ValueError("--batch composes sequences, --step-tokens cuts a stream: give one of them")
