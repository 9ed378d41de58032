"""The recipe of `outpace-tiny`, the model in the box: data, architecture, optimisers and schedule.

Documents are packed into one stream with an end-of-text token between them. Sequences grow from 512 to 1,024 tokens
over the run. Matrices of the layers are trained by Muon, everything else by AdamW; the learning rates warm up, stay
for a short while, and fall linearly to zero.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from outpace.errors import InputError
from outpace.train.prompts import held_out_prompts, write_prompts
from outpace.train.texts import TrainingTexts
from outpace.train.tokenizer import END_OF_TEXT, END_OF_TURN, load_tokenizer, token_id, train_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """Every number of the recipe.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads: Shape of the Llama model.
        context: Longest sequence, in tokens.
        tokens: Training tokens over the whole run.
        batch_tokens: Tokens of one optimiser step.
        lengths: Sequence length by stage: (share of the run up to which it holds, length).
        stdlib_share, edit_share, copy_share: Shares of the tokens; what is left is worked arithmetic.
        test_weight: How often a test file of the library is drawn, compared with another file.
        muon_rate, adam_rate: Peak learning rates.
        decay_from: Share of the run after which the rates fall linearly to zero.
        seed: Seed of the weights and of the order of the data.
    """

    hidden: int = 256
    intermediate: int = 688
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    context: int = 1024
    tokens: int = 13_000_000
    batch_tokens: int = 4096
    lengths: tuple[tuple[float, int], ...] = ((0.7, 512), (1.0, 1024))
    stdlib_share: float = 0.32
    edit_share: float = 0.35
    copy_share: float = 0.15
    test_weight: float = 0.15
    muon_rate: float = 0.008
    adam_rate: float = 0.002
    decay_from: float = 0.1
    seed: int = 0


class TrainingProgress(Protocol):
    """Told after every optimiser step."""

    def __call__(self, *, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        """Take note.

        Args:
            step: Steps done.
            steps: Steps of the run.
            loss: Smoothed loss, nats a token.
            tokens_per_second: Mean since the beginning.
        """


class _Stream:
    """Endless token ids of one kind of document."""

    def __init__(self, texts: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._end = token_id(tokenizer, END_OF_TEXT)
        self._rest: list[int] = []

    def take(self, count: int) -> NDArray[np.int64]:
        while len(self._rest) < count:
            self._rest += self._tokenizer(next(self._texts), add_special_tokens=False)["input_ids"]
            self._rest.append(self._end)
        taken, self._rest = self._rest[:count], self._rest[count:]
        return np.asarray(taken, dtype=np.int64)


def build_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama of the recipe's shape, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    end_of_text, end_of_turn = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, END_OF_TURN)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[end_of_text, end_of_turn],
        pad_token_id=end_of_text,
    )
    return LlamaForCausalLM(config)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, without ever holding all logits at once.

    Shapes: hidden [tokens, width], weight [vocabulary, width], targets [tokens].
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        half = weight.to(torch.bfloat16)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), 512):
            rows = hidden[start : start + 512].to(torch.bfloat16)
            wanted = targets[start : start + 512, None]
            log_probs = functional.log_softmax((rows @ half.T).float(), dim=-1)
            total -= log_probs.gather(1, wanted).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
            grad = grad.mul_(1.0 / len(hidden)).to(torch.bfloat16)
            grad_hidden[start : start + 512] = (grad @ half).to(hidden.dtype)
            grad_weight += (grad.T @ rows).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, grads[0] * grad_weight, None


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats a token of `ids` [sequences, length + 1]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat.float(), model.lm_head.weight, ids[:, 1:].reshape(-1)
    )
    return loss


class _Batches:
    """Batches that mix the kinds of text by the recipe's shares, a whole sequence of one kind each."""

    def __init__(
        self, texts: TrainingTexts, tokenizer: PreTrainedTokenizerFast, recipe: TinyRecipe, *, held_out: bool = False
    ) -> None:
        random = Random(recipe.seed + held_out)
        kinds = texts.stdlib, texts.edits, texts.copies, texts.arithmetic
        self._streams = [_Stream(kind(random, held_out=held_out), tokenizer) for kind in kinds]
        shares = recipe.stdlib_share, recipe.edit_share, recipe.copy_share
        self._shares = (*shares, 1.0 - sum(shares))
        self._random = random

    def draw(self, sequences: int, length: int) -> torch.Tensor:
        streams = self._random.choices(self._streams, self._shares, k=sequences)
        return torch.from_numpy(np.stack([stream.take(length + 1) for stream in streams]))

    def by_kind(self, sequences: int, length: int) -> dict[str, torch.Tensor]:
        names = "stdlib", "edits", "copies", "arithmetic"
        return {
            name: torch.from_numpy(np.stack([stream.take(length + 1) for _ in range(sequences)]))
            for name, stream in zip(names, self._streams, strict=True)
        }


def _rate(done: float, decay_from: float) -> float:
    """Share of the peak rate when `done` of the run is over."""
    if done < 0.01:
        return done / 0.01
    return 1.0 if done < decay_from else max(0.0, (1.0 - done) / (1.0 - decay_from))


def _optimisers(model: LlamaForCausalLM, recipe: TinyRecipe) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2 or p is model.lm_head.weight]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_tiny(
    out: Path,
    *,
    gsm8k: Path,
    stdlib: Path | None = None,
    start_from: Path | None = None,
    recipe: TinyRecipe | None = None,
    progress: TrainingProgress | None = None,
    snapshot_seconds: float = 300.0,
) -> dict[str, float]:
    """Train `outpace-tiny` and write it to `out` as a Hugging Face checkpoint in bfloat16.

    Args:
        out: Folder to write; made if missing. A snapshot is written there every `snapshot_seconds`.
        gsm8k: GSM8K's training questions, JSON lines.
        stdlib: Folder of the Python standard library; the running interpreter's own when None.
        start_from: An earlier result of this recipe, whose weights training starts from; random weights when None.
        recipe: The numbers; the published recipe when None.
        progress: Told after every step.
        snapshot_seconds: Time between snapshots.

    Returns:
        Loss in nats a token on held-out text, by kind, beside `train`, `tokens` and `seconds`.

    Raises:
        InputError: A source is missing or malformed, or `start_from` has another tokenizer.
    """
    recipe = recipe or TinyRecipe()
    texts = TrainingTexts(gsm8k, stdlib, test_weight=recipe.test_weight)
    tokenizer = train_tokenizer(texts.for_tokenizer(), model_max_length=recipe.context)
    model = build_model(recipe, tokenizer)
    if start_from is not None:
        from transformers import LlamaForCausalLM

        if load_tokenizer(start_from).get_vocab() != tokenizer.get_vocab():
            raise InputError(
                f"{start_from} has another tokenizer than these texts give; use the texts that it was trained on"
            )
        model.load_state_dict(LlamaForCausalLM.from_pretrained(start_from, dtype=torch.float32).state_dict())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    batches, optimisers = _Batches(texts, tokenizer, recipe), _optimisers(model, recipe)
    peaks = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    steps = math.ceil(recipe.tokens / recipe.batch_tokens)
    start = saved = time.perf_counter()
    smooth = 0.0
    for step in range(steps):
        done = (step + 0.5) / steps
        length = next(length for share, length in recipe.lengths if done < share)
        groups = [group for optimiser in optimisers for group in optimiser.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * _rate(done, recipe.decay_from)
        loss = loss_of(model, batches.draw(recipe.batch_tokens // length, length))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        now = time.perf_counter()
        if progress is not None:
            rate = (step + 1) * recipe.batch_tokens / (now - start)
            progress(step=step + 1, steps=steps, loss=smooth, tokens_per_second=rate)
        if now - saved > snapshot_seconds:
            save_checkpoint(model, tokenizer, out)
            saved = now
    save_checkpoint(model, tokenizer, out)
    figures = held_out_loss(model, _Batches(texts, tokenizer, recipe, held_out=True), recipe)
    figures |= {"train": smooth, "tokens": float(steps * recipe.batch_tokens), "seconds": time.perf_counter() - start}
    record: dict[str, Any] = {"recipe": asdict(recipe), "figures": figures}
    if start_from is not None:
        earlier = start_from / "training.json"
        record["start_from"] = json.loads(earlier.read_text()) if earlier.is_file() else str(start_from)
    write_prompts(held_out_prompts(texts), out / "prompts.jsonl")
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return figures


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer to `out`."""
    from transformers import LlamaForCausalLM

    copy: Any = LlamaForCausalLM(model.config)
    copy = copy.to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, batches: _Batches, recipe: TinyRecipe) -> dict[str, float]:
    """Loss in nats a token on 32 held-out sequences of each kind."""
    return {kind: loss_of(model, ids).item() for kind, ids in batches.by_kind(32, recipe.context // 2).items()}
