"""results.json, schema 1: what a replay or a run found, written whole or not at all, and checked against its schema."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

Results: TypeAlias = dict[str, Any]

SCHEMA_VERSION = 1


def results_schema() -> dict[str, Any]:
    """The JSON schema of results.json (epsim/results.schema.json)."""
    schema: dict[str, Any] = json.loads(resources.files("epsim").joinpath("results.schema.json").read_text())
    return schema


def check_results(results: Mapping[str, Any], where: str = "results") -> None:
    """Raises ValueError that names the first place where results break the schema."""
    import jsonschema

    error = jsonschema.Draft202012Validator(results_schema()).iter_errors(results)
    first = next(iter(error), None)
    if first is not None:
        raise ValueError(f"{where}: {first.json_path}: {first.message.splitlines()[0][:200]}")


def read_results(path: Path) -> Results:
    """Raises FileNotFoundError or ValueError in one line."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; epsim replay --out DIR writes DIR/results.json")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a results.json ({error})") from None
    check_results(results, str(path))
    assert isinstance(results, dict)
    return results


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; it takes the place of `path` only if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_results(results: Results, path: Path) -> None:
    check_results(results)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
