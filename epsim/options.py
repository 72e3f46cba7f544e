"""Options that are defined once: a dataclass field holds the type, the default, the help text and the limits.

The functions of `import epsim`, the command line and the command line of workers are all made from these dataclasses.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

AnyPath: TypeAlias = str | os.PathLike[str]
Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done, and with the share of it that is done (0 to 1)."""

MOST_SLOTS = 1 << 16
"""More ranks or slots than any cluster has, and few enough that tables of them fit in memory."""


def quiet(words: str, share: float) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True, slots=True)
class About:
    """What the command line says of a field.

    flag: the option's name, if it is not the field's. short: a short name, such as -o. least, most: limits of a number.
    choices: the only values allowed. argument: True if the value stands on the command line without an option's name.
    kind: the type on the command line, if it is not the field's.
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


def about(help: str, **more: Any) -> dict[str, About]:
    """Metadata of a field that is an option: `field(default=1, metadata=about("Hosts."))`. more: see `About`."""
    return {"about": About(help, **more)}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option of a dataclass. type: of one value. many: whether the option may be repeated."""

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
    """Base class of the dataclasses here. Raises ValueError in one line for a value outside its limits."""

    def __post_init__(self) -> None:
        for entry in parameters(type(self)):
            value, told = getattr(self, entry.name), entry.about
            if value is None:
                continue
            for one in value if entry.many else (value,):
                if told.choices and one not in told.choices:
                    raise ValueError(f"{entry.flag} {one}: choose {', '.join(told.choices)}")
                if told.least is not None and not one >= told.least:
                    raise ValueError(f"{entry.flag} {one}: give at least {told.least}")
                if told.most is not None and not one <= told.most:
                    raise ValueError(f"{entry.flag} {one}: give at most {told.most}")


def parameters(options: type) -> tuple[Parameter, ...]:
    """The options of a dataclass: its own in order, then those of the classes that it inherits from."""
    return _parameters(options)


@functools.cache
def _parameters(options: Any) -> tuple[Parameter, ...]:
    by_name = {entry.name: entry for entry in fields(options)}
    found: dict[str, Parameter] = {}
    for owner in options.__mro__:
        for name, hint in inspect.get_annotations(owner).items():
            if name in found or name not in by_name or "about" not in by_name[name].metadata:
                continue
            told: About = by_name[name].metadata["about"]
            kind, many = _kind(told.kind or eval(hint, vars(sys.modules[owner.__module__])))
            found[name] = Parameter(name, kind, many, by_name[name].default, told)
    return tuple(found.values())


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several."""
    if NoneType in get_args(hint):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return (str if get_origin(hint) is Literal else hint), False


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorates a function of one dataclass: its parameters become the dataclass's fields, with their help texts."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        signature = inspect.signature(options)

        @functools.wraps(function)
        def with_parameters(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(options(*args, **kwargs))

        assert isinstance(options, type)
        lines = [f"    {entry.name}: {entry.about.help}" for entry in parameters(options)]
        with_parameters.__doc__ = f"{inspect.getdoc(function)}\n\nParameters:\n" + "\n".join(lines)
        returned = inspect.signature(function).return_annotation
        with_parameters.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        del with_parameters.__wrapped__
        return with_parameters

    return decorate


def command_words(options: Any, *groups: type) -> list[str]:
    """The command line that gives these options, defaults left out. groups: only the options of these classes."""
    words: list[str] = []
    for entry in {entry.name: entry for group in groups or (type(options),) for entry in parameters(group)}.values():
        value = getattr(options, entry.name)
        values = list(value) if entry.many and not isinstance(value, str) else [value]
        texts = [os.fspath(part) if isinstance(part, os.PathLike) else str(part) for part in values]
        if entry.about.argument:
            words += texts
        elif value is True:
            words.append(entry.flag)
        elif value != entry.default:
            words += [word for text in texts for word in (entry.flag, text)]
    return words


def parse_words(options: type[T], words: Sequence[str]) -> T:
    """The reverse of `command_words`. Raises ValueError in one line; `--help` prints the options and exits."""
    parser = _Parser(description=inspect.getdoc(options), allow_abbrev=False)
    for entry in parameters(options):
        given: dict[str, Any] = {"help": entry.about.help.replace("%", "%%")}
        if entry.about.argument:
            parser.add_argument(entry.name, type=entry.type, **given)
            continue
        if entry.type is bool:
            given |= {"action": "store_true"}
        else:
            given |= {"type": entry.type, "metavar": entry.about.metavar, "action": "append" if entry.many else "store"}
        parser.add_argument(entry.flag, dest=entry.name, required=entry.required, default=argparse.SUPPRESS, **given)
    return options(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in vars(parser.parse_args(words)).items()}
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """The expert-parallel group."""

    ranks: int = field(metadata=about("Ranks (GPUs) of the expert-parallel group.", least=1, most=MOST_SLOTS))
    nodes: int = field(default=1, metadata=about("Nodes (hosts) that hold the ranks."))
    redundant: int = field(
        default=0,
        metadata=about("Redundant experts: copies in each layer beside the logical experts.", least=0, most=MOST_SLOTS),
    )
    groups: int = field(default=1, metadata=about("Expert groups of the model's router.", least=1, most=MOST_SLOTS))


@dataclass(frozen=True, kw_only=True)
class SeedOptions(Options):
    seed: int = field(default=0, metadata=about("Seed of all random draws.", least=0, most=2**63 - 1))


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(SeedOptions):
    """How the steps of a trace are divided, and the seed."""

    plan_share: float = field(
        default=0.5, metadata=about("Without --history: plan placements on this share of the trace's steps, its first.")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.plan_share < 1:
            raise ValueError(f"--plan-share {self.plan_share}: give a share between 0 and 1, both excluded")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """Which steps of a trace are used."""

    only: str | None = field(
        default=None,
        metadata=about("Use the steps of one phase, prefill or decode, of a trace with several.", metavar="PHASE"),
    )
    min_tokens: int = field(default=1, metadata=about("Leave out steps with fewer tokens.", least=1))


@dataclass(frozen=True, kw_only=True)
class TimeOptions(Options):
    """How times are predicted."""

    hardware: str | None = field(
        default=None,
        metadata=about(
            "Predict layer times and gains on this hardware: h100, h200, h800, b200, a .toml file, or the folder that "
            "`epsim calibrate` wrote.",
            metavar="H",
        ),
    )
    overlap: bool = field(
        default=False,
        metadata=about("With --hardware: split each batch in two halves and overlap their compute and communication."),
    )
    expert_table: AnyPath | None = field(
        default=None, metadata=about("With --hardware: a file of measured expert times.", metavar="JSON", kind=str)
    )
