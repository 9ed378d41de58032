"""A slow audit of a frozen automaton, in plain Python and without the compiled code that it audits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from outpace.suffix import image as layout
from outpace.tree import Int32Array


@dataclass
class _Automaton:
    """What an image holds, as Python values; leaves by their negative numbers."""

    documents: list[int]
    text: list[int]  # -1 for a separator
    links: list[int]
    states: list[list[int]]
    transitions: list[dict[int, int]] = field(default_factory=list)  # of inner states: token to target

    def endpos(self, state: int) -> int:
        return self.states[state][layout.ENDPOS] if state >= 0 else -1 - state

    def count(self, state: int) -> int:
        return self.states[state][layout.COUNT] if state >= 0 else 1

    def link(self, state: int) -> int:
        return self.states[state][layout.LINK] if state >= 0 else self.links[-1 - state]


def audit_frozen(image: Int32Array) -> None:
    """Check every invariant of an image (see `outpace.suffix.image` for the layout).

    Takes time linear in the text, times the tokens that a state has transitions on.

    Raises:
        AssertionError: Naming the first invariant that does not hold.
    """
    automaton = _regions(image)
    _check_text(image, automaton)
    _check_states(automaton)
    _read_transitions(image, automaton)
    _check_transitions(automaton)
    _check_completeness(automaton)
    _check_links_of_leaves(automaton)
    _check_counts(automaton)


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _regions(image: Int32Array) -> _Automaton:
    header = image[: layout.HEADER_SIZE].tolist()
    _expect(header[layout.MAGIC_AT] == layout.MAGIC, "the magic number")
    _expect(header[layout.VERSION_AT] == layout.VERSION, "the version")
    num_documents, length = header[layout.NUM_DOCUMENTS], header[layout.TEXT_LENGTH]
    num_states = header[layout.NUM_STATES]
    narrow = header[layout.NARROW]
    _expect(narrow in (0, 1), f"narrow is {narrow}")
    sizes = {
        layout.DOCUMENTS_BEGIN: num_documents + 1,
        layout.TEXT_BEGIN: (length + 1) // 2 if narrow else length,
        layout.LINKS_BEGIN: length,
        layout.STATES_BEGIN: num_states * layout.STATE_SIZE,
        layout.EDGES_BEGIN: header[layout.NUM_EDGES] * layout.EDGE_SIZE,
        layout.SLOTS_BEGIN: header[layout.NUM_SLOTS],
    }
    at, regions = layout.HEADER_SIZE, []
    for begin_at, size in sizes.items():
        _expect(size >= 0 and header[begin_at] == at, f"a region begins at {header[begin_at]}, not at {at}")
        regions.append(image[at : at + size])
        at += size
    _expect(at == len(image) == header[layout.NUM_WORDS], f"{len(image)} words instead of {at}")
    text = regions[1].astype(np.int64)
    if narrow:
        text = np.stack([text & 0xFFFF, (text >> 16) & 0xFFFF], axis=1).ravel()
        _expect(not text[length:].any(), "half a word after the text is not empty")
        text = text[:length]
        text[text == layout.NARROW_SEPARATOR] = -1
    states = regions[3].reshape(-1, layout.STATE_SIZE).tolist()
    return _Automaton(regions[0].tolist(), text.tolist(), regions[2].tolist(), states)


def _check_text(image: Int32Array, automaton: _Automaton) -> None:
    text, documents = automaton.text, automaton.documents
    _expect(min(text) >= -1, f"the token {min(text)} in the text")
    _expect([p for p, token in enumerate(text) if token < 0] == documents, "the separators are not where documents end")
    _expect(documents[0] == 0 and documents[-1] == len(text) - 1, "the text neither begins nor ends with a separator")
    _expect(all(end - begin > 1 for begin, end in itertools.pairwise(documents)), "an empty document")
    num_tokens = int(image[layout.NUM_TOKENS])
    _expect(num_tokens == len(text) - len(documents), f"{num_tokens} tokens, {len(text)} text positions")
    _expect((max(text) < layout.NARROW_SEPARATOR) == bool(image[layout.NARROW]), "text in the wrong width")


def _check_states(automaton: _Automaton) -> None:
    text, states = automaton.text, automaton.states
    begins, begin = [], 0  # of the document at each text position
    for position, token in enumerate(text):
        begin = position + 1 if token < 0 else begin
        begins.append(begin)
    length, link, endpos, count = states[layout.ROOT][:4]
    root = (0, -1, -1, len(text) - len(automaton.documents))
    _expect((length, link, endpos, count) == root, f"the root has {(length, link, endpos, count)}, not {root}")
    for number, (length, link, endpos, count, _) in enumerate(states[1:], 1):
        _expect(0 <= link < len(states), f"state {number} links to {link}")
        _expect(states[link][layout.LENGTH] < length, f"the link of state {number} is not shorter")
        # The empty string occurs before each document too, but its count is that of the tokens.
        most = states[link][layout.COUNT] - (link != layout.ROOT)
        _expect(2 <= count <= most, f"state {number} occurs {count} times")
        _expect(states[link][layout.ENDPOS] <= endpos, f"the link of state {number} ends later")
        _expect(0 <= endpos < len(text) and text[endpos] >= 0, f"state {number} ends at {endpos}")
        _expect(endpos - length + 1 >= begins[endpos], f"state {number} begins before its document")
    for position, link in enumerate(automaton.links):
        _expect(0 <= link < len(states), f"the leaf at {position} links to {link}")
        longest = position - begins[position] + 1
        _expect(states[link][layout.LENGTH] <= max(longest, 0), f"the link of the leaf at {position} is too long")


def _read_transitions(image: Int32Array, automaton: _Automaton) -> None:
    """Follow every list of edges, and find each edge again through its index."""
    begin, slots_begin = int(image[layout.EDGES_BEGIN]), int(image[layout.SLOTS_BEGIN])
    edges = image[begin:slots_begin].reshape(-1, layout.EDGE_SIZE).tolist()
    slots = image[slots_begin:].tolist()
    rows = [0] * len(edges)  # how many lists a row is in
    num_slots = 0
    for number, state in enumerate(automaton.states):
        where = state[layout.EDGES]
        if where == layout.UNARY:
            _expect(number != layout.ROOT, "the root is unary")
            automaton.transitions.append({automaton.text[state[layout.ENDPOS] + 1]: number + 1})
            continue
        if where == layout.NOTHING:
            automaton.transitions.append({})
            continue
        first = where if where >= 0 else layout.INDEXED - where + 1
        last = first
        while edges[last][layout.TOKEN] >= 0:
            last += 1
        own = [(max(token, -1 - token), target) for token, target in edges[first : last + 1]]
        _expect((where < 0) == (len(own) > layout.LINEAR), f"state {number} has {len(own)} edges")
        if where < 0:
            rows[first - 1] += 1
            degree, slot = edges[first - 1]
            _expect(degree == len(own), f"state {number} has {len(own)} edges, its index says {degree}")
            size = degree + degree // 2
            _check_index(number, [token for token, _ in own], slots[slot : slot + size])
            num_slots += size
        for row in range(first, last + 1):
            rows[row] += 1
        automaton.transitions.append(dict(own))
        _expect(len(automaton.transitions[-1]) == len(own), f"state {number} has two transitions on a token")
    _expect(set(rows) <= {1}, "a row of edges is in no list, or in two")
    _expect(num_slots == len(slots), f"{num_slots} slots are in use, of {len(slots)}")


def _check_index(number: int, tokens: list[int], slots: list[int]) -> None:
    for i in range(layout.SCANNED, len(tokens)):
        slot = layout.first_slot(tokens[i], len(slots))
        while slots[slot] not in (0, i + 1):
            slot = (slot + 1) % len(slots)
        _expect(slots[slot] == i + 1, f"edge {i} of state {number} cannot be reached through its index")
    _expect(sum(map(bool, slots)) == len(tokens) - layout.SCANNED, f"the index of state {number} holds other edges")


def _check_transitions(automaton: _Automaton) -> None:
    """Targets, the order of edges, and that a state and its link agree on where a token leads."""
    states, text = automaton.states, automaton.text
    longest = [0] * len(states)  # the longest state that leads to each
    for number, own in enumerate(automaton.transitions):
        ranks = []
        for token, target in own.items():
            where = f"transition of state {number} on {token} to {target}"
            _expect(-len(text) <= target < len(states) and target != layout.ROOT, where)
            endpos, count = automaton.endpos(target), automaton.count(target)
            _expect(token >= 0 and text[endpos] == token, f"{where}: the target ends with another token")
            _expect(endpos > automaton.endpos(number), f"{where}: ends earlier")
            _expect(count <= automaton.count(number), f"{where}: more frequent")
            ranks.append((-count, endpos))
            if target >= 0:
                longest[target] = max(longest[target], states[number][layout.LENGTH] + 1)
            if number != layout.ROOT:
                shorter = automaton.transitions[automaton.link(number)].get(token)
                _expect(shorter in (target, automaton.link(target)), f"{where}: the link disagrees")
        _expect(ranks == sorted(ranks), f"the edges of state {number} are not in order")
        unary = len(own) == 1 and -ranks[0][0] == automaton.count(number) and number != layout.ROOT
        kind = states[number][layout.EDGES]
        _expect(unary == (kind == layout.UNARY), f"state {number} is {'' if unary else 'not '}unary")
    for number, length in enumerate(longest[1:], 1):
        found = states[number][layout.LENGTH]
        _expect(found == length, f"state {number} has length {found}, not {length}")


def _check_completeness(automaton: _Automaton) -> None:
    """Every suffix of every prefix of a document goes on with the token that follows, and nothing else goes on."""
    followed: set[tuple[int, int]] = set()
    for position, token in enumerate(automaton.text[1:]):
        state = automaton.links[position]
        while token >= 0 and state >= 0 and (state, token) not in followed:
            _expect(token in automaton.transitions[state], f"state {state} lacks a transition on {token}")
            followed.add((state, token))
            state = automaton.link(state)
    total = sum(map(len, automaton.transitions))
    _expect(total == len(followed), f"{total} transitions, the text has {len(followed)}")


def _check_links_of_leaves(automaton: _Automaton) -> None:
    """A leaf's link is the longest suffix that another position has too: step by step along the text."""
    for position, token in enumerate(automaton.text):
        if token < 0:
            _expect(automaton.links[position] == layout.ROOT, f"the separator at {position} has a link")
            continue
        leaf = -1 - position
        state, link = automaton.links[position - 1], leaf
        while state >= 0 and link == leaf:
            link = automaton.transitions[state][token]
            state = automaton.link(state)
        link = layout.ROOT if link == leaf else link
        found = automaton.links[position]
        _expect(found == link, f"the leaf at {position} links to {found}, not to {link}")


def _check_counts(automaton: _Automaton) -> None:
    """A state occurs where the leaves below it in the tree of links end, and first at the earliest of them."""
    states = automaton.states
    counts, earliest = [0] * len(states), [len(automaton.text)] * len(states)
    for position, link in enumerate(automaton.links):
        if automaton.text[position] >= 0:
            counts[link] += 1
            earliest[link] = min(earliest[link], position)
    for number in sorted(range(1, len(states)), key=lambda s: -states[s][layout.LENGTH]):
        link = states[number][layout.LINK]
        counts[link] += counts[number]
        earliest[link] = min(earliest[link], earliest[number])
    for number, state in enumerate(states):
        found = state[layout.COUNT]
        _expect(found == counts[number], f"state {number} occurs {counts[number]} times, not {found}")
        found = state[layout.ENDPOS]
        expected = earliest[number] if number else -1
        _expect(found == expected, f"state {number} ends first at {expected}, not at {found}")
