"""What evaluating policies on the small model can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from epsim.files import check_target
from epsim.options import about
from epsim.traces.model.options import DeviceOptions

NGRAM = 4
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class FigureOptions(DeviceOptions):
    out: Path | None = field(default=None, metadata=about("A JSON file for the figures."))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            check_target(self.out)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FigureOptions):
    """The router and the reader of `policy` act on the model. sketch: None builds it in memory."""

    policy: str = field(
        default="topk", metadata=about("The stack whose router and reader are evaluated.", metavar="STACK")
    )
    batch_sizes: tuple[int, ...] = field(
        default=BATCH_SIZES,
        metadata=about("Number of tokens routed together; repeatable.", flag="--batch-size"),
    )
    domains: tuple[str, ...] = field(
        default=(), metadata=about("Evaluate only this domain; repeatable. Default: all.", flag="--domain")
    )
    sequences: int = field(default=64, metadata=about("Sequences of each domain.", least=1))
    length: int = field(default=256, metadata=about("Tokens of each sequence."))
    generations: int = field(default=16, metadata=about("Continuations of each domain; 0 for none.", least=0))
    generated: int = field(default=512, metadata=about("Tokens of each continuation."))
    ranks: int = field(default=1, metadata=about("Ranks that hold the experts, in contiguous shares.", least=1))
    sketch: Path | None = field(
        default=None,
        metadata=about("The file that `epsim reader build` wrote, for a reader. Default: built in memory."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generations > self.sequences:
            raise ValueError(f"--generations {self.generations}: there are {self.sequences} sequences to continue")
        wrong = [b for b in self.batch_sizes if b < 1 or self.sequences % b]
        if wrong or not self.batch_sizes:
            raise ValueError(f"--batch-size {wrong[:1] or 'none'}: give divisors of {self.sequences}, the sequences")
        if self.length < 2 or self.generated < NGRAM:
            raise ValueError(f"--length needs at least 2 tokens and --generated at least {NGRAM}")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(FigureOptions):
    """Only the routers of the stacks act. The model's own choice, `topk`, is always measured, and first. `batch`
    prompts of held-out text, of all domains in turn, are continued in every round."""

    stacks: tuple[str, ...] = field(
        default=(),
        metadata=about("A stack whose router is compared with topk; repeatable.", flag="--policy", metavar="STACK"),
    )
    batch: int = field(default=16, metadata=about("Sequences decoded together.", least=1))
    prompt: int = field(default=64, metadata=about("Tokens of held-out text in each prompt.", least=1))
    num_tokens: int = field(default=256, metadata=about("Tokens of each continuation.", flag="--tokens", least=2))
    rounds: int = field(default=5, metadata=about("Timed continuations of every policy, in turn.", least=1))
    experts: str = field(
        default="kernel",
        metadata=about(
            "What computes the experts: kernel (epsim's, for at most 64 rows) or model (transformers').",
            choices=("kernel", "model"),
        ),
    )
