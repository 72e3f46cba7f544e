"""Options of recordings: what the user states that the files do not say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from epsim.models.known import SCORE_RULES, ScoreRule
from epsim.options import About, Options, SeedOptions, parameters
from epsim.traces.limits import MAX_EXPERTS, MAX_RANKS, MAX_SHARED_COST, PHASES, Phase

DEFAULT_BATCH = 64
DEFAULT_RANKS = 16
DEFAULT_STEP_TOKENS = 1024
MAX_DRAWN = 1 << 24


def check_phase(option: str, phase: str) -> Phase:
    """The phase of that name. For any other name it raises ValueError, which names the option."""
    for known in PHASES:
        if known == phase:
            return known
    raise ValueError(f"{option} {phase}: give one of {', '.join(PHASES)}")


@dataclass(frozen=True, kw_only=True)
class SharedCostOptions(Options):
    shared_cost: Annotated[
        float | None,
        About(
            "Work of the shared expert for one token, in units of one routed assignment; 0 if there is none. "
            "Default: the trace's.",
            least=0,
            most=MAX_SHARED_COST,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RecordingOptions(Options):
    """Describes a recording. A value of None is taken from the file or the model.

    If neither has it, an error asks for the option, or a default is used and a note says so.
    """

    top_k: Annotated[
        int | None, About("Experts per token, if the recording does not state it.", least=1, most=MAX_EXPERTS)
    ] = None
    num_experts: Annotated[
        int | None,
        About("Experts per layer, if the recording does not state it.", flag="--experts", least=1, most=MAX_EXPERTS),
    ] = None
    model: Annotated[
        str | None, About("The model's name. A known name also gives top-k, experts, shared cost and score rule.")
    ] = None
    phase: Annotated[Phase | None, About("Phase: prefill, decode, mixed or training.", choices=PHASES)] = None
    batch: Annotated[
        int | None, About("For recordings of single sequences: number of sequences in a decode batch.", least=1)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k is not None and self.num_experts is not None and self.top_k > self.num_experts:
            raise ValueError(f"--top-k {self.top_k} is larger than --experts {self.num_experts}")


@dataclass(frozen=True, kw_only=True)
class ReadOptions(RecordingOptions):
    """How a recording is read."""

    step_tokens: Annotated[int | None, About("For token logs without steps: number of tokens in a step.", least=1)] = (
        None
    )
    score_rule: Annotated[
        ScoreRule | None,
        About(
            f"For router logits: how the model turns them into scores ({', '.join(SCORE_RULES)}).", choices=SCORE_RULES
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None and self.step_tokens is not None:
            raise ValueError("--batch is for recordings of sequences, --step-tokens for token logs: give one of them")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ReadOptions, SharedCostOptions):
    """Options of an import."""

    ranks: Annotated[
        int | None, About("Number of source ranks, if the recording has none.", least=1, most=MAX_RANKS)
    ] = None

    @classmethod
    def of(cls, given: Options, **changed: Any) -> ImportOptions:
        """The import options among a larger set of options. changed: values that replace the given ones."""
        names = {entry.name for entry in parameters(cls)}
        return cls(**{name: value for name, value in vars(given).items() if name in names} | changed)


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions(SeedOptions):
    """How a trace is drawn. spread: standard deviation of the mixture's random walk, 0 mixes all topics evenly. phase:
    None takes that of the recordings. The same seed gives the same trace."""

    num_steps: Annotated[int, About("Number of steps to draw.", flag="--steps", least=1, most=MAX_DRAWN)] = 100
    tokens_per_step: Annotated[int, About("Tokens in each step.", flag="--step-tokens", least=1, most=MAX_DRAWN)] = 1024
    num_ranks: Annotated[
        int, About("Number of source ranks over which tokens are spread.", flag="--ranks", least=1, most=MAX_RANKS)
    ] = DEFAULT_RANKS
    drift: Annotated[
        float, About("Change of the mixture of topics between steps, from 0 (none) to 1 (all new).", least=0, most=1)
    ] = 0.1
    spread: float = 1.0
    phase: Phase | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"--spread {self.spread}: give a finite number >= 0")
