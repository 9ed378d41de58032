"""Checkpoint folders as users have them: sharded weights, a tokenizer with a chat template, a LoRA adapter.

Everything is written locally from a recipe of `families` and a byte-level BPE trained on the sentences below.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import families

PAD, EOS, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Other characters outside ASCII than these accents and this dash stay several tokens, each a broken piece of UTF-8.
SENTENCES = (
    "The lighthouse keeper wrote down the weather every morning before he lit the stove.",
    "Every morning the keeper counted the ships, and every evening he counted them again.",
    "A café in Zürich serves crème brûlée – the best one, the keeper said – until the evening.",
    "def count(ships):\n    total = 0\n    for ship in ships:\n        total += ship.masts\n    return total",
    "If the weather holds, the ships will return before the evening; if not, they will wait for the morning.",
    "Question: how many ships are there? Answer: there are 12 ships, and 7 of them have 3 masts each.",
)
MAX_SHARD_SIZE = "200KB"  # the tiny models have 0.5 to 1 MB


def train_tokenizer(vocab_size: int = 400) -> hf.PreTrainedTokenizerFast:
    """A byte-level BPE: any text survives encoding and decoding, and one character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=families.MAX_POSITIONS,
    )


def write_checkpoint(folder: Path, *, shards: bool = True, family: str = "llama") -> Path:
    """Writes a model of `family` with its tokenizer into `folder` and returns the folder.

    Args:
        folder: Is created where it does not exist.
        shards: Several safetensors files and an index, rather than one file.
        family: A name in `families.FAMILIES`.
    """
    tokenizer = train_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = families.build(family, vocab_size=len(tokenizer), **ids)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE if shards else "1GB")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, *, seed: int = 0) -> Path:
    """Writes a LoRA adapter for the checkpoint in `base` into `folder` and returns the folder.

    Both of its factors are random: PEFT's usual zero for one of them would leave the base model's output as it is.
    """
    from peft import LoraConfig, get_peft_model  # an optional dependency

    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        get_peft_model(model, lora).save_pretrained(folder)
    return folder
