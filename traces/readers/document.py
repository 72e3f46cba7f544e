"""Loads a source file. Its content decides its type, and no code in it is ever run."""

import csv
import gzip
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from epsim.files import CannotWriteError, check_source
from epsim.traces.store import one_line
from epsim.traces.trace import Array

Kind: TypeAlias = Literal["parquet", "json", "jsonl", "csv", "text", "yaml", "npz", "npy", "pt", "safetensors"]
HEAD_BYTES = 1 << 16
# Limits: a file that is parsed whole takes several times its size in memory. Logs are read line by line.
MAX_LINE = 1 << 26
MAX_JSON = 1 << 29
MAX_ARRAYS = 1 << 33


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

    def lines(self) -> Iterator[str]:
        with _open(self.path, self.packed) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="strict")
            number = 0
            while line := text.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise ValueError(f"{self.path}: line {number} is longer than {MAX_LINE >> 20} MiB: not a recording")
                yield line

    def records(self) -> Iterator[tuple[int, Any]]:
        """(line number, JSON value) of each line of a jsonl file, or of each item of a JSON list."""
        if self.kind == "json":
            items = self.content if isinstance(self.content, list) else [self.content]
            yield from enumerate(items, 1)
            return
        for number, line in enumerate(self.lines(), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{self.path}: line {number} is not JSON: {one_line(error)}") from None

    def rows(self) -> Iterator[list[str]]:
        """Rows of a csv file after the header."""
        reader = csv.reader(self.lines())
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
            return Document(path, "npy", np.load(path, allow_pickle=False))
    if head[:4] == b"PK\x03\x04":
        return _load_zip(path)
    if head[:2] == b"\x1f\x8b":
        with _refusing(path, "gzip file"), gzip.open(path) as file:
            head = file.read(HEAD_BYTES)
        return _load_text(path, head, packed=True)
    if head[:1] == b"\x80":
        return Document(path, "pt", _load_torch(path))
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return Document(path, "safetensors", _load_safetensors(path))
    return _load_text(path, head, packed=False)


def _load_zip(path: Path) -> Document:
    with _refusing(path, "zip file"), zipfile.ZipFile(path) as file:
        names = file.namelist()
        size = sum(member.file_size for member in file.infolist())
    if size > MAX_ARRAYS:
        raise ValueError(f"unpacks to {size >> 30} GiB, more than {MAX_ARRAYS >> 30}: import it in parts")
    if any(name.rsplit("/", 1)[-1] == "data.pkl" for name in names):
        return Document(path, "pt", _load_torch(path, mmap=True))
    if names and all(name.endswith(".npy") for name in names):
        with _refusing(path, "npz file"), np.load(path, allow_pickle=False) as arrays:
            return Document(path, "npz", {name: arrays[name] for name in arrays.files})
    raise ValueError("a zip file that is neither NumPy's npz nor PyTorch's pt")


def _load_torch(path: Path, mmap: bool = False) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
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


def _load_safetensors(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    with _refusing(path, "safetensors file"):
        return dict(load_file(path))


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
    if re.search(r"^\s*(initial_global_assignments|num_slots)\s*:", text, re.M) and stripped[0] not in "{[":
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
    with _open(path, packed) as file:
        raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        return _long_log(path, packed)
    try:
        return Document(path, "json", json.loads(raw.decode("utf-8-sig")), packed)
    except (ValueError, RecursionError) as error:
        record = None
        detail = one_line(error)
    # The first line of a log may be longer than the head.
    try:
        record = json.loads(raw.decode("utf-8-sig").lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        raise ValueError(f"truncated or malformed JSON: {detail}") from None
    return Document(path, "jsonl", record, packed)


def _long_log(path: Path, packed: bool) -> Document:
    """A file of JSON lines that is too large to parse whole; other JSON of that size raises ValueError."""
    with _open(path, packed) as file:
        first = file.readline(MAX_LINE)
    try:
        return Document(path, "jsonl", json.loads(first.decode("utf-8-sig")), packed)
    except (ValueError, RecursionError):
        raise ValueError(
            f"a JSON document of more than {MAX_JSON >> 20} MiB: save it as lines of JSON, as npz, or in parts"
        ) from None


@contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Turns the errors of NumPy, zipfile and other libraries into plain messages."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if "allow_pickle" in str(error):
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
