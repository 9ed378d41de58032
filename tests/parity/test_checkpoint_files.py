"""The folders that `checkpoints` writes load through Transformers and PEFT, and say what the tests rely on."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import SENTENCES, write_adapter, write_checkpoint
from families import greedy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama")


def test_sharded_weights_have_an_index_that_names_every_file(checkpoint):
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    files = {path.name for path in checkpoint.glob("*.safetensors")}
    assert len(files) >= 3
    assert set(index["weight_map"].values()) == files


def test_shards_and_one_file_hold_the_same_model(checkpoint, tmp_path):
    whole = write_checkpoint(tmp_path / "whole", shards=False)
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    left, right = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (checkpoint, whole))
    assert left.keys() == right.keys()
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def test_configuration_tokenizer_and_generation_agree(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


@pytest.mark.parametrize("text", [*SENTENCES, "日本語 and 👩‍🚀\n\ttabs  two spaces ."])
def test_any_text_survives_the_tokenizer(checkpoint, text):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


def test_one_character_may_take_several_tokens(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("👩")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids[:3]) == "�"


def test_chat_template_marks_the_turns(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many ships?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>\nBe brief.<|end|>\n<|user|>\nHow many ships?<|end|>\n<|assistant|>\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "gpt-oss"])
def test_other_families(tmp_path, family):
    folder = write_checkpoint(tmp_path / family, family=family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer(SENTENCES[2])["input_ids"]) == SENTENCES[2]
    assert len(greedy(model, tokenizer(SENTENCES[0])["input_ids"], new_tokens=8)) <= 8


def test_an_adapter_changes_the_output(checkpoint, tmp_path):
    folder = write_adapter(tmp_path / "adapter", checkpoint)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = AutoTokenizer.from_pretrained(checkpoint)(SENTENCES[0])["input_ids"]
    before = greedy(base, prompt, new_tokens=16)
    adapted = PeftModel.from_pretrained(base, folder)
    assert greedy(adapted, prompt, new_tokens=16) != before
    with adapted.disable_adapter():
        assert greedy(adapted, prompt, new_tokens=16) == before
