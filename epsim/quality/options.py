"""The options of `epsim model evaluate` and `epsim model generate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from epsim.files import check_target, whole_file
from epsim.options import About
from epsim.traces.model.options import DeviceOptions

NGRAM = 4
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class FigureOptions(DeviceOptions):
    out: Annotated[Path | None, About("Also write the figures to this JSON file.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            check_target(self.out)

    def write(self, figures: dict[str, Any]) -> None:
        """Writes the figures to `out`, if it is given."""
        if self.out is not None:
            with whole_file(self.out) as temporary:
                temporary.write_text(json.dumps(figures, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FigureOptions):
    """The router and the reader of the stack `policy` act on the model. sketch: None to build it in memory."""

    policy: Annotated[str, About("The stack to evaluate; only its router and reader act.", metavar="STACK")] = "topk"
    batch_sizes: Annotated[
        tuple[int, ...], About("Number of tokens that are routed together; repeatable.", flag="--batch-size")
    ] = BATCH_SIZES
    domains: Annotated[
        tuple[str, ...], About("Evaluate only this domain; repeatable. Default: all.", flag="--domain")
    ] = ()
    sequences: Annotated[int, About("Sequences of each domain.", least=1)] = 64
    length: Annotated[int, About("Tokens of each sequence.")] = 256
    generations: Annotated[int, About("Continuations of each domain; 0 for none.", least=0)] = 16
    generated: Annotated[int, About("Tokens of each continuation.")] = 512
    ranks: Annotated[int, About("Ranks that hold the experts, in contiguous shares.", least=1)] = 1
    sketch: Annotated[
        Path | None, About("The file that `epsim reader build` wrote, for a reader. Default: built in memory.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generations > self.sequences:
            raise ValueError(f"--generations {self.generations}: give at most the {self.sequences} sequences")
        wrong = [b for b in self.batch_sizes if b < 1 or self.sequences % b]
        if wrong or not self.batch_sizes:
            raise ValueError(f"--batch-size {wrong[:1] or 'none'}: give divisors of {self.sequences}, the sequences")
        if self.length < 2 or self.generated < NGRAM:
            raise ValueError(f"--length needs at least 2 tokens and --generated at least {NGRAM}")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(FigureOptions):
    """Only the routers of the stacks act. The model's own choice, `topk`, is always measured first. Each round
    continues `batch` prompts of held-out text, which take the domains in turn."""

    stacks: Annotated[
        tuple[str, ...],
        About("Compare the router of this stack with topk; repeatable.", flag="--policy", metavar="STACK"),
    ] = ()
    batch: Annotated[int, About("Sequences decoded together.", least=1)] = 16
    prompt: Annotated[int, About("Tokens of held-out text in each prompt.", least=1)] = 64
    num_tokens: Annotated[int, About("Tokens of each continuation.", flag="--tokens", least=2)] = 256
    rounds: Annotated[int, About("Number of timed rounds; in each round every policy decodes once.", least=1)] = 5
    experts: Annotated[
        str,
        About(
            "What computes the experts: kernel (epsim's, for up to 64 rows) or model (transformers' code).",
            choices=("kernel", "model"),
        ),
    ] = "kernel"
