"""Loads a source file. Its content decides its type, and no code in it is ever run."""

import csv
import gzip
import io
import json
import math
import mmap
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from epsim.files import CannotWriteError, check_source, utf8_name
from epsim.traces.limits import check_size, most_numbers
from epsim.traces.store import one_line
from epsim.traces.trace import Array

Kind: TypeAlias = Literal["parquet", "json", "jsonl", "csv", "text", "yaml", "npz", "npy", "pt", "safetensors"]
HEAD_BYTES = 1 << 16
# Limits: a file that is parsed whole takes several times its size in memory. Logs are read line by line.
MAX_LINE = 1 << 26
MAX_JSON = 1 << 29
# What parts of a file take in memory and time, in numbers of 8 bytes (see `epsim.traces.limits`).
NUMBERS_PER_LINE = 32
NUMBERS_PER_OBJECT = 1024
NUMBERS_PER_MARK = {"[": 13, "{": 32, ",": 6, '"': 4}
LINES = "unpack the file if it is compressed, save it as lines of JSON or as npz, or import it in parts"
UNPACK = "unpack the file and give that, or import it in parts"
# Functions that PyTorch's safe loader calls with any arguments. No recorder uses them.
UNUSED = re.compile(rb"c(builtins\n(?:bytearray|set)|collections\nCounter|_codecs\nencode)\n")


@dataclass(frozen=True, slots=True)
class Document:
    """A source file.

    content: the whole of a json, npz (name -> array), npy, pt or safetensors file; of other types only the first record
    (jsonl), the header (csv) or the first line (text). `lines`, `records` and `rows` read the rest of these.
    """

    path: Path
    kind: Kind
    content: Any
    packed: bool = False

    def lines(self, numbers_per_line: int = NUMBERS_PER_LINE) -> Iterator[str]:
        """The lines of a text. numbers_per_line: what the reader needs for each line (see `check_size`)."""
        most, numbers = most_numbers(self.path), 0
        with _open(self.path, self.packed) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="strict")
            number = 0
            while line := text.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise ValueError(f"{self.path}: line {number} is longer than {MAX_LINE >> 20} MiB: not a recording")
                numbers += numbers_per_line + len(line) // 2
                if numbers > most:
                    check_size(f"more than {number - 1:,} lines", numbers, self.path, hint=UNPACK)
                yield line

    def records(self, numbers_per_line: int = NUMBERS_PER_LINE) -> Iterator[tuple[int, Any]]:
        """(line number, JSON value) of each line of a jsonl file, or of each item of a JSON list."""
        if self.kind == "json":
            items = self.content if isinstance(self.content, list) else [self.content]
            check_size(f"{len(items):,} records", numbers_per_line * len(items), self.path, hint=UNPACK)
            yield from enumerate(items, 1)
            return
        for number, line in enumerate(self.lines(numbers_per_line), 1):
            if line.strip():
                if len(line) > HEAD_BYTES:
                    check_size(f"line {number}", _json_numbers(line), self.path, hint=UNPACK)
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{self.path}: line {number} is not JSON: {one_line(error)}") from None

    def rows(self, numbers_per_line: int = NUMBERS_PER_LINE) -> Iterator[list[str]]:
        """Rows of a csv file after the header."""
        reader = csv.reader(self.lines(numbers_per_line))
        next(reader)
        yield from reader


@contextmanager
def naming(path: Path | str, what: str) -> Iterator[None]:
    """Turns any error inside into a ValueError with one line that names the file."""
    try:
        yield
    except (FileNotFoundError, CannotWriteError):
        raise
    except Exception as error:
        if isinstance(error, ValueError | OSError) and str(path) in str(error):
            raise
        detail = one_line(error)
        if isinstance(error, MemoryError):
            raise ValueError(f"{path}: does not fit in this machine's memory ({detail}): import it in parts") from None
        if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            raise ValueError(f"{path}: {detail}") from None
        raise ValueError(f"{path}: not a well-formed {what}: {type(error).__name__}: {detail}") from None


def load_document(path: Path) -> Document:
    """Loads a file. Raises FileNotFoundError, or ValueError if it is empty, damaged or of an unknown type."""
    check_source(path)
    with naming(path, "file"):
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if not head:
            raise ValueError("the file is empty")
        return _load(path, head)


def _load(path: Path, head: bytes) -> Document:
    if head[:4] == b"PAR1":
        return Document(path, "parquet", None)
    if head[:6] == b"\x93NUMPY":
        with _refusing(path, "npy file"):
            # A mapped file must be as long as its header says.
            return Document(path, "npy", np.asarray(np.load(path, mmap_mode="c", allow_pickle=False)))
    if head[:4] == b"PK\x03\x04":
        return _load_zip(path)
    if head[:2] == b"\x1f\x8b":
        with _refusing(path, "gzip file"), gzip.open(path) as file:
            head = file.read(HEAD_BYTES)
        return _load_text(path, head, packed=True)
    if head[:1] == b"\x80":
        with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as code:
            return Document(path, "pt", _load_torch(path, code))
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return Document(path, "safetensors", _load_safetensors(path))
    return _load_text(path, head, packed=False)


def _load_zip(path: Path) -> Document:
    with _refusing(path, "zip file"), zipfile.ZipFile(path) as file:
        names = file.namelist()
        size = sum(member.file_size for member in file.infolist())
        pickles = [name for name in names if name.rsplit("/", 1)[-1] == "data.pkl"]
        packed = size > path.stat().st_size
        code = file.read(pickles[0]) if pickles and not packed else b""
    if pickles and packed:
        raise ValueError("a PyTorch file that is compressed: save it again with torch.save")
    if pickles:
        return Document(path, "pt", _load_torch(path, code, mmap=True))
    hint = "save the arrays with numpy.savez instead of savez_compressed, or import them in parts"
    check_size(f"unpacks to {size >> 20:,} MiB", size / 4, path, hint=hint)
    if names and all(name.endswith(".npy") for name in names):
        with _refusing(path, "npz file"), np.load(path, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        check_size("unpacks to many numbers", sum(array.size for array in content.values()), path, hint=hint)
        return Document(path, "npz", content)
    raise ValueError("a zip file that is neither NumPy's npz nor PyTorch's pt")


def _load_torch(path: Path, code: bytes | mmap.mmap, **how: bool) -> Any:
    """The content of a PyTorch file. code: bytes that include its pickle."""
    import torch

    if call := UNUSED.search(code):
        raise ValueError(f"a pickle that calls {call.group(1).decode().replace(chr(10), '.')}: not a recording")
    try:
        with warnings.catch_warnings(), utf8_name(path) as name:
            warnings.simplefilter("ignore")
            content = torch.load(name, map_location="cpu", weights_only=True, **how)
    except Exception as error:
        text = str(error)
        unsafe = re.search(r"GLOBAL (\S+)|Unsupported (?:global|class|operand|operator)|weights_only", text, re.I)
        if unsafe and "corrupt" not in text.lower():
            called = f" (it calls {unsafe.group(1)})" if unsafe.group(1) else ""
            raise ValueError(
                f"a pickle that PyTorch's safe loader refuses{called}; it was not executed: "
                "if you trust it, save its content with torch.save, as npz or as JSON"
            ) from None
        raise ValueError(f"truncated or damaged PyTorch or pickle file ({type(error).__name__})") from None
    check_size("the same few values many times over", _spread(content, {}), path, hint="save each value once")
    return content


def _spread(value: Any, known: dict[int, float]) -> float:
    """What a loaded value takes in numbers if each use of a shared list or tensor counts. A list that contains itself
    counts as infinite. known: the result for each list and dictionary, by id."""
    if hasattr(value, "numel"):
        return NUMBERS_PER_OBJECT + float(value.numel())
    if not isinstance(value, list | tuple | dict) or not value:
        return 1.0
    if id(value) not in known:
        known[id(value)] = math.inf
        items = value.values() if isinstance(value, dict) else value
        own = NUMBERS_PER_OBJECT if isinstance(value, dict) else 8
        known[id(value)] = own + sum(_spread(item, known) for item in items)
    return known[id(value)]


def _load_safetensors(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    with _refusing(path, "safetensors file"), utf8_name(path) as name:
        return dict(load_file(name))


def _load_text(path: Path, head: bytes, packed: bool) -> Document:
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or b"\0" in head:
            raise ValueError("binary content of an unknown type") from None
        text = head[: error.start].decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("binary content of an unknown type")
    stripped = text.lstrip()
    if not stripped:
        raise ValueError("the file holds no text")
    if stripped.startswith("version https://git-lfs.github.com/"):
        raise ValueError("a Git LFS pointer, not the file itself: fetch the file with `git lfs pull`")
    if re.search(r"^[ \t]*(initial_global_assignments|num_slots)\s*:", text, re.M) and stripped[0] not in "{[":
        return Document(path, "yaml", None, packed)
    first = stripped.split("\n", 1)[0].rstrip()
    if stripped[0] in "{[":
        return _load_json(path, stripped, packed)
    if "," in first and not re.match(r"-?\d+\s*:", first):
        return Document(path, "csv", [name.strip().lower() for name in next(csv.reader([first]))], packed)
    return Document(path, "text", first, packed)


def _load_json(path: Path, head: str, packed: bool) -> Document:
    lines = head.split("\n")
    if head[0] == "{" and len(lines) > 1:
        try:
            record = json.loads(lines[0])
        except (ValueError, RecursionError):
            record = None
        following = next((line.lstrip() for line in lines[1:] if line.strip()), "")
        if isinstance(record, dict) and following[:1] == "{":
            return Document(path, "jsonl", record, packed)
    most = min(MAX_JSON, 2 * most_numbers(path))
    with _open(path, packed) as file:
        raw = file.read(most + 1)
    if len(raw) > most or _json_numbers(raw) > most_numbers(path):
        return _long_log(path, packed)
    try:
        text = raw.decode("utf-8-sig")
        del raw  # It may take hundreds of MB.
        return Document(path, "json", json.loads(text), packed)
    except (ValueError, RecursionError) as error:
        detail = one_line(error)
        if isinstance(error, UnicodeError):
            raise ValueError(f"truncated or malformed JSON: {detail}") from None
    # The first line of a log may be longer than the head.
    try:
        record = json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        raise ValueError(f"truncated or malformed JSON: {detail}") from None
    return Document(path, "jsonl", record, packed)


def _long_log(path: Path, packed: bool) -> Document:
    """A file of JSON lines that is too large to parse whole; other JSON of that size raises ValueError."""
    with _open(path, packed) as file:
        first = file.readline(MAX_LINE)
    check_size("a JSON document", math.inf if len(first) == MAX_LINE else _json_numbers(first), path, hint=LINES)
    try:
        return Document(path, "jsonl", json.loads(first.decode("utf-8-sig")), packed)
    except (ValueError, RecursionError):
        raise ValueError(
            f"a JSON document of more than {MAX_JSON >> 20} MiB, or with more numbers than reading may take: {LINES}"
        ) from None


def _json_numbers(text: str | bytes) -> float:
    """What parsed JSON takes at most, in numbers: its text twice, and an object for each mark."""
    total = len(text) * (3 if text.isascii() else 9) / 8
    for mark, numbers in NUMBERS_PER_MARK.items():
        total += numbers * (text.count(mark) if isinstance(text, str) else text.count(mark.encode()))
    return total


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Turns the errors of NumPy, zipfile and other libraries into plain messages."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if "allow_pickle" in str(error) or "Python objects" in str(error):
            raise ValueError(f"the {what} holds Python objects, which are never loaded: save plain numbers") from None
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"truncated or damaged {what}: {type(error).__name__}: {one_line(error)}") from None


@contextmanager
def _open(path: Path, packed: bool) -> Iterator[Any]:
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: truncated or damaged gzip file: {one_line(error)}") from None
