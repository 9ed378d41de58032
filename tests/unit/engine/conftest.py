"""One tiny model with a tokenizer, shared by the tests of the engine."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import transformers as hf

import families
from checkpoints import train_tokenizer
from outpace.config import SamplingParams
from outpace.draft import NoneDrafter, OracleDrafter
from outpace.engine import Engine, Output


@dataclass(frozen=True)
class Tiny:
    """A random Llama over a byte-level vocabulary; its text is mostly broken UTF-8."""

    model: hf.PreTrainedModel
    tokenizer: hf.PreTrainedTokenizerFast
    prompts: list[list[int]]

    def engine(self, drafter: Any = "none", **options: Any) -> Engine:
        options = {"guard": False, "debug": True, "kv_tokens": 2048, **options}
        return Engine(self.model, self.tokenizer, drafter=drafter, **options)

    def oracle(self, params: SamplingParams | None = None, accept: float = 0.9, **options: Any) -> OracleDrafter:
        """An oracle that knows what `params` give for each of the prompts (16 tokens more than they ask for)."""
        known = {
            tuple(p): self.plain(p, _longer(params or SamplingParams(max_tokens=64))).token_ids for p in self.prompts
        }
        return OracleDrafter(accept, known, vocab_size=self.model.config.vocab_size, **options)

    def plain(self, prompt: list[int], params: SamplingParams) -> Output:
        """The engine's own output, alone and without drafts; computed once."""
        known = (tuple(prompt), repr(params))
        if known not in _plain:
            if not _plain_engine:
                _plain_engine.append(Engine(self.model, self.tokenizer, drafter=NoneDrafter(), kv_tokens=1024))
            [_plain[known]] = _plain_engine[0].generate(prompt, params)
        return _plain[known]


_plain: dict[tuple[tuple[int, ...], str], Output] = {}
_plain_engine: list[Engine] = []


def _longer(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, max_tokens=(params.max_tokens or 0) + 16, stop=(), ignore_eos=True, n=1)


@functools.cache
def _tiny() -> Tiny:
    tokenizer = train_tokenizer()
    model = families.build("llama", vocab_size=len(tokenizer), pad_token_id=0)
    return Tiny(model, tokenizer, families.prompts(len(tokenizer), seed=3, lengths=(5, 9, 16, 24, 33)))


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return _tiny()
