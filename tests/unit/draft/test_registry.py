from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outpace.draft import Drafter, NoneDrafter, available_drafters, build_drafter, registry
from outpace.draft.lookup import LookupDrafter
from outpace.draft.oracle import OracleDrafter
from outpace.draft.registry import DrafterSpec, parse_drafter
from outpace.draft.suffix import SuffixDrafter
from outpace.errors import ConfigError, UnknownNameError


def test_what_exists() -> None:
    known = available_drafters()
    assert {"none", "lookup", "llma", "suffix", "oracle"} <= set(known)
    assert all(line and "\n" not in line for line in known.values())
    for name in set(known) - {"oracle"}:
        assert build_drafter(name).name == name


def test_options_reach_the_drafter() -> None:
    drafter = build_drafter("suffix(draft_size=20, full_draft=true)")
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.draft_size, drafter.full_draft, drafter.min_match) == (20, True, 1)
    lookup = build_drafter(" lookup ( 2 , draft_size = 7 ) ")
    assert isinstance(lookup, LookupDrafter)
    assert (lookup.longest, lookup.draft_size) == (2, 7)
    assert build_drafter(drafter) is drafter


def test_oracle_needs_continuations() -> None:
    with pytest.raises(ConfigError, match="outpace replay"):
        build_drafter("oracle(.3)")
    oracle = build_drafter("oracle(.3, seed=4)", {(1,): (2, 3)})
    assert isinstance(oracle, OracleDrafter)
    assert (oracle.accept, oracle.seed) == (0.3, 4)
    with pytest.raises(ConfigError, match="needs option accept"):
        build_drafter("oracle", {})
    with pytest.raises(UnknownNameError, match="continuations"):
        build_drafter("oracle(.3, continuations=5)", {})


def test_composition_is_read_but_refused_where_nothing_takes_it() -> None:
    spec = parse_drafter("merge(k=2)[sam[recycling], suffix(draft_size=9)]")
    assert spec == DrafterSpec(
        "merge",
        (),
        (("k", 2),),
        (DrafterSpec("sam", parts=(DrafterSpec("recycling"),)), DrafterSpec("suffix", (), (("draft_size", 9),))),
    )
    assert parse_drafter(str(spec)) == spec
    with pytest.raises(ConfigError, match="not made of other drafters"):
        build_drafter("suffix[lookup]")


@pytest.mark.parametrize("spec", ["none", "oracle(0.3)", "suffix(draft_size=20, full_draft=true)", "m(1, a)[x, y(2)]"])
def test_canonical_form(spec: str) -> None:
    assert str(parse_drafter(spec)) == spec


def test_unknown_names_say_what_is_close() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown drafter 'sufix'; did you mean 'suffix'.*known: llma, lookup"):
        build_drafter("sufix")
    with pytest.raises(UnknownNameError, match=r"option of drafter 'suffix' 'draftsize'; did you mean 'draft_size'"):
        build_drafter("suffix(draftsize=3)")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "expected the name of a drafter, found the end"),
        ("suffix(", "expected an option, found the end"),
        ("suffix(draft_size=)", r"expected a value, found '\)'"),
        ("suffix(draft_size=3", r"expected ',' or '\)', found the end"),
        ("suffix(draft_size=3 4)", r"expected ',' or '\)', found '4\)'"),
        ("suffix)", r"expected nothing more, found '\)'"),
        ("suffix[", "expected the name of a drafter"),
        ("suffix[a", r"expected ',' or '\]'"),
        ("suffix(full_draft=true, 4)", "expected an option with a name"),
        ("suffix(3, draft_size=4)", "given twice"),
        ("none(1)", "takes no options"),
        ("suffix(1, true, 2, 3)", "takes 3 options"),
        ("suffix; rm", "expected nothing more"),
    ],
)
def test_broken_specs_say_where(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_drafter(spec)


class Composed(NoneDrafter):
    """Keeps what it was given."""

    name = "composed"

    def __init__(self, size: int = 3, *, parts: Sequence[Drafter] = (), sources: Any = None) -> None:
        super().__init__()
        self.size, self.parts, self.sources = size, list(parts), sources


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry._Entry(Composed, "made of others", least=1, most=2, default_parts=("lookup(2)",))
    monkeypatch.setitem(registry._DRAFTERS, "composed-of", entry)
    monkeypatch.setitem(registry._DRAFTERS, "pair", registry._Entry(Composed, "made of two", least=2, most=2))


def built(spec: str, **given: Any) -> Composed:
    drafter = build_drafter(spec, **given)
    assert isinstance(drafter, Composed)
    return drafter


@pytest.mark.usefixtures("composed")
def test_parts_are_built_recursively_and_share_sources() -> None:
    sources = object()
    outer = built("composed-of(7)[composed-of[suffix(9), none], oracle(.3)]", sources=sources, continuations={})
    inner, oracle = outer.parts
    assert (outer.size, outer.sources) == (7, sources)
    assert isinstance(inner, Composed)
    assert (inner.size, inner.sources) == (3, sources)
    assert [part.name for part in inner.parts] == ["suffix", "none"]
    assert isinstance(inner.parts[0], SuffixDrafter)
    assert inner.parts[0].draft_size == 9
    assert isinstance(oracle, OracleDrafter)
    [default] = built("composed-of(size=4)").parts
    assert isinstance(default, LookupDrafter)
    assert default.longest == 2


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("composed-of[none, none, none]", r"'composed-of' is made of 1 to 2 others, in brackets; found 3"),
        ("pair", "'pair' is made of 2 others, in brackets; found 0$"),
        ("composed-of[suffix[none]]", r"not made of other drafters.*\(in drafter 'composed-of\[suffix\[none\]\]'\)"),
        ("pair[none, sufix]", r"unknown drafter 'sufix'; did you mean 'suffix'.*In drafter 'pair\[none, sufix\]'"),
        ("pair[none, suffix(0)]", r"suffix: draft_size must be .* \(in drafter 'pair\[none, suffix\(0\)\]'\)"),
        ("pair[none, oracle(.3)]", "outpace replay"),
        ("composed-of(parts=3)", "unknown option of drafter 'composed-of' 'parts'"),
        ("composed-of(sources=3)", "unknown option of drafter 'composed-of' 'sources'"),
        ("composed-of(3, 4)", "takes 1 options"),
    ],
)
def test_parts_that_do_not_fit_are_named(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_drafter(spec)
