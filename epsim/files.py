"""Checks files before they are read or written, and writes files completely or not at all."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from epsim.stops import at_end

MAX_MESSAGE = 600


class CannotWriteError(OSError):
    """Writing failed, for example because the disk is full or the folder is gone."""

    def __init__(self, path: object, error: Exception, left: str = "nothing is left of it") -> None:
        """left: what is still on the disk."""
        super().__init__(f"{path}: cannot be written: {reason(error)}; {left}")


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
    if not os.fspath(out):
        raise ValueError("--out names no folder: give one")
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


@contextlib.contextmanager
def folder_for_results(out: str | os.PathLike[str] | None) -> Iterator[None]:
    """Makes the folder, as `check_out` does, and reserves it for this process until the block ends. None is fine.

    Raises ValueError if another process has reserved it. The lock is on the folder itself, so nothing is left of it.
    """
    check_out(out)
    with contextlib.nullcontext() if out is None else _locked(Path(out)):
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out {folder}: another command is writing into it: wait for it, or give another folder"
            ) from None
        except OSError:  # a file system without locks on folders
            pass
        yield
    finally:
        os.close(handle)


def temporary_beside(target: Path) -> Path:
    """Creates an empty file in the folder of target, which can later be renamed to it."""
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(4).hex()}.part")
    at_end(lambda: temporary.unlink(missing_ok=True))
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise ValueError(f"{target.parent}: {reason(error)}: cannot write {target.name[:100]} there") from None
    return temporary


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`, and renames it to `path` if the block ends without an error.

    Raises CannotWriteError if the disk is full, or the file cannot be written for another reason.
    """
    target = check_target(path)
    temporary = temporary_beside(target)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())
        temporary.replace(target)
    except OSError as error:
        raise error if isinstance(error, CannotWriteError) else CannotWriteError(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def reason(error: Exception) -> str:
    """The message of an error; an operating system's error without its number."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
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
