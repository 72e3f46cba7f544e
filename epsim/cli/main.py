"""The command line: the app with its commands, signals, and errors.

A mistake of the user costs one line on stderr and exit code 2. `epsim --help` loads neither PyTorch nor Ray.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from epsim.cli.calibrate import calibrate_command
from epsim.cli.compare import compare_command
from epsim.cli.model import app as model_app
from epsim.cli.options import command
from epsim.cli.plan import plan_command
from epsim.cli.reader import app as reader_app
from epsim.cli.replay import replay_command
from epsim.cli.report import report_command
from epsim.cli.reproduce import app as reproduce_app
from epsim.cli.run import run_command
from epsim.cli.sweep import sweep_command
from epsim.cli.traces import app as traces_app
from epsim.cli.tune import tune_command
from epsim.files import message_line
from epsim.version import VERSION

HELP = "Expert-parallel load balancing for mixture-of-experts models: which policy is best, and by how much?"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=HELP)
for name, group in {"traces": traces_app, "model": model_app, "reproduce": reproduce_app, "reader": reader_app}.items():
    app.add_typer(group, name=name)


def _version(asked: bool) -> None:
    if asked:
        print(f"epsim {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


for function in (
    replay_command, plan_command, run_command, compare_command, report_command, sweep_command, tune_command,
    calibrate_command,
):  # fmt: skip
    command(app, function.__name__.removesuffix("_command"))(function)


def main() -> None:
    """The console script. A mistake of the user costs one line and exit code 2. EPSIM_DEBUG=1 shows the traceback."""
    # OpenMP threads must not spin while they wait: they would take cores from threads that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:  # the command was started with stdout closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    stopping = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores SIGINT in background jobs
        stopping.append(signal.SIGINT)
    previous = {number: signal.signal(number, _stop) for number in stopping}
    _stopped_by.clear()
    try:
        code = _answer()
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()
    except OSError as error:
        _fail(error, _of_output(error) or str(error))
    except ValueError as error:
        _fail(error, str(error))
    except MemoryError as error:
        _fail(error, f"more than fits this machine's memory ({error}): give fewer or smaller steps, ranks or experts")
    except KeyboardInterrupt:
        print("epsim: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if type(error).__name__ == "Abort":  # click's form of an interrupt
            print("epsim: interrupted", file=sys.stderr)
            sys.exit(130)
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
            sys.exit(0)
        _fail(error, f"{error.format_message()} (see epsim --help and epsim COMMAND --help)")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    sys.exit(code if isinstance(code, int) else 0)


def _answer() -> object:
    """Runs the command. After a signal to stop, any error counts as the stop: interrupted imports raise many kinds."""
    try:
        return app(standalone_mode=False)
    except Exception:
        if _stopped_by:
            sys.exit(128 + _stopped_by[0])
        raise


_stopped_by: list[int] = []


def _stop(number: int, frame: object) -> None:
    """Makes SIGTERM unwind the stack as an interrupt does, so that unfinished files are removed."""
    _stopped_by.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _leave_quietly() -> None:
    """Exits without a message when the reader of stdout, such as `head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def _of_output(error: OSError) -> str:
    """The message if standard output cannot be written, as on a full disk; else nothing."""
    if error.filename is not None or error.errno is None:  # an error of a file, or raised by epsim
        return ""
    try:
        print(flush=True)
    except OSError as again:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output: {again.strerror}: direct it elsewhere"
    return ""


def _fail(error: Exception, message: str) -> None:
    if os.environ.get("EPSIM_DEBUG"):
        raise error
    print(f"epsim: {message_line(message)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
