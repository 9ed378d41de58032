"""Verification of one batch, as the engine calls it.

At each reached node a token is chosen as plain decoding would choose it there: from that node's logits, processed with
that node's own prefix, under that node's constraint state. It is committed; if a child holds it, the walk goes on at
the child. So whatever the tree, the committed tokens are those of plain decoding; the tree only decides how many there
are.

That holds for errors too. An error at the root (logits that are not finite, a constraint that allows nothing) ends its
request. An error further down only ends the walk there: the node's own token becomes the bonus token, and the next step
meets the same error at its root, unless the request has stopped before.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.errors import ConstraintError, LifecycleError, ModelError, NonFiniteLogitsError
from outpace.tree import DraftTrees, Verdicts
from outpace.verify.chooser import Chooser, non_finite
from outpace.verify.greedy import UNDECIDABLE, find_child, greedy_walk
from outpace.verify.logprobs import TokenLogprobs, token_logprobs
from outpace.verify.verdicts import verdicts_of


@dataclass(frozen=True, eq=False, slots=True)
class Verification:
    """Verdicts of one batch and what belongs to them.

    Attributes:
        verdicts: Accepted paths and committed tokens. Empty for a sequence with an error.
        logprobs: For each sequence one entry a committed token, or None if the request did not ask.
        states: For each sequence what `Chooser.commit` takes, or None without a constraint.
        errors: For each sequence the error that ends it, or None.
    """

    verdicts: Verdicts
    logprobs: list[list[TokenLogprobs] | None]
    states: list[list[Any] | None]
    errors: list[ConstraintError | NonFiniteLogitsError | None]


def verify(choosers: SequenceOf[Chooser], trees: DraftTrees, logits: torch.Tensor) -> Verification:
    """Decide which drafted tokens the requests accept, and choose the token after them.

    Args:
        choosers: One for each tree, ``B`` of them. They stay as they are until `Chooser.commit`.
        trees: ``B`` trees with ``n`` nodes in all.
        logits: ``[n + B, V]``, the model's own, any float dtype and device: for each tree first the root's row, then
            its nodes' (row ``offsets[b] + b`` is the root of tree ``b``). Unchanged.

    Raises:
        LifecycleError: There is not one chooser for each tree.
        ModelError: The logits have another shape than the trees and the vocabulary call for.
    """
    _check_shapes(choosers, trees, logits)
    plain = np.array([chooser.plain_greedy for chooser in choosers], np.bool_)
    verdicts, undecided = greedy_walk(trees, logits, plain)
    errors: list[ConstraintError | NonFiniteLogitsError | None] = [
        non_finite(UNDECIDABLE[code], chooser.position) if (code := int(undecided[b])) else None
        for b, chooser in enumerate(choosers)
    ]
    states: list[list[Any] | None] = [None] * len(choosers)
    if not plain.all():
        paths, tokens = [], []
        for b, chooser in enumerate(choosers):
            if plain[b]:
                paths.append(verdicts.path_of(b).tolist())
                tokens.append(verdicts.tokens_of(b).tolist())
            else:
                path, committed, states[b], errors[b] = _walk_one(chooser, trees, b, logits)
                paths.append(path)
                tokens.append(committed)
        verdicts = verdicts_of(paths, tokens)
    return Verification(verdicts, _logprobs(choosers, trees, verdicts, logits), states, errors)


def _walk_one(
    chooser: Chooser, trees: DraftTrees, index: int, logits: torch.Tensor
) -> tuple[list[int], list[int], list[Any] | None, ConstraintError | NonFiniteLogitsError | None]:
    """Path, committed tokens, constraint states and error of one sequence."""
    begin, end = int(trees.offsets[index]), int(trees.offsets[index + 1])
    root_row = begin + index
    path: list[int] = []
    committed: list[int] = []
    with chooser.cursor() as cursor:
        node = -1
        while True:
            try:
                token = cursor.choose(logits[root_row + 1 + node])
            except (ConstraintError, NonFiniteLogitsError) as error:
                if node < 0:
                    return [], [], None, error
                path.pop()
                break
            committed.append(token)
            node = find_child(trees.tokens, trees.parents, begin, end, node, token)
            if node < 0:
                break
            path.append(node)
            cursor.step(token)
    return path, committed, cursor.states if chooser.params.constraint is not None else None, None


def _logprobs(
    choosers: SequenceOf[Chooser], trees: DraftTrees, verdicts: Verdicts, logits: torch.Tensor
) -> list[list[TokenLogprobs] | None]:
    found: list[list[TokenLogprobs] | None] = []
    for b, chooser in enumerate(choosers):
        num_top = chooser.params.logprobs
        if num_top is None:
            found.append(None)
            continue
        root_row = int(trees.offsets[b]) + b
        rows = [root_row, *(root_row + 1 + node for node in verdicts.path_of(b).tolist())]
        tokens = verdicts.tokens_of(b)
        found.append(token_logprobs(logits[rows[: len(tokens)]], tokens, num_top))
    return found


def _check_shapes(choosers: SequenceOf[Chooser], trees: DraftTrees, logits: torch.Tensor) -> None:
    if len(choosers) != trees.batch_size:
        raise LifecycleError(f"verify needs one chooser for each of {trees.batch_size} trees, found {len(choosers)}")
    rows = trees.num_nodes + trees.batch_size
    if logits.ndim != 2 or len(logits) != rows or not logits.is_floating_point():
        found = f"{logits.dtype}{list(logits.shape)}"
        raise ModelError(f"the model must return float logits of shape [{rows}, vocabulary], found {found}")
    for chooser in choosers:
        if chooser.vocab_size != logits.shape[1]:
            raise ModelError(
                f"a request was opened for a vocabulary of {chooser.vocab_size}, the model returned "
                f"{logits.shape[1]} logits a row"
            )
