"""The tokenizer of `outpace-tiny`: byte-level BPE of 4,096 tokens, four of them special."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END_OF_TURN)

# Words with one leading sign or blank; single digits, so that arithmetic is done digit by digit; signs; line breaks;
# runs of blanks, so that an indentation is one token.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{% else %}" + USER + "{% endif %}"
    "{{ message['content'] | trim }}" + END_OF_TURN + "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def chat_text(question: str, answer: str) -> str:
    """One turn of conversation as the chat template writes it."""
    return f"{USER}{question.strip()}{END_OF_TURN}{ASSISTANT}{answer.strip()}{END_OF_TURN}"


def train_tokenizer(texts: Iterable[str], *, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer.

    Args:
        texts: Training documents.
        model_max_length: Context length in tokens, written into the tokenizer's settings.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that was saved in `folder`, without asking any network."""
    from transformers import PreTrainedTokenizerFast

    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return loaded


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one special token."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
