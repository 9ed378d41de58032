"""A slow audit of a growing automaton, in plain Python and without the compiled code that it audits."""

from __future__ import annotations

from outpace.suffix import block as layout
from outpace.tree import Int32Array

Transitions = list[dict[int, int]]  # for each state: token to target


def audit(block: Int32Array) -> None:
    """Check every invariant of a block (see `outpace.suffix.growing` for the layout).

    Takes time linear in the text, times the tokens that a state has transitions on.

    Raises:
        AssertionError: Naming the first invariant that does not hold.
    """
    text, states, edges = _regions(block)
    transitions = _transitions(block, text, states, edges)
    _check_states(text, states)
    _check_transitions(text, states, transitions)
    prefixes = _check_prefixes(block, text, states, transitions)
    _check_min_endpos(states, prefixes)
    _check_completeness(text, states, transitions, prefixes)
    if block[layout.COUNT_WALK]:
        _check_counts(block, states, prefixes)


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _regions(block: Int32Array) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """The parts of text, states and edges that are in use."""
    capacity, state_capacity, num_tokens, num_states, num_edges, last = block[:6].tolist()
    _expect(0 <= num_tokens <= capacity, f"{num_tokens} tokens in room for {capacity}")
    _expect(1 <= num_states <= min(state_capacity, max(2 * num_tokens, 2)), f"{num_states} states, {num_tokens} tokens")
    _expect(0 <= num_edges <= max(num_tokens - 1, 0), f"{num_edges} edges, {num_tokens} tokens")
    _expect(0 <= last < num_states, f"last state {last} of {num_states}")
    begin = layout.HEADER_SIZE + capacity
    middle = begin + state_capacity * layout.STATE_SIZE
    end = middle + capacity * layout.EDGE_SIZE
    whole = end + 2 * capacity + (state_capacity if block[layout.COUNT_WALK] else 0)
    _expect(len(block) == whole, f"block of {len(block)} instead of {whole}")
    text = block[layout.HEADER_SIZE : layout.HEADER_SIZE + num_tokens].tolist()
    states = block[begin:middle].reshape(-1, layout.STATE_SIZE)[:num_states].tolist()
    edges = block[middle:end].reshape(-1, layout.EDGE_SIZE)[:num_edges].tolist()
    indexed = sorted(slot - 1 for slot in block[end : end + 2 * capacity].tolist() if slot)
    _expect(indexed == list(range(num_edges)), "the hash index does not hold every edge once")
    return text, states, edges


def _transitions(block: Int32Array, text: list[int], states: list[list[int]], edges: list[list[int]]) -> Transitions:
    """Read the transitions from the lists of edges, and find each edge again through the hash index."""
    slots = layout.views(block)[3].tolist()
    transitions: Transitions = []
    seen = 0
    for number, state in enumerate(states):
        own: dict[int, int] = {}
        if state[layout.NEXT] != layout.ROOT:
            own[text[state[layout.MIN_ENDPOS] + 1]] = state[layout.NEXT]
        edge = state[layout.EDGES]
        while edge != layout.NO_EDGE:
            source, token, target, sibling = edges[edge]
            _expect(source == number, f"edge {edge} of state {source} in the list of {number}")
            _expect(token not in own, f"state {number} has two transitions on {token}")
            slot = layout.first_slot(source, token, len(slots))
            while slots[slot] not in (0, edge + 1):
                slot = (slot + 1) % len(slots)
            _expect(slots[slot] == edge + 1, f"edge {edge} cannot be reached through the hash index")
            own[token] = target
            seen += 1
            edge = sibling
        transitions.append(own)
    _expect(seen == len(edges), f"{seen} of {len(edges)} edges are in some state's list")
    return transitions


def _check_states(text: list[int], states: list[list[int]]) -> None:
    length, link, min_endpos, _, edge = states[layout.ROOT]
    _expect((length, link, min_endpos) == (0, -1, -1), f"root has length {length}, link {link}, end {min_endpos}")
    for number, (length, link, min_endpos, successor, edge) in enumerate(states[1:], 1):
        _expect(0 <= link < len(states), f"state {number} links to {link}")
        _expect(states[link][layout.LENGTH] < length, f"the link of state {number} is not shorter")
        _expect(states[link][layout.MIN_ENDPOS] <= min_endpos, f"the link of state {number} ends later")
        _expect(length - 1 <= min_endpos < len(text), f"state {number} of length {length} ends at {min_endpos}")
        ends = min_endpos == len(text) - 1 or text[min_endpos + 1] == layout.SEPARATOR
        _expect((successor == layout.ROOT) == ends, f"state {number}: primary transition")
        at_end = min_endpos == len(text) - 1
        _expect(not at_end or edge == layout.NO_EDGE, f"state {number}: edges, and no token follows")


def _check_transitions(text: list[int], states: list[list[int]], transitions: Transitions) -> None:
    """Lengths and ends along transitions; that a state and its link agree on where a token leads."""
    for number, own in enumerate(transitions):
        length, link, min_endpos = states[number][:3]
        for token, target in own.items():
            where = f"transition of state {number} on {token} to {target}"
            _expect(0 < target < len(states), where)
            target_length, target_link, target_endpos = states[target][:3]
            _expect(target_length > length >= states[target_link][layout.LENGTH], f"{where}: length")
            _expect(target_endpos > min_endpos, f"{where}: ends earlier")
            _expect(text[target_endpos] == token, f"{where}: the target ends with another token")
            if number != layout.ROOT:
                _expect(transitions[link].get(token) in (target, target_link), f"{where}: the link disagrees")


def _check_prefixes(block: Int32Array, text: list[int], states: list[list[int]], transitions: Transitions) -> list[int]:
    """Walk the text from the root; return the state of each of its prefixes."""
    prefixes, state, length = [], layout.ROOT, 0
    separators = {s[layout.MIN_ENDPOS]: number for number, s in enumerate(states) if s[layout.LENGTH] == 1}
    for position, token in enumerate(text):
        length += 1
        if token == layout.SEPARATOR:
            _expect(position in separators, f"the separator at {position} has no state")
            state, length = separators[position], 1
            _expect(states[state][layout.LINK] == layout.ROOT, f"the separator at {position} is not linked to the root")
        else:
            _expect(token in transitions[state], f"the text cannot be followed at {position}")
            state = transitions[state][token]
        _expect(states[state][layout.LENGTH] == length, f"the text up to {position} is not its state's longest")
        prefixes.append(state)
    _expect(state == int(block[layout.LAST]), f"the text ends in state {state}, not in {int(block[layout.LAST])}")
    return prefixes


def _check_min_endpos(states: list[list[int]], prefixes: list[int]) -> None:
    """A state ends where the prefixes below it in the tree of links end."""
    earliest = [-1] + [len(prefixes)] * (len(states) - 1)
    for position, prefix in enumerate(prefixes):
        earliest[prefix] = position
    for number in sorted(range(1, len(states)), key=lambda s: -states[s][layout.LENGTH]):
        link = states[number][layout.LINK]
        earliest[link] = min(earliest[link], earliest[number])
    for number, state in enumerate(states):
        found = state[layout.MIN_ENDPOS]
        _expect(found == earliest[number], f"state {number} ends first at {earliest[number]}, not at {found}")


def _check_completeness(
    text: list[int], states: list[list[int]], transitions: Transitions, prefixes: list[int]
) -> None:
    """Every suffix of every prefix goes on with the token that follows, and nothing else goes on."""
    followed: set[tuple[int, int]] = set()
    for state, token in zip([layout.ROOT, *prefixes], text, strict=False):
        while token != layout.SEPARATOR and state >= 0 and (state, token) not in followed:
            _expect(token in transitions[state], f"state {state} lacks a transition on {token}")
            followed.add((state, token))
            state = states[state][layout.LINK]
    total = sum(map(len, transitions))
    _expect(total == len(followed), f"{total} transitions, the text has {len(followed)}")


def _check_counts(block: Int32Array, states: list[list[int]], prefixes: list[int]) -> None:
    """A count is exact where no walk was cut short, and never too high."""
    exact, cut = [0] * len(states), False
    for prefix in prefixes:
        state, steps = prefix, 0
        while state > layout.ROOT:
            exact[state] += 1
            state, steps = states[state][layout.LINK], steps + 1
        cut = cut or steps > int(block[layout.COUNT_WALK])
    found = layout.counts_of(block)[: len(states)].tolist()
    for state in range(1, len(states)):
        _expect(found[state] <= exact[state], f"state {state} counts {found[state]}, ends at {exact[state]} positions")
        _expect(cut or found[state] == exact[state], f"state {state} counts {found[state]} instead of {exact[state]}")
