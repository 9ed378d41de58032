"""Several drafters as one: their trees are united, so that verification sees every path once.

Choosing one drafter for a step, as SAM-Decoding does, throws the other's tree away. Here nothing is chosen: each part's
estimates are calibrated by what became of them, the trees are united and the estimates mixed (`outpace.draft.union`), and the
mixed estimates are calibrated once more by the set of origins, since agreement is worth more than a mean. What is verified
is then decided node by node, by `outpace.reduce`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from outpace.draft.base import Drafter, SignalNeeds, Signals
from outpace.draft.sequences import OpenSequences
from outpace.draft.union import unite
from outpace.errors import ConfigError, DrafterError, OutpaceError
from outpace.reduce import Calibrator, select
from outpace.tree import DraftTrees, Int32Array, Verdicts
from outpace.verify import verdicts_of

MOST_PARTS = 8


class MergeDrafter(Drafter):
    """Unites the trees of several drafters.

    Each part is asked for as many nodes as the cap allows; of the union, the nodes with the highest path probability are
    kept. Each part sees every step's verdicts, whose ``path`` refers to nodes of the united tree after all cuts, as the rows
    of the signals do.

    Args:
        parts: 1 to 8 drafters, each of its own; they are used by this one alone from now on.

    Raises:
        ConfigError: Too few or too many parts, one that is no drafter, or one twice.
    """

    name = "merge"

    def __init__(self, parts: SequenceOf[Drafter]) -> None:
        self.parts = tuple(parts)
        if not 1 <= len(self.parts) <= MOST_PARTS:
            raise ConfigError(f"{self.name}: expected 1 to {MOST_PARTS} drafters, found {len(self.parts)}")
        for part in self.parts:
            if not isinstance(part, Drafter):
                raise ConfigError(f"{self.name}: expected drafters, found {type(part).__name__}")
        if len({id(part) for part in self.parts}) < len(self.parts):
            raise ConfigError(f"{self.name}: the same drafter object is given twice; build one for each part")
        layers = dict.fromkeys(layer for part in self.parts for layer in part.needs.hidden_layers)
        self.needs = SignalNeeds(max(part.needs.top_k for part in self.parts), tuple(layers))
        # Drafts from outside are checked before they index anything.
        self._checked = [not part.is_ours for part in self.parts]
        self._calibrators = [Calibrator() for _ in self.parts]
        self._calibrator = Calibrator()
        self._sequences: OpenSequences[None] = OpenSequences()
        # What the last call of `propose` was asked and found: keys, the parts' trees, their union.
        self._drafted: tuple[list[int], list[DraftTrees], DraftTrees] | None = None

    def open(self, key: int, tokens: Int32Array, namespace: str = "") -> None:
        """Start a sequence with every part, or with none if one fails.

        Raises:
            LifecycleError: The key is open.
            DrafterError: A part raised something.
        """
        self._sequences.add(key, None)
        self._enter(key, "open", key, tokens, namespace)

    def propose(self, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        """Unite what the parts draft; see `Drafter.propose`.

        Raises:
            LifecycleError: A key is not open.
            DrafterError: A part raised something, or proposed something malformed.
        """
        for key in keys:
            self._sequences[key]
        proposed = [self._propose(index, keys, caps) for index in range(len(self.parts))]
        corrected = [calibrator.apply(trees) for calibrator, trees in zip(self._calibrators, proposed, strict=True)]
        united = unite(corrected)
        self._drafted = (list(keys), proposed, united)
        return select(self._calibrator.apply(united), caps)

    def observe(self, keys: SequenceOf[int], verdicts: Verdicts, signals: Signals | None = None) -> None:
        """Learn what the estimates are worth, and let each part take note; see `Drafter.observe`.

        Raises:
            LifecycleError: A key is not open.
            DrafterError: A part raised something; the others have taken note.
        """
        for key in keys:
            self._sequences[key]
        self._calibrate(keys, verdicts)
        failures = [self._try(part, "observe", keys, verdicts, self._signals_for(part, signals)) for part in self.parts]
        _raise_first(failures)

    def close(self, key: int) -> None:
        """Forget a sequence.

        Raises:
            LifecycleError: The key is not open.
            DrafterError: A part raised something; the others have forgotten it.
        """
        self._sequences.remove(key)
        _raise_first([self._try(part, "close", key) for part in self.parts])

    def recomputed(self, key: int) -> None:
        """Tell every part; see `Drafter.recomputed`.

        Raises:
            DrafterError: A part raised something; the others were told.
        """
        _raise_first([self._try(part, "recomputed", key) for part in self.parts])

    def fork(self, key: int, new_key: int) -> None:
        """Open ``new_key`` as a copy of ``key`` with every part, or with none if one fails.

        Raises:
            LifecycleError: ``key`` is not open, or ``new_key`` is.
            DrafterError: A part raised something.
        """
        self._sequences.add(new_key, self._sequences[key])
        self._enter(new_key, "fork", key, new_key)

    def _enter(self, key: int, call: str, *args: Any) -> None:
        """``open`` or ``fork`` with every part; on an error no part knows the new key."""
        for index, part in enumerate(self.parts):
            failure = self._try(part, call, *args)
            if failure is not None:
                for opened in self.parts[:index]:
                    self._try(opened, "close", key)
                self._sequences.remove(key)
                raise failure

    def _propose(self, index: int, keys: SequenceOf[int], caps: Int32Array) -> DraftTrees:
        part = self.parts[index]
        try:
            trees = part.propose(keys, caps)
            if self._checked[index]:
                if not isinstance(trees, DraftTrees):
                    raise DrafterError(f"propose must return DraftTrees, found {type(trees).__name__}")
                trees.validate()
        except Exception as error:
            raise self._named(part, "propose", error) from error
        if trees.batch_size != len(keys):
            raise DrafterError(
                f"{self.name}: {part.name}: expected one tree for each of {len(keys)} sequences, found {trees.batch_size}"
            )
        return trees

    def _try(self, part: Drafter, call: str, *args: Any) -> Exception | None:
        """Call a part; what it raises is returned, with its name."""
        try:
            getattr(part, call)(*args)
        except Exception as error:
            named = self._named(part, call, error)
            named.__cause__ = error
            return named
        return None

    def _named(self, part: Drafter, call: str, error: Exception) -> DrafterError:
        what = str(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {error}"
        return DrafterError(f"{self.name}: drafter {part.name!r}: {call} raised {what}")

    def _signals_for(self, part: Drafter, signals: Signals | None) -> Signals | None:
        """What the part asked for, and no more."""
        needs = part.needs
        if signals is None or needs.nothing:
            return None
        if needs == self.needs:
            return signals
        top_ids = signals.top_ids if needs.top_k else None
        if top_ids is not None and top_ids.shape[1] > needs.top_k:
            top_ids = np.ascontiguousarray(top_ids[:, : needs.top_k])
        hidden = {layer: signals.hidden[layer] for layer in needs.hidden_layers}
        return Signals(signals.row_offsets, signals.first_positions, signals.input_tokens, top_ids, hidden)

    def _calibrate(self, keys: SequenceOf[int], verdicts: Verdicts) -> None:
        if self._drafted is None:
            return
        drafted, proposed, united = self._drafted
        self._drafted = None
        if list(keys) != drafted:  # some of the step's sequences were not drafted for
            place = {key: b for b, key in enumerate(keys)}
            none = np.zeros(0, np.int32)
            tokens = [verdicts.tokens_of(place[key]) if key in place else none for key in drafted]
            verdicts = verdicts_of([none] * len(drafted), tokens)
        for calibrator, trees in zip(self._calibrators, proposed, strict=True):
            calibrator.record(trees, verdicts)
        self._calibrator.record(united, verdicts)


def _raise_first(failures: SequenceOf[Exception | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
