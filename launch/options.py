"""What a run is asked to do: the same under every launcher, as a value and as command-line arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from epsim.cli.main import MOST_SLOTS
from epsim.files import check_target, reason

LAUNCHERS = ("inline", "torchrun", "ray")
EXCHANGES = ("auto", "deep_ep", "torch")
DEVICES = ("auto", "cpu", "cuda")
CONTEXT = 64
DTYPES = ("auto", "float32", "bfloat16")
ONLY_BFLOAT16 = "on GPUs experts compute in bfloat16; leave --dtype out, or give --device cpu"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """policies: as given to --policy. steps: None for all that the trace has after those planned on.

    ranks: None for as many as the launcher makes. layers: the first so many of the trace's, None for all.
    hardware: what times are predicted for, None for no prediction of them.
    text, sequence, context: of a trained model: the file it reads (None: held-out text of the corpus), the most tokens
    of a sequence in a step that is no decode step (None: as many as the model reads), and the tokens that a decode
    step's sequences have read before. launcher: what started, or is to start, the ranks.
    timeout: seconds that the rank furthest behind may stay in one phase before it is taken to hang.
    """

    trace: str
    model: str
    policies: tuple[str, ...]
    out: Path
    steps: int | None = None
    ranks: int | None = None
    nodes: int = 1
    redundant: int = 0
    groups: int = 1
    layers: int | None = None
    history: str | None = None
    plan_share: float = 0.5
    seed: int = 0
    exchange: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    timeout: float = 20.0
    hardware: str | None = None
    text: str | None = None
    sequence: int | None = None
    context: int = CONTEXT
    launcher: str = LAUNCHERS[0]

    def __post_init__(self) -> None:
        known_values = {"exchange": EXCHANGES, "device": DEVICES, "dtype": DTYPES, "launcher": LAUNCHERS}
        for name, known in known_values.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose {', '.join(known)}")
        for name in ("steps", "ranks", "layers", "sequence", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}: give at least 1")
        for name in ("ranks", "nodes", "redundant", "groups"):
            if (getattr(self, name) or 0) > MOST_SLOTS:
                raise ValueError(f"--{name} {getattr(self, name)}: give at most {MOST_SLOTS}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed {self.seed}: give 0 to 2^63 - 1")
        if (self.device, self.dtype) == ("cuda", "float32"):
            raise ValueError(f"--dtype float32: {ONLY_BFLOAT16}")
        if not 1 <= self.timeout <= 3600:
            raise ValueError(f"--timeout {self.timeout:g}: give 1 to 3600 seconds")
        if not self.policies:
            raise ValueError("no policy to run: give --policy STACK at least once")

    def make_out(self) -> None:
        """Makes the run's folder. Raises ValueError, in one line, where results cannot be written there."""
        out = self.out
        try:
            if not out.parts:
                raise ValueError("--out names no folder: give one")
            if out.exists() and not out.is_dir():
                raise ValueError(f"--out {out}: is a file; give a folder")
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {out}: {reason(error)}: give another folder") from None
        check_target(out / "results.json")

    def arguments(self) -> list[str]:
        """The command line of `epsim run` and its worker; the trace first, defaults left out."""
        found = [self.trace]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "policies":
                found += [part for policy in value for part in ("--policy", policy)]
            elif field.name != "trace" and value != field.default:
                found += [f"--{field.name.replace('_', '-')}", str(value)]
        return found
