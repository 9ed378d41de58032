"""The parts of one step, in the order in which `Engine.step` calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from outpace.draft.base import Drafter, Signals
from outpace.engine.request import Request, keys_of
from outpace.engine.scheduler import Batch
from outpace.errors import ArenaFullError, DrafterError, NonFiniteLogitsError
from outpace.kernels.logits import topk_rows
from outpace.model import KVArena, StepPlan, pack
from outpace.model.rope import RopeSwitch
from outpace.tree import DraftTrees, Int32Array, Verdicts
from outpace.verify import Verification, truncate, verdicts_of


def depth_limits(batch: Batch, switch: RopeSwitch | None) -> Int32Array:
    """``int32[B]``: how deep each tree may be. 0 where nothing is drafted: prefill's step, the last token, no speculation."""
    limits = np.zeros(len(batch.requests), np.int32)
    for b, request in enumerate(batch.requests):
        sequence = request.sequence
        if not (batch.verifies[b] and sequence.num_output and request.params.speculate) or request.skips_draft:
            continue
        depth = request.tokens_left - 1
        if switch is not None and not switch.is_long(sequence.num_tokens):
            depth = min(depth, switch.length - sequence.num_tokens)
        limits[b] = max(0, depth)
    return limits


def draft(
    batch: Batch, drafter: Drafter, limits: Int32Array, max_nodes: int, vocab_size: int | None = None
) -> DraftTrees:
    """One tree for each request of the batch; empty ones where the limit is 0.

    Args:
        batch: Who takes part.
        drafter: Proposes.
        limits: Of `depth_limits`.
        max_nodes: Most nodes of a tree.
        vocab_size: If given, every tree is checked.

    Raises:
        DrafterError: The drafter proposed something malformed.
    """
    chosen = np.flatnonzero(limits)
    if len(chosen) == 0:
        return DraftTrees.empty(len(batch.requests))
    keys = [batch.requests[b].sequence.key for b in chosen]
    proposed = drafter.propose(keys, np.full(len(keys), max_nodes, np.int32))
    if vocab_size is not None:
        if not isinstance(proposed, DraftTrees):
            raise DrafterError(f"{drafter.name}: propose must return DraftTrees, found {type(proposed).__name__}")
        proposed.validate(vocab_size)
    if proposed.batch_size != len(keys):
        raise DrafterError(
            f"{drafter.name}: expected one tree for each of {len(keys)} sequences, found {proposed.batch_size}"
        )
    if len(chosen) == len(batch.requests):
        return proposed
    sizes = np.zeros(len(batch.requests), np.int32)
    sizes[chosen] = proposed.sizes
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return DraftTrees(offsets, proposed.tokens, proposed.parents, proposed.log_probs, proposed.origins)


def reserve(batch: Batch, trees: DraftTrees, arena: KVArena) -> ArenaFullError | None:
    """Hold room for the step's keys and values; on an error nothing is held."""
    sizes = trees.sizes
    for b, request in enumerate(batch.requests):
        try:
            arena.prepare(request.sequence.key, batch.chunks[b] + int(sizes[b]), request.expected_rows)
        except ArenaFullError as error:
            for other in batch.requests:
                arena.release(other.sequence.key)
            return error
    return None


def pack_step(batch: Batch, trees: DraftTrees, arena: KVArena, every_row: bool) -> StepPlan:
    """Write the step down.

    Args:
        batch: Who takes part.
        trees: What they verify.
        arena: Holds room for them (`reserve`).
        every_row: Whether the logits of all pending tokens are wanted, not only the root's.
    """
    keys = keys_of(batch.requests)
    sequences = [request.sequence for request in batch.requests]
    return pack(
        pending=[s.pending[:chunk] for s, chunk in zip(sequences, batch.chunks, strict=True)],
        first_positions=[s.num_cached for s in sequences],
        trees=trees,
        segments=[arena.segments(key) for key in keys],
        write_starts=[arena.write_start(key) for key in keys],
        wants_logits=batch.verifies,
        every_row=every_row,
    )


def gather_signals(
    drafter: Drafter, plan: StepPlan, logits: torch.Tensor, hidden: dict[str, torch.Tensor]
) -> Signals | None:
    """What the drafter wants to see of the pass."""
    if drafter.needs.nothing:
        return None
    top_ids = None
    if drafter.needs.top_k:
        top_ids = topk_rows(logits, min(drafter.needs.top_k, logits.shape[-1]))
    first_positions = plan.position_ids[plan.cu_seqlens_q[:-1]].astype(np.int32)
    return Signals(plan.cu_seqlens_q, first_positions, plan.input_ids.astype(np.int32), top_ids, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """A step's verdicts as far as the requests took them.

    Attributes:
        verdicts: For every request of the batch; empty for one that did not verify or failed.
        origins: For each committed token the bits of the node it came from, 0 for a bonus token; ``uint32[c]``.
    """

    verdicts: Verdicts
    origins: Int32Array


def commit(
    batch: Batch,
    plan: StepPlan,
    trees: DraftTrees,
    verification: Verification | None,
    arena: KVArena,
    drop_cache: Callable[[Request], None],
) -> Committed:
    """Let each request take its tokens, and the arena keep their rows.

    Args:
        batch: Who took part.
        plan: The step.
        trees: What was verified.
        verification: For those that verified, in the batch's order; None if nobody did.
        arena: Keeps the rows.
        drop_cache: Makes all tokens of a request pending again, where the arena could not.
    """
    verdicts = _for_all(batch, verification)
    num_pending = plan.num_pending.copy()
    keep = np.zeros(len(batch.requests), np.int32)
    place = 0
    for b, request in enumerate(batch.requests):
        if not batch.verifies[b]:
            continue
        assert verification is not None
        error = verification.errors[place]
        request.skips_draft = isinstance(error, NonFiniteLogitsError) and bool(trees.sizes[b])
        if request.skips_draft:
            # Masked keys have weight 0, and 0 * NaN is NaN: a wrong draft may have spoiled every row of the sequence.
            num_pending[b] = 0
        elif error is not None:
            request.fail(error)
        else:
            keep[b] = request.accept(verdicts.tokens_of(b))
            logprobs = verification.logprobs[place]
            if request.logprobs is not None and logprobs is not None:
                request.logprobs.extend(logprobs[: keep[b]])
            request.chooser.commit(verdicts.tokens_of(b)[: keep[b]], verification.states[place])
        place += 1
    verdicts = truncate(verdicts, keep)
    path_sizes = np.diff(verdicts.path_offsets)
    try:
        arena.commit(keys_of(batch.requests), num_pending.tolist(), verdicts)
    except ArenaFullError:
        # Not even room for rows on their way. The tokens are right, so compute their keys and values again.
        for request in batch.requests:
            drop_cache(request)
    else:
        for b, request in enumerate(batch.requests):
            request.sequence.num_cached += int(num_pending[b]) + int(path_sizes[b])
    return Committed(verdicts, _origins(trees, verdicts))


def drafting(batch: Batch, verdicts: Verdicts, signals: Signals | None) -> tuple[list[int], Verdicts, Signals | None]:
    """What of a step concerns the drafter: everything, but for requests that do not speculate."""
    keys = keys_of(batch.requests)
    if all(request.drafting for request in batch.requests):
        return keys, verdicts, signals
    chosen = [b for b, request in enumerate(batch.requests) if request.drafting]
    own = verdicts_of([verdicts.path_of(b) for b in chosen], [verdicts.tokens_of(b) for b in chosen])
    if signals is not None:
        spans = [slice(int(signals.row_offsets[b]), int(signals.row_offsets[b + 1])) for b in chosen]
        rows = np.concatenate([np.arange(span.start, span.stop) for span in spans] or [np.empty(0, np.int64)])
        offsets = np.zeros(len(chosen) + 1, np.int32)
        np.cumsum([span.stop - span.start for span in spans], out=offsets[1:])
        signals = Signals(
            offsets,
            signals.first_positions[chosen],
            signals.input_tokens[rows],
            None if signals.top_ids is None else signals.top_ids[rows],
            {name: states[torch.from_numpy(rows).to(states.device)] for name, states in signals.hidden.items()},
        )
    return [keys[b] for b in chosen], own, signals


def update_figures(
    batch: Batch, drafted: Int32Array, verified: Int32Array, verdicts: Verdicts, seconds: float, draft_seconds: float
) -> None:
    """Count the step for each request.

    Args:
        batch: Who took part.
        drafted: ``int32[B]``, nodes proposed.
        verified: ``int32[B]``, nodes verified.
        verdicts: What was committed.
        seconds: Of the whole step.
        draft_seconds: Of drafting.
    """
    for b, request in enumerate(batch.requests):
        figures = request.figures
        committed = len(verdicts.tokens_of(b))
        is_first = request.sequence.num_output == committed  # prefill's step and its token are not counted
        if not batch.verifies[b] or is_first or batch.chunks[b] > 1:
            figures.prefill_s += seconds
            figures.prefill_tokens += batch.chunks[b]
        else:
            figures.decode_s += seconds
            figures.draft_s += draft_seconds
        if batch.verifies[b] and not is_first and (committed or request.skips_draft):
            figures.steps += 1
            figures.tokens += committed
            figures.drafted_nodes += int(drafted[b])
            figures.verified_nodes += int(verified[b])
            figures.accepted_nodes += len(verdicts.path_of(b))


def _for_all(batch: Batch, verification: Verification | None) -> Verdicts:
    """Verdicts of the whole batch, with empty ones for those that did not verify."""
    if verification is not None and all(batch.verifies):
        return verification.verdicts
    paths: list[Int32Array | list[int]] = [[] for _ in batch.requests]
    tokens: list[Int32Array | list[int]] = [[] for _ in batch.requests]
    if verification is not None:
        for place, b in enumerate(np.flatnonzero(batch.verifies)):
            paths[b] = verification.verdicts.path_of(place)
            tokens[b] = verification.verdicts.tokens_of(place)
    return verdicts_of(paths, tokens)


def _origins(trees: DraftTrees, verdicts: Verdicts) -> Int32Array:
    origins = np.zeros(len(verdicts.tokens), np.int32)
    for b in range(verdicts.batch_size):
        path = verdicts.path_of(b)
        begin = int(verdicts.token_offsets[b])
        origins[begin : begin + len(path)] = trees.origins[int(trees.offsets[b]) + path]
    return origins


def verifying(batch: Batch, trees: DraftTrees) -> tuple[list[Request], DraftTrees]:
    """The requests that verify, and their trees alone."""
    if all(batch.verifies):
        return batch.requests, trees
    chosen = np.flatnonzero(batch.verifies)
    offsets = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(trees.sizes[chosen], out=offsets[1:])  # the others' trees are empty, so the nodes stay as they are
    return [batch.requests[b] for b in chosen], DraftTrees(
        offsets, trees.tokens, trees.parents, trees.log_probs, trees.origins
    )
