"""Tokenizers by name, whichever library reads them, and a fingerprint that tells whether two of them are the same.

The heavy libraries are imported where they are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from pathlib import Path
from typing import Any

from outpace.assets import builtin_folder, is_builtin
from outpace.errors import ConfigError, InputError

Encode = Callable[[str], list[int]]

_SENTENCEPIECE = ".model"


class TextTokenizer:
    """Text to token ids and back, without special tokens being added.

    Use `TextTokenizer.load`.

    Args:
        name: As it was given.
        loaded: A SentencePieceProcessor, or a tokenizer of Transformers.

    Attributes:
        name: As above.
        source: Where it was read: an absolute path, or the hub id.
    """

    def __init__(self, name: str, loaded: Any) -> None:
        self.name = name
        path = Path(name).expanduser()
        self.source = name if is_builtin(name) or not path.exists() else str(path.resolve())
        self._loaded = loaded
        self._is_sentencepiece = _is_sentencepiece(loaded)
        self._backend = None if self._is_sentencepiece else getattr(loaded, "backend_tokenizer", None)

    @classmethod
    def load(cls, name: str) -> TextTokenizer:
        """Load a tokenizer.

        Args:
            name: A SentencePiece file (.model), a folder or hub id for Transformers, or ``"outpace-tiny"``.

        Raises:
            ConfigError: It cannot be loaded.
        """
        loader = _load_sentencepiece if name.endswith(_SENTENCEPIECE) else _load_transformers
        tokenizer = cls(name, loader(name))
        if tokenizer._backend is not None:  # what tokenizer.json may ask for, and `encode_batch` would do
            tokenizer._backend.no_truncation()
            tokenizer._backend.no_padding()
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """Every id is below it, those of added tokens too."""
        if self._is_sentencepiece:
            return int(self._loaded.get_piece_size())
        return max(self._loaded.get_vocab().values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """See `fingerprint`."""
        return fingerprint(self._loaded)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can work."""
        return getattr(self._loaded, "chat_template", None) is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: SequenceOf[str]) -> list[list[int]]:
        """Token ids of each of several texts; on several threads where the library has them."""
        listed = list(texts)
        if not listed:
            return []
        if self._is_sentencepiece:
            return [list(ids) for ids in self._loaded.encode(listed)]
        if self._backend is not None:
            return [encoded.ids for encoded in self._backend.encode_batch_fast(listed, add_special_tokens=False)]
        return [list(ids) for ids in self._loaded(listed, add_special_tokens=False, verbose=False)["input_ids"]]

    def decode(self, ids: SequenceOf[int]) -> str:
        """Text of token ids, special tokens included."""
        listed = [int(token) for token in ids]
        if self._is_sentencepiece:
            return str(self._loaded.decode(listed))
        return str(self._loaded.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render(self, messages: SequenceOf[Mapping[str, Any]]) -> str:
        """A conversation as the chat template writes it, without the beginning of a further answer.

        Raises:
            ConfigError: There is no chat template.
            InputError: The template refuses the conversation.
        """
        if not self.has_chat_template:
            raise ConfigError(f"tokenizer {self.name!r} has no chat template; leave out --chat")
        try:
            return str(self._loaded.apply_chat_template([dict(message) for message in messages], tokenize=False))
        except Exception as error:  # templates raise whatever their authors chose
            raise InputError(f"the chat template refused the conversation: {_first_line(error)}") from error


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's base vocabulary, as 64 hexadecimal digits.

    Hashed are the pairs of id and piece in the order of ids, each as the id (8 bytes, little-endian), the length of the
    piece in UTF-8 (4 bytes) and the piece. The base vocabulary is what the tokenizer's own model knows: a SentencePiece
    file and the same vocabulary in Transformers give the same fingerprint. Tokens that Transformers adds on top of it
    (``<pad>``, the marks of a chat format, a checkpoint's own) are left out: they change no id of ordinary text, and a
    model and its tuned versions differ by nothing else. Whether a corpus holds ids that a model has no row for is a
    question of its own, answered by the largest id in the manifest (`outpace.suffix.corpus.Corpus.open`).

    Args:
        tokenizer: A `TextTokenizer`, a tokenizer of Transformers, or a SentencePieceProcessor.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.fingerprint
    hashed = hashlib.sha256()
    for token, piece in sorted(_base_vocabulary(tokenizer)):
        content = piece.encode("utf-8", "surrogatepass")
        hashed.update(token.to_bytes(8, "little") + len(content).to_bytes(4, "little") + content)
    return hashed.hexdigest()


def load_encoder(tokenizer: str) -> Encode:
    """The function that turns text into token ids, without special tokens.

    Args:
        tokenizer: As `TextTokenizer.load` takes it.

    Raises:
        ConfigError: It cannot be loaded.
    """
    return TextTokenizer.load(tokenizer).encode


def _base_vocabulary(tokenizer: Any) -> list[tuple[int, str]]:
    if _is_sentencepiece(tokenizer):
        return [(token, tokenizer.id_to_piece(token)) for token in range(tokenizer.get_piece_size())]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return [(token, piece) for piece, token in backend.get_vocab(with_added_tokens=False).items()]
    if not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"expected a tokenizer of Transformers or SentencePiece, found {type(tokenizer).__name__}")
    size = int(tokenizer.vocab_size)  # Transformers' word for the base vocabulary alone
    return [(token, piece) for piece, token in tokenizer.get_vocab().items() if token < size]


def _is_sentencepiece(loaded: Any) -> bool:
    return hasattr(loaded, "id_to_piece") and hasattr(loaded, "get_piece_size")


def _load_transformers(name: str) -> Any:
    from transformers import AutoTokenizer

    place = str(builtin_folder()) if is_builtin(name) else name
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # a broken file makes the libraries raise whatever they come across
        raise ConfigError(f"cannot load tokenizer {name!r}: {_first_line(error)}") from error


def _load_sentencepiece(path: str) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            f"tokenizer {path!r} is a SentencePiece file: pip install 'outpace[sentencepiece]', or name a folder or "
            "hub id for Transformers"
        ) from error
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except Exception as error:  # as above
        raise ConfigError(f"cannot load tokenizer {path!r}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
