"""Checks files before they are read or written, and writes files completely or not at all."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_MESSAGE = 600


class CannotWriteError(OSError):
    """Writing failed, for example because the disk is full or the folder is gone."""

    def __init__(self, path: object, error: Exception) -> None:
        super().__init__(f"{path}: cannot be written: {reason(error)}; nothing is left of it")


def check_source(path: Path) -> None:
    """Raises FileNotFoundError or ValueError unless path is a plain file (links are followed). Readers read a file more
    than once, which a pipe does not allow, and a device has no end."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {reason(error)}: give a file that can be read") from None
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is a folder: give a file")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: a pipe or device, not a plain file: save it to a file and give that")
    if not status.st_size:  # Files of /proc have no size either, and some of them have no end.
        raise ValueError(f"{path}: the file is empty")


@contextlib.contextmanager
def utf8_name(path: Path) -> Iterator[str]:
    """A UTF-8 name of a file, for libraries that accept no other name. It is valid inside the block."""
    if str(path).isascii() or not any("\udc80" <= character <= "\udcff" for character in str(path)):
        yield str(path)
        return
    with path.open("rb") as file:
        yield f"/dev/fd/{file.fileno()}"


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that a write to path would replace, after following links. Call it before any long work.

    Raises ValueError or FileNotFoundError for a folder, for a device or pipe (renaming a file over a device such as
    /dev/null would destroy it), and for a folder that does not exist or cannot be written.
    """
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)!r}: not the name of a file: give a file to write to")
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
    """Creates an empty file in the folder of target, which can later be renamed to it."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise ValueError(f"{target.parent}: {reason(error)}: cannot write {target.name[:100]} there") from None
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and renames it to `path` if the block ends without an error."""
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
    """The message of an error; an operating system's error without its number."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def printable(text: str) -> str:
    """Text from files or names as one printable line. White space becomes one space; control and direction characters
    and halves of surrogate pairs become escapes such as \\x1b."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def message_line(text: str) -> str:
    """A message as one printable line; a very long one loses its middle."""
    line = printable(text)
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"
