"""Runs a job of one rank in this process, for debugging and profiling."""

from epsim.launch.member import Member
from epsim.launch.options import RunOptions
from epsim.launch.rank import run_rank
from epsim.results import ResultsData


def run_inline(options: RunOptions) -> ResultsData:
    if options.ranks not in (None, 1):
        raise ValueError(f"--ranks {options.ranks}: inline is one process, one rank; give --launcher torchrun")
    results = run_rank(options, Member())
    assert results is not None
    return results
