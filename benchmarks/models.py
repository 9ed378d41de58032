"""The models that the benchmarks run: the one in the box, and random Llamas, in bfloat16."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.assets import builtin_folder

BUILTIN = "box"
_RANDOM = {
    "26M": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 4096, "intermediate_size": 1280},
    "100M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
             "vocab_size": 16000, "intermediate_size": 2048},
}  # fmt: skip
SHAPES = (BUILTIN, *_RANDOM)


def build(shape: str) -> LlamaForCausalLM:
    """The model in the box, or a random one, the same at every call."""
    if shape == BUILTIN:
        return LlamaForCausalLM.from_pretrained(builtin_folder(), dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        **_RANDOM[shape], max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()
