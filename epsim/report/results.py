"""`Results`: what a command found, for use in Python."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epsim.results import check_results, read_results, write_results
from epsim.score.verdict import label


class Fields(Mapping[str, Any]):
    """A part of results.json, whose keys are attributes as well.

    >>> metric = Fields({"mean": 1.2, "p95": 1.5})
    >>> metric.mean, metric["p95"], sorted(metric)
    (1.2, 1.5, ['mean', 'p95'])
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return _wrapped(self._data[key])

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self._data:
            raise AttributeError(f"no {key!r}; there are {', '.join(self._data)}")
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __dir__(self) -> list[str]:
        return list(self._data)

    def __repr__(self) -> str:
        return f"Fields({', '.join(self._data)})"


class Items(Sequence[Fields]):
    """Parts of results.json in their order, found by position or by name.

    >>> stacks = Items([{"stack": "eplb"}, {"stack": "eplb+lplb", "name": "best"}], ["eplb", "best"])
    >>> stacks[0].stack, stacks["best"].stack, stacks.names
    ('eplb', 'eplb+lplb', ['eplb', 'best'])
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        self._entries, self.names = entries, list(names)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Items(self._entries[place], self.names[place])
        if isinstance(place, str) and place not in self.names:
            raise KeyError(f"no {place!r}; there are {', '.join(self.names)}")
        return Fields(self._entries[self.names.index(place) if isinstance(place, str) else place])

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Items({', '.join(self.names)})"

    def _ipython_key_completions_(self) -> list[str]:
        return self.names


class Results:
    """What a command found: the content of a results.json (docs/results.md).

    Raises ValueError in one line where the data breaks the schema of its kind.

    >>> results = Results.load("out")
    >>> results.kind, results.stacks.names
    ('replay', ['eplb', 'best'])
    >>> round(results.stacks["best"].metrics.max_over_mean.p95, 3)
    1.031
    >>> results.stacks["best"].versus_first.max_over_mean.high < 0
    True
    """

    def __init__(self, data: dict[str, Any]) -> None:
        check_results(data)
        self.data = data
        """The same as plain dictionaries and lists."""

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Reads a results.json, or the one in a folder. Raises FileNotFoundError or ValueError in one line."""
        path = Path(path)
        return cls(read_results(path / "results.json" if path.is_dir() else path))

    @property
    def kind(self) -> str:
        """replay, run, tune, comparison or sweep."""
        return str(self.data["kind"])

    @property
    def verdict(self) -> str:
        """What to do and what it brings, in one line."""
        return str(self.data["verdict"])

    @property
    def stacks(self) -> Items:
        """The policy stacks, by position or by name; the first is what the others are compared with."""
        return Items(self.data["stacks"], [label(entry) for entry in self.data["stacks"]])

    @property
    def answers(self) -> Items:
        """Of a tune: what to run. Their names are `any`, `sglang` and `vllm`."""
        return self._items("tune", "answers", "{for}")

    @property
    def rows(self) -> Items:
        """Of a comparison: one metric of two stacks each, named "STACK METRIC"."""
        return self._items("comparison", "rows", "{second_stack} {metric}")

    @property
    def cells(self) -> Items:
        """Of a sweep: one combination of the grid each, named by its key."""
        return self._items("sweep", "cells", "{key}")

    def _items(self, kind: str, key: str, name: str) -> Items:
        if self.kind != kind:
            raise AttributeError(f"these are the results of a {self.kind}; only those of a {kind} have {key}")
        entries = self.data[kind][key]
        return Items(entries, [name.format(**entry) for entry in entries])

    def table(self) -> tuple[list[str], list[list[str | float | None]]]:
        """Headers, and a row a stack: its name, then numbers, None where there is none.

        Differences from the first stack are relative (-0.1 is 10% less); their intervals are in `versus_first` of a
        stack. `pandas.DataFrame(rows, columns=headers)` makes a frame of it.
        """
        from epsim.report.content import cells, headers

        names = [header.removesuffix(" (95% interval)") for header in headers(self.data)]
        return names, [[row[0].text, *(cell.value for cell in row[1:])] for row in cells(self.data)]

    def save(self, path: str | Path) -> None:
        """Writes results.json under this name, whole or not at all."""
        write_results(self.data, Path(path))

    def report(self, folder: str | Path) -> None:
        """Writes results.json, report.html and report.md into the folder."""
        from epsim.report.write import write_report

        write_report(self.data, Path(folder))

    def __str__(self) -> str:
        from epsim.report.table import summary_text

        return summary_text(self.data)

    def __repr__(self) -> str:
        return f"<Results of a {self.kind}: {', '.join(self.stacks.names)}>"

    def _repr_html_(self) -> str:
        """The verdict and the main table of this kind, for notebooks."""
        from epsim.report.views import view_of

        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        _, headers, rows = view_of(self.data).summary(self.data)
        head, body = line("th", headers), "".join(line("td", row) for row in rows)
        return f"<p><b>{html.escape(self.verdict)}</b></p><table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Fields(value)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return tuple(Fields(entry) for entry in value)
    return value
