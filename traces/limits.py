"""The levels, phases and sizes that a trace can have. Without NumPy, so that the command line starts fast."""

import os
from pathlib import Path
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
MAX_STEP_NUMBERS = 2**25
MAX_SHARED_COST = 1e6

# Reading a file may take the memory and time of MAX_NUMBERS numbers (1 GiB of int64), or of NUMBERS_PER_BYTE numbers
# for each byte of the file if that is more. A file that is not compressed cannot reach this by its size, because a
# number takes at least a byte of it. Compressed recordings hold 1 to 8 bytes in a byte of their file.
MAX_NUMBERS = 2**27
NUMBERS_PER_BYTE = 16


def most_numbers(*paths: Path) -> int:
    """How many numbers reading these files may take."""
    return max(MAX_NUMBERS, NUMBERS_PER_BYTE * sum(os.path.getsize(path) for path in paths))


def check_size(what: str, numbers: float, *paths: Path, hint: str = "import it in parts") -> None:
    """Raises ValueError if reading these files would take more numbers than `most_numbers` allows.

    what: what the files hold, for the message; numbers: the memory and time that it takes, in numbers."""
    if numbers > (most := most_numbers(*paths)):
        size = sum(os.path.getsize(path) for path in paths)
        raise ValueError(
            f"{paths[0]}: {what}: too large in memory for {size / 1e6:.1f} MB of files (more than {most:,} numbers): "
            f"{hint}"
        )
