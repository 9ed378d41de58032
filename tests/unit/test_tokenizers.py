from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from datafiles import data_path
from outpace.assets import BUILTIN_MODEL, builtin_folder
from outpace.errors import ConfigError, InputError
from outpace.tokenizers import TextTokenizer, fingerprint, load_encoder


@pytest.mark.data
def test_sentencepiece_file() -> None:
    pytest.importorskip("sentencepiece")
    encode = load_encoder(str(data_path("tokenizers", "llama.model")))
    assert encode("Hello world") == [15043, 3186]  # no special tokens


def test_tokenizer_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert load_encoder(str(tmp_path))("to be or to be") == [1, 2, 0, 1, 2]


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.model").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"cannot load tokenizer .*broken\.model"):
        load_encoder(str(tmp_path / "broken.model"))
    with pytest.raises(ConfigError, match="cannot load tokenizer"):
        load_encoder(str(tmp_path / "no-such-folder"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"pip install 'outpace\[sentencepiece\]'"):
        load_encoder(str(tmp_path / "broken.model"))


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"model": 5}', "\0"])
def test_a_broken_folder(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(builtin_folder(), folder)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"cannot load tokenizer '.*broken': ."):
        TextTokenizer.load(str(folder))


@pytest.fixture(scope="module")
def box() -> TextTokenizer:
    return TextTokenizer.load(BUILTIN_MODEL)


def test_the_model_in_the_box_by_name(box: TextTokenizer) -> None:
    ids = box.encode("def f(x):\n    return x")
    assert box.decode(ids) == "def f(x):\n    return x"
    assert box.encode_batch(["a b", "", "c"]) == [box.encode("a b"), [], box.encode("c")]
    assert box.encode_batch([]) == []
    assert (box.name, box.source, box.vocab_size) == (BUILTIN_MODEL, BUILTIN_MODEL, 4096)
    assert TextTokenizer.load(str(builtin_folder())).source == str(builtin_folder())


def test_long_texts_are_not_cut(box: TextTokenizer) -> None:
    assert len(box.encode("one two three " * 2000)) > 4000  # tokenizer_config.json names 1,024


def test_chats_are_rendered(box: TextTokenizer) -> None:
    told = box.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    assert told == "<|user|>Hi<|end|><|assistant|>Yes?<|end|>"
    assert box.has_chat_template
    other = TextTokenizer.load(BUILTIN_MODEL)
    loaded: Any = other._loaded
    loaded.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="refused the conversation: roles must alternate"):
        other.render([{"role": "user", "content": "Hi"}])


def test_fingerprint_is_what_its_docstring_says(box: TextTokenizer) -> None:
    loaded: Any = box._loaded
    pieces = sorted((token, piece) for piece, token in loaded.get_vocab().items())
    content = b"".join(
        token.to_bytes(8, "little") + len(piece.encode()).to_bytes(4, "little") + piece.encode()
        for token, piece in pieces
    )
    assert box.fingerprint == hashlib.sha256(content).hexdigest()
    assert fingerprint(box) == fingerprint(loaded) == box.fingerprint


def test_added_tokens_do_not_change_the_fingerprint(box: TextTokenizer) -> None:
    other = TextTokenizer.load(BUILTIN_MODEL)
    loaded: Any = other._loaded
    loaded.add_tokens(["<|more|>"])
    assert fingerprint(loaded) == box.fingerprint
    assert other.vocab_size == 4097


def test_fingerprint_of_something_else() -> None:
    with pytest.raises(ConfigError, match="found dict"):
        fingerprint({})


@pytest.mark.data
def test_one_fingerprint_whichever_library(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    from transformers import LlamaTokenizer

    llama, mistral = (str(data_path("tokenizers", f"{name}.model")) for name in ("llama", "mistral-v1"))
    shutil.copy(llama, tmp_path / "tokenizer.model")
    theirs = LlamaTokenizer.from_pretrained(str(tmp_path))
    assert fingerprint(theirs) == TextTokenizer.load(llama).fingerprint
    assert TextTokenizer.load(mistral).fingerprint != TextTokenizer.load(llama).fingerprint
    assert TextTokenizer.load(llama).encode_batch(["Hello world", ""]) == [[15043, 3186], []]
    with pytest.raises(ConfigError, match="no chat template"):
        TextTokenizer.load(llama).render([{"role": "user", "content": "x"}])
