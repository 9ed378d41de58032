"""Find out whether a model can be run packed, and what its attention layers are like, before anything is generated.

Some models go wrong silently: Falcon, BLOOM and MPT only log a warning when asked for an attention implementation that
they do not look up; GPT-J never calls it; a recurrent state cannot be packed. So a model is refused unless it passes:

1. **Flags**: a causal model with `_supports_attention_backend`, without recurrent state, not an encoder-decoder.
2. **Discovery**: one short pass in which our functions stand in. Each attention layer calls ours exactly once, with a mask
   pattern that we know, and keys as new as the queries.
3. **Parity**: two short sequences, packed, cached and continued under a tree, against each of them alone through the
   model's own eager attention, with windows and chunks shrunk below the sequences' lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outpace.errors import ConfigError, ModelError, UnsupportedModelError
from outpace.model.arena import KVArena
from outpace.model.attention import AttentionOptions, attend_reference, attention_configs, register, selected
from outpace.model.compiled import CompiledModel
from outpace.model.cpu_modules import StandIns
from outpace.model.masks import MaskSpec
from outpace.model.plan import pack
from outpace.model.rope import find_switch
from outpace.model.storage import LayerKV
from outpace.model.target import Target, packed_forward
from outpace.tree import DraftTrees, Int32Array, Verdicts

logger = logging.getLogger(__name__)

_SHRUNK = {"sliding_window": 5, "attention_chunk_size": 4}
_LENGTHS = (13, 8)
# Largest difference of logits, as a share of their spread, that rounding may explain. Norms and rotary embeddings are
# computed in float32 even in a float64 model.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


def probe(
    model: torch.nn.Module,
    *,
    backend: str = "auto",
    context_length: int | None = None,
    pack_weights: bool | None = None,
    compile_model: bool = False,
) -> Target:
    """Check a loaded model and describe it.

    Args:
        model: A causal model of Transformers, or a PEFT model around one.
        backend: Attention backend to run it with, see `outpace.model.backends.make_backend`.
        context_length: Overrides the model's own limit.
        compile_model: Run the model through ``torch.compile``; uncompiled if that fails, or if its logits are wrong.
        pack_weights: Whether to keep copies of the weights for the CPU's matrix kernels, see `EngineConfig`.

    Raises:
        UnsupportedModelError: It cannot be run packed; the message names the probe that failed.
        ModelError: It is in training mode, or its logits are not finite.
        ConfigError: There is no such backend, or it cannot run this model's layers.
    """
    register()
    base = unwrap(model)
    name = type(base).__name__
    _check_flags(base, name)
    configs = attention_configs(base)
    config = base.config.get_text_config(decoder=True)
    device = input_device(base)
    embeddings: Any = base.get_input_embeddings()
    vocab_size = min(int(config.vocab_size), int(embeddings.weight.shape[0]))
    texts = [_probe_text(length, vocab_size, seed) for seed, length in enumerate(_LENGTHS)]

    found, width = _discover(base, configs, device, texts[0], name, config)
    fields: dict[str, Any] = {
        "model": base,
        "configs": configs,
        "layers": [call.kv for call in found],
        "layer_of": {id(call.module): index for index, call in enumerate(found)},
        "vocab_size": width,
        "num_embeddings": int(embeddings.weight.shape[0]),
        "context_length": _context_length(config, context_length, name),
        "rope_switch": find_switch(base, config),
        "device": device,
        "backend": backend,
        "stand_ins": None if backend == "torch" or device.type != "cpu" else StandIns(base, pack_weights),
    }
    with _shrunk_windows(configs):
        small = [call.mask for call in _discover(base, configs, device, texts[0], name, config)[0]]
        target = Target(**fields, masks=small, probe_difference=0.0)
        with _refusing(name, "a packed pass"):
            difference = _check_parity(target, texts, name)
    logger.debug("%s: %d attention layers, probe difference %.2e", name, len(found), difference)
    masks = [call.mask for call in found]
    if compile_model:
        compiled = CompiledModel(base)
        target = Target(**fields, masks=masks, probe_difference=difference, compiled=compiled)
        try:
            _check_parity(target, texts, name)
        except ModelError as error:
            compiled.give_up(error)
        return target
    return Target(**fields, masks=masks, probe_difference=difference)


def _context_length(config: PreTrainedConfig, wanted: int | None, name: str) -> int | None:
    """The model's own limit, or a lower one; beyond its own, learned positions end and rotary ones were never trained."""
    own = getattr(config, "max_position_embeddings", None)
    if wanted is None or own is None:
        return own if wanted is None else wanted
    if wanted > own:
        raise ConfigError(f"context_length may only shorten what {name} has, {own} tokens; found {wanted}")
    return wanted


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """The Transformers model inside a PEFT or compiled wrapper.

    Raises:
        UnsupportedModelError: There is none, or the PEFT method adds virtual tokens.
    """
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if hasattr(inner, "get_base_model") and hasattr(inner, "peft_config"):
        adapter = inner.active_peft_config
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"PEFT method {adapter.peft_type} adds virtual tokens in front of the prompt, which a packed pass cannot do; "
                "merge the adapter or use a LoRA-like one"
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(f"expected a Transformers model (PreTrainedModel), found {type(model).__name__}")
    return inner


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go in: the embedding's device, or the device that an offloaded model computes on."""
    hook: Any = getattr(model, "_hf_hook", None)
    execution = getattr(hook, "execution_device", None)
    if execution is not None:
        return torch.device(execution if not isinstance(execution, int) else f"cuda:{execution}")
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    return device


def _check_flags(model: PreTrainedModel, name: str) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; Outpace runs decoder-only causal models")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state (_is_stateful): its layers are not rows of keys and values, so several drafted "
            "continuations cannot share a pass"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not use Transformers' attention interface (_supports_attention_backend is not set): it would "
            "ignore the packed attention and mix sequences up"
        )
    if getattr(config.get_text_config(decoder=True), "attn_temperature_tuning", False):  # Llama 4
        # No short text shows it: the factor stays 1 for the first `floor_scale` (8192) tokens.
        raise UnsupportedModelError(
            f"{name} scales queries by the token's place in the row instead of its position (attn_temperature_tuning), which "
            "is wrong behind another sequence; load it with attn_temperature_tuning=False if every text is shorter than its "
            f"floor_scale ({getattr(config.get_text_config(decoder=True), 'floor_scale', 'unknown')} tokens)"
        )
    head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if head() is None:
        raise UnsupportedModelError(f"{name} has no language-modelling head; load it with AutoModelForCausalLM")
    if model.training:
        raise ModelError(f"{name} is in training mode, where dropout changes its output; call model.eval() first")


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What one attention layer's call showed."""

    module: torch.nn.Module
    kv: LayerKV
    mask: MaskSpec


@dataclass(eq=False)
class _Recorder:
    """Stands in for a packed step during discovery."""

    name: str
    calls: list[_Call] = field(default_factory=list)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: AttentionOptions,
    ) -> torch.Tensor:
        layer = f"{self.name}, attention layer {len(self.calls)}"
        if not isinstance(mask, MaskSpec):
            found = "no mask at all" if mask is None else f"a {type(mask).__name__} of its own"
            raise UnsupportedModelError(
                f"{layer}: expected the mask that Transformers' mask interface gives, found {found}"
            )
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{layer} is not causal (cross attention or a bidirectional layer)")
        if query.shape[0] != 1 or key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise UnsupportedModelError(
                f"{layer}: expected one key for each of {query.shape[2]} new tokens, found queries {list(query.shape)}, keys "
                f"{list(key.shape)}, values {list(value.shape)}"
            )
        kv = LayerKV(key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.dtype, key.device)
        self.calls.append(_Call(module, kv, mask))
        out = attend_reference(query[0], key[0], value[0], None, options, causal=True)
        return out.transpose(0, 1)[None]


@torch.no_grad()
def _discover(
    model: PreTrainedModel,
    configs: list[PreTrainedConfig],
    device: torch.device,
    text: Int32Array,
    name: str,
    config: PreTrainedConfig,
) -> tuple[list[_Call], int]:
    """One short pass with a recorder in the attention's place: what each layer showed, and the logits' width."""
    recorder = _Recorder(name)
    tokens = text.astype(np.int64)
    positions = np.arange(len(tokens))
    ones = torch.ones((1, len(tokens)), dtype=torch.int64)
    with _refusing(name, "a pass through the attention interface"):
        logits = packed_forward(model, configs, tokens, positions, recorder, ones, device, None)
    distinct = len({id(call.module) for call in recorder.calls})
    expected = int(getattr(config, "num_hidden_layers", distinct))
    if not recorder.calls or distinct != len(recorder.calls) or distinct != expected:
        raise UnsupportedModelError(
            f"{name}: expected each of {expected} layers to call the attention interface once, found {len(recorder.calls)} "
            f"calls from {distinct} modules"
        )
    return recorder.calls, logits.shape[1]


@contextmanager
def _refusing(name: str, what: str) -> Iterator[None]:
    """Whatever a model does in our pass, it is a reason to refuse it by name."""
    try:
        yield
    except ModelError as error:
        if name in str(error):
            raise
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(f"{name}: {what} failed: {error}") from error


@contextmanager
def _shrunk_windows(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Make windows and chunks shorter than the probe's texts, and put them back."""
    before: list[tuple[PreTrainedConfig, str, int]] = []
    for config in configs:
        for attribute in _SHRUNK:
            value = getattr(config, attribute, None)
            if isinstance(value, int):
                before.append((config, attribute, value))
    try:
        for config, attribute, value in before:
            setattr(config, attribute, min(value, _SHRUNK[attribute]))
        yield
    finally:
        for config, attribute, value in before:
            setattr(config, attribute, value)


def _probe_text(length: int, vocab_size: int, seed: int) -> Int32Array:
    """Token ids that hardly repeat, the same on every machine; low ids, which are often special, are avoided."""
    low = min(16, vocab_size // 2)
    return np.random.default_rng(seed).integers(low, vocab_size, length).astype(np.int32)


def _check_parity(target: Target, texts: list[Int32Array], name: str) -> float:
    """Packed against alone; returns the largest difference of logits.

    Both texts go through the arena in two steps. The first packs all but the last three tokens of each. The second holds one
    pending token and a tree whose first branch is wrong and whose second is the text's last two tokens.
    """
    alone = [_alone(target, text) for text in texts]
    if not all(bool(torch.isfinite(logits).all()) for logits in alone):
        raise ModelError(f"{name}: logits of a plain pass are NaN or infinite; are the weights loaded?")
    arena = KVArena(target.layers, max_rows=256, initial_rows=64)
    keys = range(len(texts))
    for key in keys:
        arena.open(key)
    first = _packed(target, arena, [text[:-3] for text in texts], DraftTrees.empty(len(texts)))
    trees = DraftTrees.concatenate([_probe_tree(text, target.vocab_size) for text in texts])
    second = _packed(target, arena, [text[-3:-2] for text in texts], trees)
    right = np.array([1, 2])
    worst = 0.0
    for b, expected in enumerate(alone):
        rows = torch.as_tensor([0, *(right + 1)], device=second[b].device)
        found = torch.cat([first[b], second[b].index_select(0, rows)])
        wanted = expected[len(texts[b]) - 4 :].to(found.device)
        worst = max(worst, float((found.float() - wanted.float()).abs().max()))
    spread = float(torch.cat([logits.float() for logits in alone]).std())
    tolerance = _TOLERANCE.get(alone[0].dtype, 0.25) * max(spread, 1e-6)
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"{name}: two sequences packed in one row must give the logits that each gives alone; they differ by {worst:.3g} "
            f"(rounding explains {tolerance:.3g}). The model does something with its mask, positions or cache that a packed "
            "pass does not reproduce"
        )
    return worst


@torch.no_grad()
def _alone(target: Target, text: Int32Array) -> torch.Tensor:
    with selected(target.configs, "eager"):
        return target.plain_logits(text)


def _probe_tree(text: Int32Array, vocab_size: int) -> DraftTrees:
    """A wrong token and, beside it, the text's last two tokens in a row."""
    wrong = (int(text[-2]) + 1) % vocab_size
    return DraftTrees(
        np.array([0, 3], np.int32),
        np.array([wrong, text[-2], text[-1]], np.int32),
        np.array([-1, -1, 1], np.int32),
        np.zeros(3, np.float32),
        np.zeros(3, np.uint32),
    )


def _packed(target: Target, arena: KVArena, pending: list[Int32Array], trees: DraftTrees) -> list[torch.Tensor]:
    """Run one step, keep the pending rows, return each sequence's logits (root, then nodes)."""
    keys = range(len(pending))
    sizes = trees.sizes
    for key in keys:
        arena.prepare(key, len(pending[key]) + int(sizes[key]))
    plan = pack(
        pending,
        [arena.cached_length(key) for key in keys],
        trees,
        [arena.segments(key) for key in keys],
        [arena.write_start(key) for key in keys],
        [True] * len(pending),
    )
    logits, _ = target.run(plan, arena)
    arena.commit(keys, plan.num_pending.tolist(), _no_verdicts(len(pending)))
    return [logits[plan.logit_offsets[b] : plan.logit_offsets[b + 1]] for b in keys]


def _no_verdicts(batch_size: int) -> Verdicts:
    offsets = np.zeros(batch_size + 1, np.int32)
    return Verdicts(offsets, np.empty(0, np.int32), offsets, np.empty(0, np.int32))
