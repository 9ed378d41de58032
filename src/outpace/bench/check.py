"""Is the output really the model's own? With and without speculation, token for token.

Floating point has a **noise floor**: the largest difference of logits between the model's plain pass over a text and
packed passes over the same text. Where two outputs first differ, the two tokens are compared at that place: if both are
as close to the best logit as twice the floor, rounding decides between them, and the difference is a **tie**. Anything
else is a **divergence**, an error of ours. A floor that is higher than rounding explains is an error too, and excuses
nothing: then the limit is what rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig

from outpace.config import SamplingParams
from outpace.draft import NoneDrafter
from outpace.engine import Engine, Output, Prompt
from outpace.model import KVArena, Target, pack
from outpace.tree import DraftTrees, Int32Array

Reference = Literal["transformers", "none"]
_FLOOR_TEXTS = 4  # texts over which the floor is measured, the longest ones
_CHUNK = 16  # tokens of a cached pass, about what a verify step packs
_SINGLE = 48  # last tokens of a text that are also passed one by one, as plain decoding does
# Largest difference of logits, as a share of their spread, that rounding may explain.
_EXPLAINABLE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """What became of one prompt.

    Attributes:
        index: Its place in the file, from 0.
        result: ``identical``, ``tie``, ``divergence``, or ``error`` if it could not be generated from.
        tokens: Tokens compared.
        position: First output position that differs, from 0; None if none does.
        expected: The reference's token there; None where its output had ended.
        found: The token with speculation there; None where the output had ended.
        gap: How far the worse of the two is below the best logit there, in a plain pass.
        message: Of an error.
    """

    index: int
    result: Literal["identical", "tie", "divergence", "error"]
    tokens: int
    position: int | None = None
    expected: int | None = None
    found: int | None = None
    gap: float | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A whole check.

    Attributes:
        prompts: Prompts checked.
        tokens: Tokens compared.
        identical: Prompts whose outputs are the same.
        ties: Prompts whose first difference is a tie.
        divergences: Prompts whose first difference is none.
        errors: Prompts that could not be generated from.
        noise_floor: In logits.
        distinct_4grams: Share of distinct 4-grams in the outputs; below 0.6 the text loops, which flatters drafters.
        mean_accepted_tokens: Of the speculative run.
        drafter: What drafted.
        reference: What the outputs were compared with.
        details: Prompt by prompt.
    """

    prompts: int
    tokens: int
    identical: int
    ties: int
    divergences: int
    errors: int
    noise_floor: float
    distinct_4grams: float
    mean_accepted_tokens: float
    drafter: str
    reference: Reference
    details: list[PromptCheck]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(
    engine: Engine,
    prompts: SequenceOf[Prompt],
    *,
    max_tokens: int = 128,
    reference: Reference = "transformers",
    on_step: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> CheckResult:
    """Compare greedy outputs with and without speculation.

    Args:
        engine: With the drafter to be checked.
        prompts: In any form that the engine takes.
        max_tokens: Tokens to generate for each.
        reference: ``transformers`` is `generate` of the unmodified model, one prompt at a time; ``none`` is the engine's
            own plain decoding.
        on_step: Called with the stage's name, how much is done and how much there is.
    """
    params = SamplingParams(max_tokens=max_tokens)
    found = _generate(engine, prompts, params, on_step)
    usable = [output for output in found if output.error is None]
    expected: dict[int, list[int]] = {}
    plain = _PlainRun(engine, params) if reference == "none" else None
    for done, output in enumerate(usable):
        on_step("without speculation", done, len(usable))
        prompt = np.asarray(output.prompt_token_ids, np.int32)
        if plain is not None:
            expected[output.prompt_index] = plain(prompt)
        else:
            expected[output.prompt_index] = transformers_greedy(engine.target, prompt, max_tokens)
    texts = [np.array([*output.prompt_token_ids, *output.token_ids], np.int32) for output in usable]
    longest = sorted(texts, key=len)[-_FLOOR_TEXTS:]
    floor = noise_floor(engine.target, longest)
    limit = _tie_limit(engine.target, longest, floor)
    details = [compare(engine.target, output, expected.get(output.prompt_index, []), limit) for output in found]
    count = {kind: sum(d.result == kind for d in details) for kind in ("identical", "tie", "divergence", "error")}
    steps = sum(output.figures.steps for output in usable)
    return CheckResult(
        prompts=len(details),
        tokens=sum(detail.tokens for detail in details),
        identical=count["identical"],
        ties=count["tie"],
        divergences=count["divergence"],
        errors=count["error"],
        noise_floor=floor,
        distinct_4grams=distinct_ngrams([output.token_ids for output in usable]),
        mean_accepted_tokens=sum(output.figures.tokens for output in usable) / steps if steps else 0.0,
        drafter=engine.drafter.name,
        reference=reference,
        details=details,
    )


@torch.no_grad()
def transformers_greedy(target: Target, prompt: Int32Array, max_tokens: int) -> list[int]:
    """Greedy output of the unmodified model's own `generate`, one prompt, no sampling, no penalties.

    The context's end is kept as the engine keeps it.
    """
    if target.context_length is not None:
        max_tokens = min(max_tokens, target.context_length - len(prompt))
    if max_tokens <= 0:
        return []
    model: Any = target.model
    own = model.generation_config
    eos = getattr(own, "eos_token_id", None)
    pad = getattr(own, "pad_token_id", None)
    if pad is None:
        pad = eos[0] if isinstance(eos, list) else eos
    input_ids = torch.as_tensor(prompt, dtype=torch.int64, device=target.device)[None]
    make_config: Any = GenerationConfig  # untyped
    config = make_config(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=eos, pad_token_id=0 if pad is None else pad
    )
    before = model.generation_config
    model.generation_config = (
        config  # else `generate` fills what is unset from the checkpoint's own (penalties, sampling)
    )
    try:
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    finally:
        model.generation_config = before
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def noise_floor(target: Target, texts: SequenceOf[Int32Array]) -> float:
    """Largest difference of logits between plain passes and packed passes over the same texts.

    Each text goes through the arena three times: whole, packed beside the others; in cached chunks, as verify steps do;
    and alone with its last tokens one by one, as plain decoding does. Kernels round differently in each.
    """
    texts = [text for text in texts if len(text)]
    if not texts:
        return 0.0
    plain = [target.plain_logits(text).float() for text in texts]
    whole = [[len(text)] for text in texts]
    if target.rope_switch is not None:
        # Positions are rotated by what else is in the pass: only whole texts, one at a time, are comparable.
        passes = [_packed_logits(target, [text], [own])[0] for text, own in zip(texts, whole, strict=True)]
        return _largest_difference(plain, passes)
    chunks = [[_CHUNK] * (len(text) // _CHUNK) + [len(text) % _CHUNK] for text in texts]
    worst = max(_largest_difference(plain, _packed_logits(target, texts, cuts)) for cuts in (whole, chunks))
    for text, logits in zip(texts, plain, strict=True):
        single = min(_SINGLE, len(text) - 1)
        alone = _packed_logits(target, [text], [[len(text) - single] + [1] * single])
        worst = max(worst, _largest_difference([logits], alone))
    return worst


def _largest_difference(plain: SequenceOf[torch.Tensor], packed: SequenceOf[torch.Tensor]) -> float:
    worst = [(a - b.float().to(a.device)).abs().nan_to_num(torch.inf) for a, b in zip(plain, packed, strict=True)]
    return max(float(difference.max()) for difference in worst)


def tie_limit(target: Target, texts: SequenceOf[Int32Array]) -> float:
    """How far below the best logit a token may be, in logits, so that rounding may still prefer it.

    Args:
        target: The model.
        texts: Prompts with their outputs; the noise floor is measured over the longest ones.
    """
    longest = sorted((text for text in texts if len(text)), key=len)[-_FLOOR_TEXTS:]
    return _tie_limit(target, longest, noise_floor(target, longest))


def _tie_limit(target: Target, texts: SequenceOf[Int32Array], floor: float) -> float:
    return 2 * min(floor, _explainable(target, texts))


def _explainable(target: Target, texts: SequenceOf[Int32Array]) -> float:
    """The highest noise floor, in logits, that rounding explains in the model's precision."""
    if not texts:
        return 0.0
    logits = target.plain_logits(texts[-1])
    return _EXPLAINABLE.get(logits.dtype, 0.25) * float(logits.float().std())


def distinct_ngrams(texts: SequenceOf[SequenceOf[int]], n: int = 4) -> float:
    """Share of distinct n-grams, counted within each text; 1.0 where there are none."""
    total = distinct = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return distinct / total if total else 1.0


def _packed_logits(
    target: Target, texts: SequenceOf[Int32Array], chunks: SequenceOf[SequenceOf[int]]
) -> list[torch.Tensor]:
    """Logits at every position, ``[len(text), vocab]`` each, through an arena of its own in chunks of the given sizes."""
    rows = sum(len(text) for text in texts)
    arena = KVArena(target.layers, max_rows=2 * rows + 64, initial_rows=rows + 64)
    for key, text in enumerate(texts):
        arena.open(key)
        arena.prepare(key, len(text))
        arena.release(key)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    sizes = [iter(own) for own in chunks]
    while active := [key for key, text in enumerate(texts) if arena.cached_length(key) < len(text)]:
        starts = [arena.cached_length(key) for key in active]
        pending = [texts[key][start : start + next(sizes[key])] for key, start in zip(active, starts, strict=True)]
        for key, tokens in zip(active, pending, strict=True):
            arena.prepare(key, len(tokens))
        plan = pack(
            pending,
            starts,
            DraftTrees.empty(len(active)),
            [arena.segments(key) for key in active],
            [arena.write_start(key) for key in active],
            [True] * len(active),
            every_row=True,
        )
        logits, _ = target.run(plan, arena)
        arena.commit(active, plan.num_pending.tolist(), None)
        for b, key in enumerate(active):
            parts[key].append(logits[plan.cu_seqlens_q[b] : plan.cu_seqlens_q[b + 1]])
    return [torch.cat(own) for own in parts]


class _PlainRun:
    """The engine's own plain decoding, one prompt at a time, on the same model."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = Engine(
            engine.target.model,
            drafter=NoneDrafter(),
            context_length=engine.config.context_length,
            backend=engine.config.backend,
        )
        self._params = params

    def __call__(self, prompt: Int32Array) -> list[int]:
        [output] = self._engine.generate(prompt, self._params)
        return output.token_ids


def _generate(
    engine: Engine, prompts: SequenceOf[Prompt], params: SamplingParams, on_step: Callable[[str, int, int], None]
) -> list[Output]:
    finished = 0

    def count(progress: Any) -> None:
        nonlocal finished
        finished += progress.output is not None
        on_step("with speculation", finished, len(prompts))

    return engine.generate(list(prompts), params, errors="return", on_progress=count)


def compare(target: Target, output: Output, expected: list[int], limit: float) -> PromptCheck:
    """What became of one output.

    Args:
        target: The model.
        output: With speculation.
        expected: Tokens without.
        limit: From `tie_limit`.
    """
    if output.error is not None:
        kind = type(output.error).__name__
        return PromptCheck(output.prompt_index, "error", 0, message=f"{kind}: {output.error}")
    found = output.token_ids
    compared = max(len(found), len(expected))
    if found == expected:
        return PromptCheck(output.prompt_index, "identical", compared)
    position = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    ours = found[position] if position < len(found) else None
    theirs = expected[position] if position < len(expected) else None
    gap = None
    if ours is not None and theirs is not None:
        text = np.array([*output.prompt_token_ids, *found[:position]], np.int32)
        logits = target.plain_logits(text)[-1].float()
        gap = float(logits.max() - torch.minimum(logits[ours], logits[theirs]))
    is_tie = gap is not None and gap <= limit
    return PromptCheck(output.prompt_index, "tie" if is_tie else "divergence", compared, position, theirs, ours, gap)
