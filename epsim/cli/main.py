"""The entry point of the command line: signals, errors and exit codes.

A mistake of the user costs one line on stderr and exit code 2. `epsim --help` loads neither PyTorch nor Ray. The app is
imported late, so that a signal is handled from the start.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys

from epsim import stops
from epsim.files import message_line, reason

CLOSED_PIPE = 128 + signal.SIGPIPE


def main() -> None:
    """The console script. A mistake of the user costs one line and exit code 2. EPSIM_DEBUG=1 shows the traceback."""
    # OpenMP threads must not spin while they wait: they would take cores from threads that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:  # the command was started with stdout closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    with stops.handled():
        code = _exit_code()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An interrupt while Python shuts down would only print a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _exit_code() -> int:
    """Runs the command. Returns its exit code, and prints the line of an error."""
    try:
        from epsim.cli.app import app

        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich exits with code 1
            return _closed_pipe()
        raise
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:
        return _fail(error, _of_output(error) or _of_file(error))
    except ValueError as error:
        return _fail(error, str(error))
    except MemoryError as error:
        words = f"more than fits this machine's memory ({error}): give fewer or smaller steps, ranks or experts"
        return _fail(error, words)
    except Exception as error:
        stops.wait_if_ending()
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
            return 0
        return _fail(error, f"{error.format_message()} (see epsim --help and epsim COMMAND --help)")


def _closed_pipe() -> int:
    """The exit code when the reader of stdout, such as `head`, has closed it. Nothing is printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def _of_output(error: OSError) -> str:
    """The message if standard output cannot be written, as on a full disk; else empty."""
    if error.filename is not None or error.errno is None:  # an error of a file, or raised by epsim
        return ""
    try:
        print(flush=True)
    except OSError as again:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output: {again.strerror}: direct it elsewhere"
    return ""


def _of_file(error: OSError) -> str:
    return str(error) if error.filename is None else f"{error.filename}: {reason(error)}"


def _fail(error: Exception, message: str) -> int:
    stops.wait_if_ending()
    if os.environ.get("EPSIM_DEBUG"):
        raise error
    with contextlib.suppress(OSError):  # stderr may be on a full disk too
        print(f"epsim: {message_line(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
