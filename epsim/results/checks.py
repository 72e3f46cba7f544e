"""Checks that results follow the schema of their kind (epsim/results/schemas) and that their parts fit together."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

KINDS = ("replay", "run", "tune", "comparison", "sweep")
MOST = 1e30


def results_schema(name: str) -> dict[str, Any]:
    """The JSON schema of a kind. `definitions` is the schema of the parts that all kinds share."""
    text = resources.files("epsim.results").joinpath(f"schemas/{name}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def check_results(results: Mapping[str, Any], where: str = "results") -> None:
    """Raises ValueError that names the first entry that breaks the schema or contradicts another entry."""
    if not isinstance(results, Mapping):
        raise ValueError(f"{where}: $: is no JSON object")
    kind = results.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{where}: $.kind: {str(kind)[:40]!r} is not one of {', '.join(KINDS)}")
    error = next(_validator(kind).iter_errors(results), None)
    if error is not None:
        raise ValueError(f"{where}: {error.json_path}: {error.message.splitlines()[0][:200]}")
    contradiction = next(_contradictions(results), None)
    if contradiction is not None:
        raise ValueError(f"{where}: {contradiction}")


@lru_cache(maxsize=len(KINDS))
def _validator(kind: str) -> Any:
    import jsonschema
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    def items(validator: Any, schema: Any, instance: Any, parent: Any) -> Iterator[Any]:
        # Nearly all of a file is lists of numbers: check each list at once.
        if schema.get("$ref") != "#/$defs/number_or_null" or not all(
            value is None or (type(value) in (int, float) and abs(value) <= MOST) for value in instance
        ):
            yield from standard(validator, schema, instance, parent)

    def whole(checker: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)  # JSON schema also takes 2.0 for an integer

    standard = jsonschema.Draft202012Validator.VALIDATORS["items"]
    shared = DRAFT202012.create_resource(results_schema("definitions"))
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", whole)
    validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        jsonschema.Draft202012Validator, {"items": items}, type_checker=types
    )
    return validator(results_schema(kind), registry=Registry().with_resource("definitions.json", shared))


def _contradictions(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each contradiction in results that follow their schema."""
    trace, kind = results["trace"], results["kind"]
    if trace.get("layers") and len(trace["layers"]) != trace["num_layers"]:
        yield f"$.trace.layers: has {len(trace['layers'])} entries, but num_layers is {trace['num_layers']}"
    yield from _lengths(results)
    names = [entry.get("name") or entry["stack"] for entry in results["stacks"]]
    if kind in ("replay", "run", "tune"):
        yield from _twice(names, "$.stacks: the name")
    if kind == "sweep":
        yield from _of_sweep(results["sweep"], [entry["cell"] for entry in results["stacks"]])
    if kind == "comparison":
        files = [file["file"] for file in results["comparison"]["files"]]
        for index, row in enumerate(results["comparison"]["rows"]):
            for key in ("first_file", "second_file"):
                if row[key] not in files:
                    yield f"$.comparison.rows[{index}].{key}: {row[key][:80]!r} is not one of the files"


def _lengths(results: Mapping[str, Any]) -> Iterator[str]:
    trace, scored = results["trace"], results.get("scored")
    ranks, layers = ("ranks", results["setting"]["ranks"]), ("layers", trace["num_layers"])
    lists = [values for entry in results["stacks"] for values in entry.get("by_step", {}).values()]
    steps = ("stretches of steps", len(scored["steps"] if scored else lists[0] if lists else ()))
    hot = ("hot experts", len(scored["hot_experts"]) if scored else None)
    shapes: dict[str, list[tuple[str, int | None]]] = {
        "max_over_mean_by_layer": [layers],
        "load_over_mean_by_rank": [ranks],
        "load_over_mean_by_step": [steps, ranks],
        "load_over_mean_by_layer": [layers, ("", None), ranks],
        "hot_copies": [hot],
    }
    if steps[1] > trace["steps_scored"]:
        yield f"$.trace.steps_scored: is {trace['steps_scored']}, but there are {steps[1]} stretches of steps"
    for index, entry in enumerate(results["stacks"]):
        for key, shape in shapes.items():
            yield from _length(entry.get(key), shape, f"$.stacks[{index}].{key}")
        for key, values in entry.get("by_step", {}).items():
            yield from _length(values, [steps], f"$.stacks[{index}].by_step.{key}")
    if scored:
        for key in ("busy_steps", "busy_layers"):
            yield from _length(scored[key], [steps], f"$.scored.{key}")
        for index, expert in enumerate(scored["hot_experts"]):
            if expert["layer"] >= trace["num_layers"]:
                yield f"$.scored.hot_experts[{index}].layer: is {expert['layer']}, but there are {layers[1]} layers"


def _length(values: Any, sizes: Sequence[tuple[str, int | None]], where: str) -> Iterator[str]:
    """Checks the lengths of nested lists. sizes: (what, number) of each axis; number None allows any length. A list
    that is absent or empty is not checked."""
    if not values:
        return
    what, number = sizes[0]
    if number is not None and len(values) != number:
        yield f"{where}: has {len(values)} entries, but there are {number} {what}"
    if len(sizes) > 1:
        for index, value in enumerate(values):
            yield from _length(value, sizes[1:], f"{where}[{index}]")


def _of_sweep(sweep: Mapping[str, Any], cells: Sequence[str]) -> Iterator[str]:
    """Checks the keys of a sweep's cells. cells: the cell's key of each stack."""
    keys = [cell["key"] for cell in sweep["cells"]]
    yield from _twice(keys, "$.sweep.cells: the key")
    known, used = set(keys), set(cells)
    for index, key in enumerate(cells):
        if key not in known:
            yield f"$.stacks[{index}].cell: {key[:80]!r} is not the key of a cell"
    for index, cell in enumerate(sweep["cells"]):
        if cell["key"] not in used:
            yield f"$.sweep.cells[{index}].key: no stack is of cell {cell['key'][:80]!r}"
        for axis, values in sweep["axes"].items():
            if cell.get(axis) is not None and cell[axis] not in values:
                yield f"$.sweep.cells[{index}].{axis}: is not one of the values of this axis"


def _twice(names: Sequence[str], what: str) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} {name[:80]!r} is given twice"
        seen.add(name)
