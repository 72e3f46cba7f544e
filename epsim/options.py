"""Each option is defined once, as a dataclass field with its type, default, help text and limits.

The functions of `import epsim`, the command line and the workers' command line are all made from these dataclasses.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

AnyPath: TypeAlias = str | os.PathLike[str]
Progress: TypeAlias = Callable[[str, float], None]
"""Is called with a description of the work and the share of it that is done (0 to 1)."""

MOST_SLOTS = 1 << 16
"""More ranks or slots than any cluster has. Tables of this size still fit in memory."""


def quiet(words: str, share: float) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True, slots=True)
class About:
    """Makes a field an option: `nodes: Annotated[int, About("Nodes (hosts) that hold the ranks.")] = 1`.

    flag: the option's name, if it differs from the field's. short: a short name, such as -o. least, most: limits of a
    number. choices: the allowed values. argument: True for a positional argument. kind: the type on the command line,
    if it differs from the field's.
    """

    help: str
    flag: str = ""
    short: str = ""
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    argument: bool = False
    kind: Any = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option of a dataclass. type: the type of one value. many: whether the option may be repeated."""

    name: str
    type: Any
    many: bool
    default: Any
    about: About

    @property
    def flag(self) -> str:
        return self.about.flag or f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        return self.default is MISSING


class Options:
    """Base class of the dataclasses of options. Raises ValueError in one line for a value of the wrong type or outside
    the option's limits. NumPy's numbers become Python's."""

    def __post_init__(self) -> None:
        for entry in parameters(type(self)):
            given, about = getattr(self, entry.name), entry.about
            if given is None and entry.default is None:
                continue
            several = entry.many and isinstance(given, Iterable) and not isinstance(given, str)
            values = tuple(given) if several else _values(given) if entry.type is str else (given,)
            values = tuple(_typed(entry, value) for value in values)
            if entry.many or entry.type is not str:
                object.__setattr__(self, entry.name, values if entry.many else values[0])
            for value in values:
                if about.choices and value not in about.choices:
                    raise ValueError(f"{entry.flag} {value}: choose {', '.join(about.choices)}")
                if about.least is not None and not value >= about.least:
                    raise ValueError(f"{entry.flag} {value}: give at least {about.least}")
                if about.most is not None and not value <= about.most:
                    raise ValueError(f"{entry.flag} {value}: give at most {about.most}")


def parameters(options: type) -> tuple[Parameter, ...]:
    """The options of a dataclass: its own in order, then those of the classes that it inherits from."""
    return _parameters(options)


@functools.cache
def _parameters(options: Any) -> tuple[Parameter, ...]:
    by_name = {entry.name: entry for entry in fields(options)}
    by_option: dict[str, Parameter] = {}
    for owner in options.__mro__:
        for name, text in inspect.get_annotations(owner).items():
            is_text = isinstance(text, str) and text.startswith("Annotated")  # else evaluated
            hint = eval(text, vars(sys.modules[owner.__module__])) if is_text else text
            if name in by_name and name not in by_option and get_origin(hint) is Annotated:
                kind, about = get_args(hint)
                by_option[name] = Parameter(name, *_kind(about.kind or kind), by_name[name].default, about)
    return tuple(by_option.values())


def _values(value: Any) -> Sequence[Any]:
    """The values of an option as a sequence."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _typed(entry: Parameter, value: Any) -> Any:
    """A value of an option, converted to the option's type."""
    is_bool, is_path = isinstance(value, bool), entry.about.kind is str and isinstance(value, os.PathLike)
    fits = {
        int: ("a whole number", isinstance(value, Integral) and not is_bool),
        float: ("a number", isinstance(value, Real) and not is_bool),
        bool: ("True or False", is_bool),
        str: ("a text", isinstance(value, str) or is_path or entry.many),  # a policy may be an object
    }
    what, is_so = fits.get(entry.type, ("", True))
    if not is_so:
        raise ValueError(f"{entry.name if entry.about.argument else entry.flag} {value!r}: give {what}")
    if entry.type is float and type(value) is not int:
        return float(value)
    return int(value) if entry.type is int else value


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of a single value, and whether several are allowed."""
    if NoneType in get_args(hint):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return (str if get_origin(hint) is Literal else hint), False


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorates a function that takes one dataclass. The decorated function takes the dataclass's fields instead; its
    docstring lists them with their help texts."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        assert isinstance(options, type)
        order = [entry.name for entry in parameters(options)]
        shown = [_shown(entry) for entry in inspect.signature(options).parameters.values()]
        shown.sort(key=lambda entry: (entry.kind, order.index(entry.name) if entry.name in order else len(order)))
        signature = inspect.Signature(shown)

        @functools.wraps(function)
        def with_parameters(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(options(*args, **kwargs))

        lines = [f"    {entry.name}: {entry.about.help}" for entry in parameters(options)]
        with_parameters.__doc__ = f"{inspect.getdoc(function)}\n\nParameters:\n" + "\n".join(lines)
        returned = _Text(inspect.signature(function).return_annotation)
        with_parameters.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        del with_parameters.__wrapped__
        return with_parameters

    return decorate


class _Text(str):
    """An annotation that `help` shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shown(entry: inspect.Parameter) -> inspect.Parameter:
    """A parameter as `help` shows it: with its plain type in place of `Annotated`."""
    tree: Any = ast.parse(entry.annotation, mode="eval").body
    if entry.annotation.startswith("Annotated["):
        tree = tree.slice.elts[0]
    return entry.replace(annotation=_Text(ast.unparse(tree)))


def command_words(options: Any, *groups: type) -> list[str]:
    """The words of the command line for these options; defaults are left out. groups: only options of these classes."""
    words: list[str] = []
    for entry in {entry.name: entry for group in groups or (type(options),) for entry in parameters(group)}.values():
        value = getattr(options, entry.name)
        texts = [os.fspath(part) if isinstance(part, os.PathLike) else str(part) for part in _values(value)]
        if entry.about.argument:
            words += texts
        elif value is True:
            words.append(entry.flag)
        elif value != entry.default:
            words += [word for text in texts for word in (entry.flag, text)]
    return words


def parse_words(options: type[T], words: Sequence[str]) -> T:
    """Reads what `command_words` wrote. Raises ValueError in one line; `--help` prints the options and exits."""
    parser = _Parser(description=inspect.getdoc(options), allow_abbrev=False)
    for entry in parameters(options):
        shown: dict[str, Any] = {"help": entry.about.help.replace("%", "%%")}
        if entry.about.argument:
            parser.add_argument(entry.name, type=entry.type, **shown)
            continue
        if entry.type is bool:
            shown |= {"action": "store_true"}
        else:
            shown |= {"type": entry.type, "metavar": entry.about.metavar, "action": "append" if entry.many else "store"}
        parser.add_argument(entry.flag, dest=entry.name, required=entry.required, default=argparse.SUPPRESS, **shown)
    values = vars(parser.parse_args(words))
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """The expert-parallel group."""

    ranks: Annotated[int, About("Ranks (GPUs) of the expert-parallel group.", least=1, most=MOST_SLOTS)]
    nodes: Annotated[int, About("Nodes (hosts) that hold the ranks.")] = 1
    redundant: Annotated[
        int, About("Redundant experts per layer: slots beyond one per expert.", least=0, most=MOST_SLOTS)
    ] = 0
    groups: Annotated[int, About("Expert groups of the model's router.", least=1, most=MOST_SLOTS)] = 1


@dataclass(frozen=True, kw_only=True)
class SeedOptions(Options):
    seed: Annotated[int, About("Seed of all random draws.", least=0, most=2**63 - 1)] = 0


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(SeedOptions):
    """How the steps of a trace are divided, and the seed."""

    plan_share: Annotated[
        float, About("Without --history: share of the trace, from its start, on which placements are planned.")
    ] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.plan_share < 1:
            raise ValueError(f"--plan-share {self.plan_share}: give a share between 0 and 1, both excluded")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """Which steps of a trace are used."""

    only: Annotated[str | None, About("Use only the steps of this phase, prefill or decode.", metavar="PHASE")] = None
    min_tokens: Annotated[int, About("Leave out steps with fewer tokens.", least=1)] = 1


@dataclass(frozen=True, kw_only=True)
class TimeOptions(Options):
    """How times are predicted."""

    hardware: Annotated[
        str | None,
        About(
            "Predict layer times and gains on this hardware: h100, h200, h800, b200, a .toml file, or the folder that "
            "`epsim calibrate` wrote.",
            metavar="H",
        ),
    ] = None
    overlap: Annotated[
        bool, About("With --hardware: split each batch in two halves and overlap their compute and communication.")
    ] = False
    expert_table: Annotated[
        AnyPath | None, About("With --hardware: a file of measured expert times.", metavar="JSON", kind=str)
    ] = None
