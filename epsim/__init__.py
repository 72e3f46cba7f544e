"""Expert-parallel load balancing for mixture-of-experts models: which policy is best, and by how much?

>>> results = epsim.replay("sample", ["eplb", "best=eplb+lplb"], ranks=16, nodes=2, redundant=32)
>>> print(results.verdict)

docs/python.md shows all functions.
"""

import importlib
from typing import TYPE_CHECKING

from epsim.version import VERSION

__version__ = VERSION
__all__ = ["Results", "__version__", "compare", "load", "plan", "replay", "run", "tune"]

if TYPE_CHECKING:
    from epsim.front import compare, load, plan, replay, run, tune
    from epsim.report.results import Results
else:

    def __getattr__(name: str) -> object:
        """Imports a function when it is first used. So the command line handles signals before its long imports."""
        if name not in __all__:
            raise AttributeError(f"module 'epsim' has no attribute {name!r}")
        return getattr(importlib.import_module("epsim.report.results" if name == "Results" else "epsim.front"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]
