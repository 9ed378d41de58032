"""What `outpace.draft.contexts` computes, by searching through plain lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outpace.draft import escape

RANKS = 4

Text = Sequence[int]


class Twin:
    """A text and its sources: documents of each source, the source's kind, the text's own first."""

    def __init__(self, text: Text, sources: Sequence[tuple[int, Sequence[Text]]], table: Sequence[Sequence[float]]):
        self.own, self.sources, self.table = list(text), sources, [list(row) for row in table]

    def contexts(self, path: Text = ()) -> list[tuple[int, int, Counter[int]]]:
        """Kind, length and followers of every context of the text and ``path``, in the order in which they are asked."""
        found = []
        for place, (kind, documents) in enumerate([(escape.OWN, [self.own]), *self.sources]):
            text = self.own + list(path)
            ends_before: object = None
            for length in range(len(text), 0, -1):
                suffix = text[len(text) - length :]
                ends = [
                    (number, end)
                    for number, document in enumerate(documents)
                    for end in range(length, len(document) + 1)
                    if list(document[end - length : end]) == suffix
                ]
                if kind == escape.OWN and not path and len(ends) < 2:
                    continue  # only the end of the text itself
                if not ends or ends == ends_before:
                    continue
                ends_before = ends
                followers = Counter(documents[n][end] for n, end in ends if end < len(documents[n]))
                found.append((length, place, kind, followers))
        found.sort(key=lambda one: (-one[0], one[1] != 0, -one[1]))
        asked: list[tuple[int, int, Counter[int]]] = []
        for length, _, kind, followers in found:
            if any(one[:2] == (kind, length) for one in asked):
                next(one for one in asked if one[:2] == (kind, length))[2].update(followers)
            else:
                asked.append((kind, length, Counter(followers)))
        return asked

    def _shares(self, path: Text) -> list[tuple[int, Counter[int]]]:
        """The row and the new followers of each context that adds some."""
        seen: set[int] = set()
        shares = []
        for kind, length, followers in self.contexts(path):
            new = Counter({token: count for token, count in followers.items() if token not in seen})
            if new and len(shares) < RANKS:
                row = escape.class_of.py_func(kind, length, sum(new.values()), len(new), len(shares))
                shares.append((row, new))
                seen |= set(new)
        return shares

    def posterior(self, path: Text = ()) -> dict[int, float]:
        """Probability of each next token."""
        found: dict[int, float] = {}
        left = 1.0
        for row, new in self._shares(path):
            share = self.table[row][0] / self.table[row][1]
            for token, count in new.items():
                found[token] = left * share * count / sum(new.values())
            left *= 1 - share
        return found

    def learn(self, token: int) -> None:
        """Count which contexts knew ``token``, and append it."""
        for row, new in self._shares(()):
            self.table[row][1] += 1
            if token in new:
                self.table[row][0] += 1
                break
        self.own.append(token)

    def tree(self, cap: int, least: float) -> list[tuple[float, tuple[int, ...], float]]:
        """Reach, path and probability of each node of the best tree, grown one by one."""
        waiting = [(p, (token,), p) for token, p in self.posterior().items() if p >= least]
        nodes = []
        while waiting and len(nodes) < cap:
            best = max(waiting)
            waiting.remove(best)
            nodes.append(best)
            reach, path, _ = best
            for token, p in self.posterior(path).items():
                if reach * p >= least:
                    waiting.append((reach * p, (*path, token), p))
        return nodes
