"""Tiny random models of every supported family, made so that their greedy output does not loop.

A default initialisation gives near-zero attention scores and logits, and the model soon repeats one token: then every
drafter looks right and a wrong mask goes unseen. Here every parameter is drawn anew, so that scores are sharp,
attention outweighs the token's own embedding, and each new token turns on the whole context and its positions. The
gains stay low enough that the logits of a whole pass and of a token-by-token pass differ by at most 3e-5 (float32),
and each seed is one whose greedy tokens lead by ten times that or more: a difference in the tests is an error, no tie.

Nothing is downloaded; the same name gives the same weights in every process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

VOCAB = 512
WINDOW = 24  # shorter than most prompts and than every prompt with its continuation
MAX_POSITIONS = 512
LONGROPE_SWITCH = 64  # the original context: text longer than this uses the other factors
PROMPT_LENGTHS = (5, 9, 16, 24, 33, 47, 60)
NEW_TOKENS = 96


@dataclass(frozen=True)
class Init:
    """Gains of one family's parameters, each relative to the draw that keeps a unit variance.

    Attributes:
        attention: Projections of the attention. Scores have a standard deviation of about its square, so 1.5 gives
            attention that looks at a handful of tokens.
        query_key_norm: Mean weight of norms on queries and keys, where a family has them: they undo `attention`.
        mlp: Projections of the MLP and the experts, and the router.
        head: Output projection, so the standard deviation of the logits.
        embedding: Standard deviation of a token's embedding as it enters the first layer.
        position: The same for learned positions.
        sink: Mean of the attention sinks (standard deviation 1); about the log of the sum of exp(score) over a text.
    """

    attention: float = 1.5
    query_key_norm: float = 1.5
    mlp: float = 1.0
    head: float = 2.0
    embedding: float = 1.0
    position: float = 1.0
    sink: float = 4.0


@dataclass(frozen=True)
class Family:
    """One recipe: `config()` describes the model, `seed` and `init` its weights, `notes` what it covers."""

    name: str
    config: Callable[[], hf.PreTrainedConfig]
    seed: int = 0
    init: Init = field(default_factory=Init)
    notes: str = ""


class Reference(NamedTuple):
    """A model with the greedy continuations that its own `generate` gave, one prompt at a time."""

    model: hf.PreTrainedModel
    prompts: list[list[int]]
    continuations: list[list[int]]


def prompts(vocab_size: int, seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of the given lengths, without token 0 (the padding, from which `generate` infers a mask)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams among all n-grams: `[1, 2, 1, 2, 1]` has 2 distinct ones of 4 for n = 2, so 0.5."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    if not ngrams:
        raise ValueError(f"{len(tokens)} tokens hold no {n}-gram")
    return len(set(ngrams)) / len(ngrams)


# Where RoPE switches, Phi-3's `generate` before Transformers 5.20 drops its cache and then feeds the last token alone.
GENERATE_LOSES_CONTEXT = tuple(int(part) for part in hf.__version__.split(".")[:2]) < (5, 20)


def greedy(model: hf.PreTrainedModel, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """The continuation of `prompt` that the model's own `generate` gives."""
    input_ids = torch.tensor([list(prompt)])  # [1, num_prompt_tokens]
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        use_cache=not (GENERATE_LOSES_CONTEXT and model.config.model_type == "phi3"),
    )
    return output[0, len(prompt) :].tolist()


@functools.cache
def reference(name: str) -> Reference:
    """Computed once a process; leave the model as you found it."""
    model = build(name)
    texts = prompts(VOCAB, seed=0, lengths=PROMPT_LENGTHS)
    return Reference(model, texts, [greedy(model, text) for text in texts])


def build(name: str, **changes: object) -> hf.PreTrainedModel:
    """The family's model on the CPU: float32, in evaluation mode, without an end-of-sequence token.

    `changes` go into the configuration; the assurance about loops and ties is for the recipe without changes.
    """
    family = FAMILIES[name]
    config = family.config()
    config.update(changes)
    with torch.random.fork_rng(devices=[]):  # the constructor draws weights that are then drawn again
        # Transformers before 5.21 offers Gemma 2 sdpa, which leaves its soft cap out.
        attention = {"attn_implementation": "eager"} if config.model_type == "gemma2" else {}
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
    initialise(model, family.init, family.seed)
    return model.eval()


# --- Weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialise(model: hf.PreTrainedModel, init: Init, seed: int) -> None:
    """Draws every parameter of `model` anew; one that no rule knows is an error."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    for prefix, module in model.named_modules():
        for suffix, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{suffix}"
            mean, std = 0.0, 0.0
            if suffix.endswith("bias"):
                std = 0.1
            elif suffix == "sinks":
                mean, std = init.sink, 1.0
            elif "norm" in prefix or ".ln_" in prefix:
                # As constructed: 1, or 0 where the family adds the 1 itself (Gemma).
                shift = init.query_key_norm - 1.0 if prefix.endswith(("q_norm", "k_norm")) else 0.0
                mean, std = parameter.flatten()[0].item() + shift, 0.1
            elif module is embeddings:
                std = init.embedding / _embedding_multiplier(model)
            elif isinstance(module, nn.Embedding):
                std = init.position
            elif module is head:
                std = init.head / math.sqrt(parameter.shape[1])
            elif parameter.dim() >= 2:
                gain = init.attention if "attn" in prefix or "attention" in prefix else init.mlp
                std = gain / math.sqrt(_fan_in(module, suffix, parameter, model.config.hidden_size))
            else:
                raise ValueError(f"no rule for parameter {name} of shape {tuple(parameter.shape)}")
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


def _embedding_multiplier(model: hf.PreTrainedModel) -> float:
    """What the family multiplies a token's embedding with before the first layer."""
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)  # Gemma
    if scale is not None:
        return float(scale)
    return float(getattr(model.config, "embedding_multiplier", 1.0))  # Granite


def _fan_in(module: nn.Module, suffix: str, weight: Tensor, hidden_size: int) -> int:
    """Number of inputs that one output sums over."""
    if weight.dim() == 3:  # experts: [E, out, in], in GPT-OSS [E, in, out]
        return hidden_size if "gate_up" in suffix else weight[0].numel() // hidden_size
    return weight.shape[0] if isinstance(module, hf.pytorch_utils.Conv1D) else weight.shape[1]


# --- Families ------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _sizes(*without: str, **changes: object) -> dict[str, object]:
    return {key: value for key, value in {**SIZES, **changes}.items() if key not in without}


def _llama() -> hf.PreTrainedConfig:
    return hf.LlamaConfig(**_sizes())


def _mistral(window: int | None) -> hf.PreTrainedConfig:
    return hf.MistralConfig(**_sizes(sliding_window=window))


def _qwen2() -> hf.PreTrainedConfig:
    return hf.Qwen2Config(**_sizes())


def _qwen3() -> hf.PreTrainedConfig:
    return hf.Qwen3Config(**_sizes(head_dim=24))


def _qwen3_moe() -> hf.PreTrainedConfig:
    return hf.Qwen3MoeConfig(**_sizes(head_dim=16, num_experts=4, norm_topk_prob=True, **EXPERTS))


def _gemma2() -> hf.PreTrainedConfig:
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 12.0}  # near the values, so that they bend
    return hf.Gemma2Config(
        **_sizes(head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=MIXED_LAYERS, **caps)
    )


def _gemma3() -> hf.PreTrainedConfig:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1_000_000.0},
    }
    return hf.Gemma3TextConfig(
        **_sizes(
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            layer_types=MIXED_LAYERS,
            rope_parameters=rope,
        )
    )


def _phi3() -> hf.PreTrainedConfig:
    return hf.Phi3Config(**_sizes(original_max_position_embeddings=MAX_POSITIONS))


def _phi3_longrope() -> hf.PreTrainedConfig:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
    }
    return hf.Phi3Config(
        **_sizes(
            max_position_embeddings=4 * LONGROPE_SWITCH,
            original_max_position_embeddings=LONGROPE_SWITCH,
            rope_parameters=rope,
        )
    )


def _opt() -> hf.PreTrainedConfig:
    sizes = _sizes("intermediate_size", "num_key_value_heads", ffn_dim=128, word_embed_proj_dim=64)
    return hf.OPTConfig(**sizes)


def _gpt_neox() -> hf.PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return hf.GPTNeoXConfig(**_sizes("num_key_value_heads", rope_parameters=rope))


def _gpt2() -> hf.PreTrainedConfig:
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return hf.GPT2Config(
        vocab_size=VOCAB,
        n_positions=MAX_POSITIONS,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_inner=128,
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
        **ids,
    )


def _olmo2() -> hf.PreTrainedConfig:
    return hf.Olmo2Config(**_sizes())


def _granite() -> hf.PreTrainedConfig:
    scales = {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.25,
    }
    return hf.GraniteConfig(**_sizes(**scales))


def _starcoder2(window: int | None) -> hf.PreTrainedConfig:
    return hf.Starcoder2Config(**_sizes(sliding_window=window))


def _gpt_oss() -> hf.PreTrainedConfig:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 150_000.0, "original_max_position_embeddings": 128}
    return hf.GptOssConfig(
        **_sizes(
            "moe_intermediate_size",
            intermediate_size=48,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=MIXED_LAYERS,
            rope_parameters=rope,
        )
    )


def _deepseek_v3() -> hf.PreTrainedConfig:
    latent = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
    return hf.DeepseekV3Config(**_sizes(num_key_value_heads=4, **latent, **experts))


def _llama4(**changes: object) -> hf.PreTrainedConfig:
    return hf.Llama4TextConfig(
        **_sizes(
            num_hidden_layers=4,  # the fourth attends to everything, without RoPE; the others within a chunk
            head_dim=16,
            attention_chunk_size=WINDOW,
            intermediate_size=48,
            intermediate_size_mlp=128,
            num_local_experts=4,
            **{"attn_temperature_tuning": False, **changes},
        )
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", _llama, notes="grouped queries"),
        Family("mistral", functools.partial(_mistral, None), seed=3, notes="no window"),
        Family("mistral-window", functools.partial(_mistral, WINDOW), notes="a window in every layer"),
        Family("qwen2", _qwen2, notes="biases on queries, keys and values"),
        Family("qwen3", _qwen3, seed=1, notes="norms on queries and keys; heads wider than hidden / heads"),
        Family("qwen3-moe", _qwen3_moe, seed=2, notes="routed experts"),
        Family(
            "gemma2", _gemma2, seed=1, notes="soft caps on scores and logits; alternating window; eager attention only"
        ),
        Family("gemma3", _gemma3, notes="alternating window with its own RoPE"),
        Family("phi3", _phi3, notes="fused projections"),
        Family("phi3-longrope", _phi3_longrope, seed=1, notes=f"RoPE factors switch beyond {LONGROPE_SWITCH} tokens"),
        Family("opt", _opt, notes="learned positions with an offset; scaling inside the query; no grouped queries"),
        Family("gpt-neox", _gpt_neox, notes="parallel residual; RoPE on half of each head"),
        Family("gpt2", _gpt2, notes="learned positions; Conv1D; scores scaled by layer"),
        Family("olmo2", _olmo2, notes="norms after the blocks, and on whole queries and keys"),
        Family("granite", _granite, seed=1, notes="four multipliers"),
        Family("starcoder2", functools.partial(_starcoder2, None), seed=8, notes="LayerNorm and biases with RoPE"),
        Family("starcoder2-window", functools.partial(_starcoder2, WINDOW), notes="the same, a window in every layer"),
        Family("gpt-oss", _gpt_oss, notes="attention sinks; alternating window; routed experts; eager attention only"),
        Family("deepseek-v3", _deepseek_v3, notes="latent attention: keys 32 wide, values 24; shared expert"),
        Family("llama4", _llama4, notes="chunks in three layers of four, no RoPE in the fourth; routed experts"),
    )
}


# --- Not supported ---------------------------------------------------------------------------------------------------


def _unsupported(config: Callable[[], hf.PreTrainedConfig], auto: type = hf.AutoModelForCausalLM) -> hf.PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto.from_config(config(), dtype=torch.float32).eval()


def _falcon() -> hf.PreTrainedConfig:
    return hf.FalconConfig(**_sizes("intermediate_size", "num_key_value_heads"))


def _bloom() -> hf.PreTrainedConfig:
    sizes = _sizes("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return hf.BloomConfig(n_layer=3, n_head=4, **sizes)


def _mpt() -> hf.PreTrainedConfig:
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return hf.MptConfig(vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=3, max_seq_len=MAX_POSITIONS, **ids)


def _gptj() -> hf.PreTrainedConfig:
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return hf.GPTJConfig(
        vocab_size=VOCAB, n_positions=MAX_POSITIONS, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, **ids
    )


def _qwen3_next() -> hf.PreTrainedConfig:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return hf.Qwen3NextConfig(
        **_sizes(
            num_hidden_layers=4,  # the fourth has ordinary attention, the others a recurrent state
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=48,
            **linear,
            **EXPERTS,
        )
    )


def _llama4_tuned() -> hf.PreTrainedConfig:
    return _llama4(attn_temperature_tuning=True)


def _t5() -> hf.PreTrainedConfig:
    return hf.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=0,
    )


def _bart() -> hf.PreTrainedConfig:
    halves = {
        f"{half}_{size}": value
        for half in ("encoder", "decoder")
        for size, value in (("layers", 2), ("ffn_dim", 128), ("attention_heads", 4))
    }
    return hf.BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=2,
        **halves,
    )


# With default weights: what matters is how they are built, not what they say.
REFUSED: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "falcon": functools.partial(_unsupported, _falcon),
    "bloom": functools.partial(_unsupported, _bloom),
    "mpt": functools.partial(_unsupported, _mpt),
    "gptj": functools.partial(_unsupported, _gptj),
    "qwen3-next": functools.partial(_unsupported, _qwen3_next),
    "llama4-tuned": functools.partial(_unsupported, _llama4_tuned),
    "t5": functools.partial(_unsupported, _t5, hf.AutoModelForSeq2SeqLM),
    "bart": functools.partial(_unsupported, _bart, hf.AutoModelForSeq2SeqLM),
}
