"""The levels, phases and sizes that a trace can have. Without NumPy, so that the command line starts fast."""

from typing import Literal, TypeAlias

Level: TypeAlias = Literal["counts", "rank_counts", "tokens"]
Origin: TypeAlias = Literal["recorded", "drawn", "composed"]
Phase: TypeAlias = Literal["prefill", "decode", "mixed", "training", "unknown"]

LEVELS: tuple[Level, ...] = ("counts", "rank_counts", "tokens")
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "training", "unknown")
ORIGINS: tuple[Origin, ...] = ("recorded", "drawn", "composed")

# A file beyond these limits is damaged or hostile. They keep expert ids within int16, and one step within memory.
MAX_EXPERTS = 2**15 - 1
MAX_LAYERS = 2**16
MAX_RANKS = 2**16
MAX_STEP_NUMBERS = 2**28
MAX_SHARED_COST = 1e6
