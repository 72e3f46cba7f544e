"""The folder that a calibration writes: complete tables, and `hardware.toml`, which lists them.

A calibration that is stopped keeps its finished parts. The same command again measures the missing parts.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from epsim.cost.calibrated import HARDWARE, PolicyTable, Table, read_table
from epsim.files import check_target, reason, temporary_beside, whole_file
from epsim.machines.hardware import ExchangeRates, Hardware, Link, PolicyCosts


def check_folder(out: Path, device: str) -> None:
    """Creates the folder. Raises ValueError if it cannot be written, or if it holds a JSON file that is not a complete
    table or was measured on another device, because `hardware.toml` lists all JSON files of the folder."""
    try:
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out}: is a file; give a folder")
        out.mkdir(parents=True, exist_ok=True)
        temporary_beside(check_target(out / HARDWARE)).unlink()
    except OSError as error:
        raise ValueError(f"--out {out}: {reason(error)}: give another folder") from None
    for path in sorted(out.glob("*.json")):
        try:
            table = read_table(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, or give another --out") from None
        if table.device != device:
            raise ValueError(f"{path} was measured on {table.device}, this is {device}: give another --out")


def known(out: Path, name: str) -> Table | None:
    """The table in the file `name` of the folder, or None if there is no such file."""
    path = out / name
    return read_table(path) if path.exists() else None


def write_table(table: Table, path: Path) -> None:
    content = dataclasses.asdict(table)
    if not content.get("cells", True):
        del content["cells"]
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(_rounded(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_hardware(out: Path, base: Hardware, name: str, words: str) -> None:
    """Writes `hardware.toml`: the numbers of the base hardware and the list of all tables in the folder. A measured
    all-reduce replaces the base hardware's, separately for one node and for several."""
    tables = sorted(path.name for path in out.glob("*.json"))
    policy = base.policy
    for table in (read_table(out / name) for name in tables):
        for cost in table.collectives if isinstance(table, PolicyTable) else ():
            if cost.name == "all_reduce":
                key = "all_reduce_nodes_us" if cost.nodes > 1 else "all_reduce_us"
                policy = dataclasses.replace(policy, **{key: cost.us})
    source = f"{words} All else is from the shipped file of {base.name}: {base.source.strip()}"
    made = dataclasses.replace(base, name=name, source=source, policy=policy, tables=tuple(tables), shared_grouped=True)
    with whole_file(out / HARDWARE) as temporary:
        temporary.write_text(_toml(made), encoding="utf-8")


def _toml(hardware: Hardware) -> str:
    lines, sections = [], []
    for name, value in _fields(hardware).items():
        if isinstance(value, (ExchangeRates, PolicyCosts)):
            entries = {key: part for key, part in _fields(value).items() if part is not None}
            sections += ["", f"[{name}]", *(f"{key} = {_value(part)}" for key, part in entries.items())]
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join([*lines, *sections]) + "\n"


def _fields(spec: Hardware | ExchangeRates | PolicyCosts) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _value(value: Any) -> str:
    if isinstance(value, Link):
        sizes = f", at_bytes = {_value(value.at_bytes)}" if value.at_bytes else ""
        return f"{{ gb_per_s = {_value(value.gb_per_s)}{sizes} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is also a TOML string, except for one control character that JSON does not escape.
    return json.dumps(value).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _rounded(value: Any) -> Any:
    """Rounds measured numbers to five digits; more would be noise."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    if isinstance(value, float) and value and math.isfinite(value):
        return float(f"{value:.5g}")
    return value
