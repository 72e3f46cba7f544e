"""Expert-parallel load balancing for mixture-of-experts models: which policy is best, and by how much?

>>> results = epsim.replay("sample", ["eplb", "best=eplb+lplb"], ranks=16, nodes=2, redundant=32)
>>> print(results.verdict)

docs/python.md shows all functions.
"""

from typing import TYPE_CHECKING

from epsim.front import compare, load, plan, replay, run, tune
from epsim.version import VERSION

__version__ = VERSION
__all__ = ["Results", "__version__", "compare", "load", "plan", "replay", "run", "tune"]

if TYPE_CHECKING:
    from epsim.report.results import Results
else:

    def __getattr__(name: str) -> object:
        if name == "Results":
            from epsim.report.results import Results

            return Results
        raise AttributeError(f"module 'epsim' has no attribute {name!r}")
