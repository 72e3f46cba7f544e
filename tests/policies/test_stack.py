"""The stack grammar: both ways, and what it says to mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epsim.placement.file import File
from epsim.policies.grammar import policy_text
from epsim.policies.ipm import LplbIpm
from epsim.policies.registry import kinds
from epsim.policies.splits import Even, Lplb
from epsim.policies.stack import parse_stack
from epsim.policies.waterfill import Waterfill
from epsim.traces.trace import Level
from tests.policies.registered import EVERY_KIND, every, stack_of

DEFAULTS = ["contiguous", "topk", "even", "local", "dense"]


@given(
    st.tuples(*(st.sampled_from(every(kind)) for kind in EVERY_KIND)),
    st.permutations(range(5)),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_text_round_trips_and_is_canonical(policies: tuple[Any, ...], order: list[int], spelled: list[bool]) -> None:
    stack = stack_of(**dict(zip(EVERY_KIND, policies, strict=True)))
    assume(stack is not None)
    items = [policy_text(policy) for policy in policies]
    shown = [i for i in order if items[i] != DEFAULTS[i] or spelled[i]] or [0]
    assert parse_stack(" + ".join(items[i] for i in shown)) == stack
    assert str(stack) == "+".join(item for i, item in enumerate(items) if i == 0 or item != DEFAULTS[i])
    assert parse_stack(str(stack)) == stack


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("eplb(form=global)", "eplb-global"),
        ("eplb(form=hierarchical)+lplb", "eplb-hierarchical+lplb"),
        ("eplb(form=auto)", "eplb"),
        ("searched(seconds=30)", "searched"),
        ("searched(seed=3,seconds=10)", "searched(seconds=10.0,seed=3)"),
        ("file(maps/a_b-1.json)", "file(path=maps/a_b-1.json)"),
        ('file("maps/a_b-1.json")', "file(path=maps/a_b-1.json)"),
        ('lplb+file(path="a (1), b+c=d.json")', 'file(path="a (1), b+c=d.json")+lplb'),
        (r'file("say \"x\" \\")', r'file(path="say \"x\" \\")'),
    ],
)
def test_placements_take_arguments_and_old_names_stay(text: str, canonical: str) -> None:
    assert str(parse_stack(text)) == canonical
    assert str(parse_stack(canonical)) == canonical


@given(st.text(min_size=1))
def test_any_path_can_be_written(path: str) -> None:
    stack = parse_stack("contiguous+lplb")
    named = dataclasses.replace(stack, placement=File(path))
    assert parse_stack(str(named)) == named
    assert "\n" not in str(named)


def test_arguments_reach_their_policy_and_defaults_are_left_out() -> None:
    stack = parse_stack("waterfill( load=routed+local , candidates=all, counts=global)+lplb")
    assert stack.split == Lplb()
    assert stack.shared == Waterfill(candidates="all", load="routed+local")
    assert str(stack) == "contiguous+lplb+waterfill(candidates=all,load=routed+local)"
    assert parse_stack("contiguous").split == Even()
    assert parse_stack("lplb-ipm").split == LplbIpm()


@given(
    st.floats(0, allow_infinity=False, allow_subnormal=False),
    st.floats(0, allow_infinity=False, exclude_min=True),
    st.booleans(),
)
def test_costs_round_trip(a: float, b: float, spelled: bool) -> None:
    gathered = "counts=gathered," if spelled else ""
    stack = parse_stack(f"lplb(a={a!r},{gathered}objective=time,b={b!r})")
    assert stack.split == Lplb("gathered", "time", a, b)
    assert str(stack) == f"contiguous+lplb(counts=gathered,objective=time,a={a!r},b={b!r})"
    assert parse_stack(str(stack)) == stack


def test_a_joint_stack_round_trips() -> None:
    text = "contiguous+lplb(counts=gathered)+waterfill-joint(candidates=visited)"
    assert str(parse_stack(text)) == text
    assert str(parse_stack("waterfill-joint(candidates=all)+lplb")) == "contiguous+lplb+waterfill-joint"


def test_counts_by_objective() -> None:
    assert Lplb() == Lplb(counts="reduced") == parse_stack("lplb(counts=reduced,objective=tokens)").split
    assert str(parse_stack("lplb(counts=reduced,objective=tokens)")) == "contiguous+lplb"
    assert Lplb(objective="time", a=1, b=2).counts == "gathered"


def test_every_value_may_be_quoted() -> None:
    quoted = parse_stack('lplb(counts="gathered")+waterfill(load="routed+local")+searched(seed="3",seconds="2")')
    assert str(quoted) == "searched(seconds=2.0,seed=3)+lplb(counts=gathered)+waterfill(load=routed+local)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eplb+magic", "unknown policy 'magic' in 'eplb+magic': known are placement: contiguous, "),
        ("eplb+waterfill-joint", "is not exact: write lplb(counts=gathered)+waterfill-joint, or waterfill"),
        ("lplb-ipm+waterfill-joint", "lplb-ipm in 'contiguous+lplb-ipm+waterfill-joint' is not exact"),
        ("lplb+waterfill-joint(candidates=few)", "choose all or visited"),
        ("even(counts=gathered)", "unknown argument 'counts' in 'even(counts=gathered)': it takes none"),
        ("lplb(counts=scattered)", "unknown value counts=scattered"),
        ("lplb(objective=peak)", "unknown value objective=peak"),
        ("lplb(objective=time)", "lplb(objective=time) needs a= and b="),
        ("lplb(objective=time,a=1)", "lplb(objective=time) needs a= and b="),
        ("lplb(objective=time,b=1)", "lplb(objective=time) needs a= and b="),
        ("lplb(a=1,b=2)", "a and b are for objective=time"),
        ("lplb(counts=gathered,b=2)", "a and b are for objective=time"),
        ("lplb(objective=time,a=x,b=2)", "a=x in 'lplb(objective=time,a=x,b=2)' is not of type float"),
        ("lplb(objective=time,a=-1,b=2)", "a=-1.0 is not a valid cost: give a finite number >= 0"),
        ("lplb(objective=time,a=1,b=nan)", "b=nan is not a valid cost"),
        ("lplb(objective=time,a=1,b=inf)", "b=inf is not a valid cost"),
        ("lplb(objective=time,a=0,b=0)", "nothing to minimise"),
        ("lplb(objective=time,a=1,b=2,counts=reduced)", "leave counts out, or give counts=gathered"),
        ("even+lplb", "two policies for split, 'even' and 'lplb'"),
        ("waterfill(candidates=some)", "candidates=some in 'waterfill(candidates=some)': choose visited or all"),
        ("waterfill(colour=red)", "its arguments are candidates, load, counts"),
        ("waterfill(candidates)", "'candidates' in 'waterfill(candidates)' is not key=value"),
        ("waterfill(counts=local,counts=local)", "'counts' is given twice"),
        ("waterfill(counts=local", "parentheses do not match"),
        ("waterfill)counts=local(", "parentheses do not match"),
        ("waterfill(counts=local)lplb", "put + between items"),
        ("eplb(seconds=3)", "its arguments are form"),
        ("eplb-global(form=auto)", "unknown argument 'form' in 'eplb-global(form=auto)': it takes none"),
        ("eplb(form=best)", "choose auto or global or hierarchical"),
        ("searched(seconds=soon)", "seconds=soon in 'searched(seconds=soon)' is not of type float"),
        ("searched(seconds=0)", "a search of 0.0 seconds: give more than 0"),
        ("searched(seed=-1)", "searched: seed=-1: give 0 or more"),
        ("file", "'file' needs path=: write file(path=...)"),
        ('file("a.json)', "a quotation mark is missing"),
        ('file("a" b)', "is not of type str"),
        ('file("a\nb")', 'path="a b" in'),
        ("file(a b.json)+(", "parentheses do not match"),
        ("eplb++lplb", "an item is empty"),
        ("", "an item is empty"),
    ],
)
def test_mistakes_are_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_stack(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lp", "write lplb (solved exactly) or lplb-ipm (SGLang's own solver)"),
        ("dynamic", "write even (equal parts, as copies in turn) or random (a random copy for each token)"),
        ("trivial", "write contiguous (experts in order)"),
        ("deepseek_hierarchical", "write eplb (as eplb(form=hierarchical))"),
        ("expert_map_path", "write file (as file(path=...), with the engine's map)"),
        ("lpl", "did you mean lplb? Known are placement: "),
        ("Topk_Channels", "did you mean topk-channels or threshold-channels? Known are placement: "),
    ],
)
def test_names_of_engines_and_mistyped_names_lead_to_policies(name: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_stack(f"contiguous+{name}(x=1)")
    assert str(error.value).startswith(f"unknown policy {name!r} in 'contiguous+{name}(x=1)': {says}")


def test_names_of_engines_are_in_the_form_in_which_they_are_looked_up() -> None:
    """What an engine calls a split or a placement, `Policy.engines`, leads to the policy, or is a policy's name."""
    for kind in ("placement", "split"):
        for policy in kinds()[kind].values():
            assert all(name == name.lower().replace("_", "-") for name in policy.other_names)
            for text in policy.examples or (policy.name,):
                for name in parse_stack(text).__getattribute__(kind).engines.values():
                    assert name in ("", policy.name) or name.replace("_", "-") in policy.other_names


@pytest.mark.parametrize(
    ("text", "redundancy", "shared_expert", "level"),
    [
        ("eplb", True, True, "counts"),
        ("lplb", True, True, "counts"),
        ("lplb(counts=gathered)", True, True, "rank_counts"),
        ("lplb(objective=time,a=1,b=2)", True, True, "counts"),
        ("static", True, True, "rank_counts"),
        ("static", False, True, "counts"),
        ("random", True, True, "tokens"),
        ("random", False, True, "counts"),
        ("random+waterfill(candidates=all)", False, True, "rank_counts"),
        ("lplb+waterfill", True, True, "tokens"),
        ("lplb+waterfill", True, False, "counts"),
        ("lplb+waterfill-joint(candidates=visited)", True, True, "rank_counts"),
        ("lplb+waterfill-joint", True, False, "counts"),
        ("static+waterfill(candidates=all)", True, True, "rank_counts"),
    ],
)
def test_the_coarsest_level(text: str, redundancy: bool, shared_expert: bool, level: Level) -> None:
    assert parse_stack(text).required_level(redundancy, shared_expert) == level


def test_a_trace_that_is_too_coarse_is_told_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"^waterfill in 'contiguous\+static\+waterfill' .*epsim traces synthesize"):
        parse_stack("static+waterfill").check_level("rank_counts")
    with pytest.raises(ValueError, match=r"^static .* counts by source rank, but the trace holds only counts"):
        parse_stack("static").check_level("counts")
    parse_stack("static+waterfill").check_level("tokens")
