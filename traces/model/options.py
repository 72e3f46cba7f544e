"""Options of fetching text, training the small model and recording it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from epsim.options import About, Options
from epsim.traces.model.config import ModelShape


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options):
    cache: Annotated[
        Path | None, About("Folder where text and model are kept. Default: $EPSIM_CACHE or ~/.cache/epsim.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(CacheOptions):
    device: Annotated[str | None, About("cuda or cpu. Default: the GPU if there is one.")] = None
    seed: Annotated[int, About("Seed of all random draws.", least=0)] = 0


@dataclass(frozen=True, kw_only=True)
class FetchOptions(CacheOptions):
    megabytes: Annotated[float, About("Maximum size of the text of each domain, in MB.")] = 20
    vocabulary: Annotated[int, About("Tokens of the byte-pair tokenizer.", least=300, most=65_536)] = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.megabytes < float("inf"):
            raise ValueError(f"--megabytes {self.megabytes}: give a positive size")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(DeviceOptions):
    """Each step has `batch` sequences of `length` tokens. The learning rate warms up, then falls to a tenth (cosine).

    balance: weight of transformers' load-balancing loss, averaged over layers. A GPU trains in bfloat16 with float32
    master weights. The dense model is trained on the same text in the same order.
    """

    steps: Annotated[int, About("Training steps.", least=1)] = 4000
    batch: Annotated[int, About("Sequences in a step.", least=1)] = 64
    length: Annotated[int, About("Tokens in a sequence.", least=1)] = 512
    learning_rate: Annotated[float, About("The highest learning rate.")] = 2e-3
    weight_decay: float = 0.1
    balance: float = 0.01
    dense: Annotated[bool, About("Also train a dense model of equal active size.", flag="--dense/--no-dense")] = True
    shape: ModelShape = field(default_factory=ModelShape)
    report: Annotated[Path | None, About("A JSON file for curves, losses and skew.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate <= 0:
            raise ValueError(f"--learning-rate {self.learning_rate}: give more than 0")
        if self.length >= self.shape.max_positions:
            raise ValueError(f"--length {self.length}: the model has {self.shape.max_positions} positions")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(DeviceOptions):
    """Each cycle has two runs of a prefill step and its decode steps, with a small and a large batch, and one more
    prefill step. One of the three mixes domains, a different one each cycle, and no text is used twice.

    batches: sequences of the two runs; prompts: tokens of each prompt; continuations: sampled tokens of each run.
    """

    out: Annotated[Path, About("The trace to write (Parquet).")] = field(kw_only=False)
    cycles: Annotated[int, About("Rounds of prefill and decode; each adds 45 steps.", least=1)] = 8
    batches: tuple[int, int] = (16, 64)
    prompts: tuple[int, int] = (128, 32)
    continuations: tuple[int, int] = (33, 11)
    num_source_ranks: int = 16
