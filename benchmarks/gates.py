"""The gates of the time model, and the programs that measure what the gates look at.

    python benchmarks/gates.py [--out benchmarks/results/gates.json]
    python benchmarks/gates.py draw --recordings FOLDER --out FILE.npz
    python benchmarks/gates.py measure cells|slices ...
    torchrun --nproc-per-node 2 benchmarks/gates.py layers --recordings FOLDER --out FILE.json

`--help` after each part describes it; without a part it is benchmarks/gates/report.py.
"""

import importlib
import sys

PARTS = ("draw", "measure", "layers")

if __name__ == "__main__":
    part = next((part for part in PARTS if sys.argv[1:2] == [part]), "report")
    importlib.import_module(f"gates.{part}").main(sys.argv[1 + (part != "report") :])
