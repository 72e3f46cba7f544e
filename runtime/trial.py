"""Injects faults on purpose, for tests."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from epsim import stops
from epsim.runtime.beats import JobClock

Kind: TypeAlias = Literal["kill", "stop", "sleep", "hold", "nan", "short"]


@dataclass(frozen=True, slots=True)
class Trial:
    """An injected fault, `KIND:rank=R,step=S,layer=L,phase=P` in EPSIM_TRIAL_FAULT. kill, stop (SIGSTOP), sleep and
    hold (sleep with the GIL held) act at that position. nan sets the hidden states of the step to NaN. short ends the
    rank's steps before that step."""

    kind: Kind
    rank: int
    step: int
    layer: int = -1
    phase: str = ""

    @classmethod
    def from_text(cls, text: str) -> Trial:
        kind, _, rest = text.partition(":")
        fields = dict(part.partition("=")[::2] for part in rest.split(","))
        known = get_args(Kind)
        if kind not in known or not {"rank", "step"} <= set(fields) <= {"rank", "step", "layer", "phase"}:
            raise ValueError(
                f"EPSIM_TRIAL_FAULT {text!r}: write one of {', '.join(sorted(known))}, then :rank=R,step=S"
            )
        phase = fields.pop("phase", "")
        for key, value in fields.items():
            if not value.isdecimal():
                raise ValueError(f"EPSIM_TRIAL_FAULT {text!r}: {key} is {value!r}, not an integer")
        return cls(kind, phase=phase, **{key: int(value) for key, value in fields.items()})  # type: ignore[arg-type]


class TrialClock(JobClock):
    """A clock that injects the fault at its position."""

    trial: Trial | None = None

    def enter(self, phase: str, step: int | None = None, layer: int | None = None) -> None:
        super().enter(phase, step, layer)
        trial = self.trial
        if trial is None or (self.rank, self.step, self.layer, phase) != (
            trial.rank, trial.step, trial.layer, trial.phase,
        ):  # fmt: skip
            return
        if trial.kind == "sleep":
            time.sleep(3600)
        elif trial.kind == "hold":
            signal.pthread_sigmask(signal.SIG_BLOCK, stops.SIGNALS)  # which would end the sleep
            ctypes.PyDLL(None).sleep(3600)
        elif trial.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if trial.kind == "kill" else signal.SIGSTOP)
