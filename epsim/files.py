"""Files that are read or written: plain ones only, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_MESSAGE = 600


class CannotWriteError(OSError):
    """Writing failed half-way: a full disk, a lost folder."""

    def __init__(self, path: object, error: Exception) -> None:
        super().__init__(f"{path}: cannot be written: {reason(error)}; nothing is left of it")


def check_source(path: Path) -> None:
    """Raises FileNotFoundError or ValueError where path is no plain file (links are followed). Readers read a file more
    than once, which a pipe does not allow, and a device has no end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {reason(error)}: give a file that can be read") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a folder: give a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: a pipe or device, not a plain file: save it to a file and give that")


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that writing to path will replace, links followed; before any work is done.

    Raises ValueError or FileNotFoundError where it is a folder, a device or pipe (renaming a file over a device such as
    /dev/null would destroy it), or in a folder that does not exist or cannot be written.
    """
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)!r}: no name of a file to write")
    target = Path(os.path.realpath(path))
    try:
        if target.is_symlink():
            raise ValueError(f"{path}: a link to itself: give another name")
        if target.is_dir():
            raise ValueError(f"{path} is a folder: give a file to write to")
        if target.exists() and not target.is_file():
            raise ValueError(f"{path}: a device or pipe, which would be lost: give a plain file to write to")
    except OSError as error:
        raise ValueError(f"{str(path)[:100]}: {reason(error)}: give another name") from None
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such folder to write {target.name} in")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{target.parent}: this folder cannot be written: give a file elsewhere")
    return target


def check_out(out: str | os.PathLike[str] | None) -> None:
    """Makes the folder that results go to, before any work. Raises ValueError if it cannot be written; None is fine."""
    if out is None:
        return
    folder = Path(out)
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {out}: is a file; give a folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {reason(error)}: give another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: not writable; give another folder")
    for name in ("results.json", "report.md", "report.html"):
        check_target(folder / name)


def temporary_beside(target: Path) -> Path:
    """A new empty file in the folder of target, which may be renamed over it."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise ValueError(f"{target.parent}: {reason(error)}: cannot write {target.name[:100]} there") from None
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path beside `path`; it takes the place of `path` only if the block ends without an error."""
    target = check_target(path)
    temporary = temporary_beside(target)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reason(error: Exception) -> str:
    """What an operating system's error says, without its number."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def printable(text: str) -> str:
    """Text from files and names on one line: runs of white space become a space, and what a terminal would obey or
    could not show (control and direction characters, halves of surrogate pairs) becomes an escape such as \\x1b."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def message_line(text: str) -> str:
    """A message for people: printable, with the middle left out where it is very long."""
    line = printable(text)
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"
