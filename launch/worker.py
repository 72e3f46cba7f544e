"""The process of one rank: `torchrun --nproc-per-node N -m epsim.launch.worker TRACE ...`.

The arguments are those of `epsim run`. For several nodes, use torchrun's options (--nnodes, --rdzv-endpoint).
"""

import contextlib
import dataclasses
import os
import sys

from epsim import stops

LAUNCHER = "EPSIM_LAUNCHER"
"""The environment variable with the process id of the launcher, if `epsim run` is the launcher."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point under torchrun. Exits with one line and code 2 after a mistake of the user, 1 after a fault."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # PyTorch is imported after this line, because a launcher that dies meanwhile must not leave this process behind.
    stops.end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    with stops.handled():
        code = _exit_code(sys.argv[1:] if arguments is None else arguments)
    sys.exit(code)


def _exit_code(arguments: list[str]) -> int:
    from epsim.files import message_line
    from epsim.launch.member import Member
    from epsim.launch.options import RunOptions
    from epsim.launch.rank import run_rank
    from epsim.options import parse_words
    from epsim.runtime.beats import BAD_INPUT

    try:
        options = dataclasses.replace(parse_words(RunOptions, arguments), launcher="torchrun")
        results = run_rank(options, Member.from_environment())
        if results is not None and "EPSIM_STORE" not in os.environ:
            from epsim.launch.measured import print_note
            from epsim.report.table import print_table

            print_table(results)
            print_note(results["run"])
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("EPSIM_DEBUG"):
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(OSError):  # stderr may be on a full disk too
                print(f"epsim: {message_line(str(error))}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    main()
