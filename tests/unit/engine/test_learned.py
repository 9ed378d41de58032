"""Memory of earlier responses and corpora in the engine: what is learned, by whom it is used, that nothing changes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model

import families
from outpace.assets import BUILTIN_MODEL
from outpace.config import EngineConfig, SamplingParams
from outpace.draft import build_drafter
from outpace.draft.registry import drafters_with_sources, uses_sources
from outpace.draft.sam import SamDrafter
from outpace.draft.sources import Sources
from outpace.engine import Engine
from outpace.engine.learned import adapter_of, namespace_of
from outpace.errors import ConfigError, CorpusError, UnknownNameError
from outpace.suffix import memory as memory_module
from outpace.suffix.memory import ResponseMemory
from outpace.tree import Origin

PARAMS = SamplingParams(max_tokens=24)


def remembered(engine: Engine) -> dict[str, list[list[int]]]:
    assert engine.sources is not None
    assert engine.sources.memory is not None
    memory = engine.sources.memory
    memory.flush()
    return {name: [d.tolist() for s in memory.segments(name) for d in s.documents()] for name in memory.token_counts}


def test_finished_responses_are_remembered_under_their_namespace(tiny: Any) -> None:
    engine = tiny.engine("sam", memory=True)
    outputs = engine.generate(tiny.prompts[:2], PARAMS, namespace="mine")
    outputs += engine.generate(tiny.prompts[2], SamplingParams(max_tokens=1, speculate=False), namespace="other")
    assert [o.token_ids for o in outputs[:2]] == [tiny.plain(p, PARAMS).token_ids for p in tiny.prompts[:2]]
    found = remembered(engine)
    assert sorted(found["mine"]) == sorted(o.token_ids for o in outputs[:2])
    assert found["other"] == [outputs[2].token_ids]


def test_aborted_and_failed_requests_are_not_remembered(tiny: Any) -> None:
    engine = tiny.engine("sam", memory=True)
    stream = engine.stream(tiny.prompts[0], PARAMS)
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]

    def broken(_text: Any, _scores: Any) -> Any:
        raise ValueError("no")

    engine.generate(tiny.prompts[1], SamplingParams(max_tokens=9, processor=broken), errors="return")
    assert remembered(engine) == {}


@pytest.mark.parametrize("drafter", ["sam", "suffix-tree", "sam[recycling]", "merge[sam, lookup]"])
def test_what_one_namespace_said_never_drafts_for_another(tiny: Any, drafter: str) -> None:
    engine = tiny.engine(drafter, memory=True)
    proposed: list[tuple[str, Any]] = []
    names: dict[int, str] = {}
    opened, propose = engine.drafter.open, engine.drafter.propose

    def open_noting(key: int, tokens: Any, namespace: str = "") -> None:
        names[key] = namespace
        opened(key, tokens, namespace)

    def propose_noting(keys: Any, caps: Any) -> Any:
        trees = propose(keys, caps)
        proposed.extend((names[key], trees.tree(b)) for b, key in enumerate(keys))
        return trees

    engine.drafter.open, engine.drafter.propose = open_noting, propose_noting
    prompt = tiny.prompts[3]
    expected = tiny.plain(prompt, PARAMS).token_ids
    for namespace in ("mine", "other", "mine"):
        [output] = engine.generate(prompt, PARAMS, namespace=namespace)
        assert output.token_ids == expected
        engine.sources.memory.flush()
    from_memory = [(name, bool((tree.origins & Origin.MEMORY).any())) for name, tree in proposed]
    assert ("mine", True) in from_memory
    assert ("other", True) not in from_memory


def test_memory_speeds_the_second_time_up_and_survives_on_disk(tiny: Any, tmp_path: Path) -> None:
    prompt = tiny.prompts[4]
    first = tiny.engine("sam(l_bias=0)", memory=True)
    [before] = first.generate(prompt, PARAMS)
    first.save_memory(tmp_path / "memory")
    second = tiny.engine("sam(l_bias=0)", memory=True)
    second.load_memory(tmp_path / "memory")
    [after] = second.generate(prompt, PARAMS)
    assert after.token_ids == before.token_ids
    assert after.figures.steps < before.figures.steps
    with pytest.raises(ConfigError, match="keeps no memory"):
        tiny.engine("suffix").save_memory(tmp_path / "none")


def test_memory_that_fails_does_not_fail_requests(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "built", lambda _texts: 1 / 0)
    engine = tiny.engine("sam", memory=True)
    engine.sources.memory.background = False
    with caplog.at_level(logging.WARNING):
        [output] = engine.generate(tiny.prompts[0], PARAMS)
    assert output.token_ids == tiny.plain(tiny.prompts[0], PARAMS).token_ids
    problem = "memory of earlier responses: building failed with ZeroDivisionError"
    assert f"found that an earlier response was not built in: {problem}" in caplog.text
    engine.sources.memory.close()
    with caplog.at_level(logging.WARNING):
        request = SimpleNamespace(
            request_id="r", finish_reason="stop", sequence=SimpleNamespace(namespace="", output=[1])
        )
        engine._core._remember(request)
    assert "request r is not remembered: the memory of earlier responses is closed" in caplog.text


def test_engines_share_sources(tiny: Any) -> None:
    first = tiny.engine("sam", memory=True)
    second = tiny.engine("sam(l_bias=0)", sources=first.sources)
    first.generate(tiny.prompts[1], PARAMS)
    assert len(remembered(second)[""]) == 1
    own = Sources(ResponseMemory(background=False))
    third = tiny.engine(SamDrafter(sources=own), sources=own)
    third.generate(tiny.prompts[1], PARAMS)
    assert len(remembered(third)[""]) == 1


def test_drafters_that_use_neither_are_refused(tiny: Any) -> None:
    assert {"sam", "suffix-tree"} <= set(drafters_with_sources())
    assert uses_sources("merge[lookup, sam[recycling]]")
    assert not uses_sources("merge[lookup, suffix]")
    with pytest.raises(UnknownNameError, match="unknown drafter 'sma'"):
        uses_sources("sma")
    with pytest.raises(ConfigError, match=r"memory: drafter 'suffix' drafts from the request's own text alone.*sam, "):
        tiny.engine("suffix", memory=True)
    with pytest.raises(ConfigError, match="memory and corpora: drafter 'none'"):
        tiny.engine("none", memory=True, corpora=["x"])
    with pytest.raises(ConfigError, match="was built before the engine"):
        tiny.engine(build_drafter("sam"), memory=True)


def test_unusable_corpora(tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CorpusError, match="no corpus at"):
        tiny.engine("sam", corpora=[tmp_path / "nowhere"])
    with caplog.at_level(logging.WARNING):
        engine = tiny.engine("sam", corpora=str(tmp_path / "nowhere"), skip_unusable_corpora=True)
    assert "going on without a corpus: no corpus at" in caplog.text
    [output] = engine.generate(tiny.prompts[0], PARAMS)
    assert output.token_ids == tiny.plain(tiny.prompts[0], PARAMS).token_ids


def test_config() -> None:
    assert EngineConfig(corpora=[Path("a"), "b"]).corpora == ("a", "b")  # type: ignore[arg-type,list-item]
    with pytest.raises(ConfigError, match="corpora must be a list of folders"):
        EngineConfig(corpora=(3,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="memory_tokens must be an integer at least 1"):
        EngineConfig(memory_tokens=0)


def test_namespaces_are_apart_for_each_adapter() -> None:
    assert namespace_of("mine", "") == "mine"
    names = {namespace_of(n, a) for n in ("", "mine", "mine\x1fx", "\x1f") for a in ("", "x", "y")}
    assert len(names) == 12


def test_each_adapter_learns_for_itself(tiny: Any) -> None:
    base = families.build("llama", vocab_size=len(tiny.tokenizer), pad_token_id=0)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(base, lora, adapter_name="one").eval()
    model.add_adapter("two", lora)
    engine = Engine(model, drafter="sam", memory=True, kv_tokens=2048)
    params = SamplingParams(max_tokens=4)
    model.set_adapter("one")
    engine.generate(tiny.prompts[0], params, namespace="mine")
    model.set_adapter("two")
    engine.generate(tiny.prompts[0], params, namespace="mine")
    with model.disable_adapter():
        engine.generate(tiny.prompts[0], params, namespace="mine")
    assert list(remembered(engine)) == ["mine\x1fone", "mine\x1ftwo", "mine"]
    model.base_model.set_adapter(["one", "two"])
    assert adapter_of(engine.target.model, None) == "one, two"
    model.base_model.merge_adapter(["two"])
    assert adapter_of(engine.target.model, None) == "two"


def test_an_adapter_that_was_loaded_goes_by_its_folder() -> None:
    model: Any = get_peft_model(families.build("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    base = model.get_base_model()
    assert (adapter_of(base, None), adapter_of(base, "folder")) == ("default", "folder")
    with model.disable_adapter():
        assert adapter_of(base, "folder") == ""
    assert adapter_of(families.build("llama"), None) == ""


def test_ids_that_the_model_does_not_know_are_refused(tiny: Any, tmp_path: Path) -> None:
    known = tiny.model.config.vocab_size
    fits, large = ResponseMemory(background=False), ResponseMemory(background=False)
    fits.remember("", [5, known - 1])
    large.remember("", [5, 6])
    large.remember("other", [70_000, 7])
    fits.save(tmp_path / "fits")
    large.save(tmp_path / "large")
    engine = tiny.engine("sam", memory=True)
    with pytest.raises(CorpusError, match=rf"holds token id 70000, and the model knows {known} ids"):
        engine.load_memory(tmp_path / "large")
    assert remembered(engine) == {}
    engine.load_memory(tmp_path / "fits")
    assert remembered(engine) == {"": [[5, known - 1]]}
    with pytest.raises(CorpusError, match=r"the memory of earlier responses holds token id 70000"):
        tiny.engine("sam", sources=Sources(large))
    tiny.engine("sam", sources=Sources(fits))
    tiny.engine("sam", sources=Sources(ResponseMemory()))


def test_sources_besides_the_options_that_they_replace_are_refused(tiny: Any) -> None:
    for options in ({"memory": True}, {"corpora": ["x"]}):
        with pytest.raises(ConfigError, match="sources of another engine take their place"):
            tiny.engine("sam", sources=Sources(), **options)


def test_the_model_in_the_box_with_memory_is_lossless() -> None:
    prompts = ["def read_lines(path):", "12 * 7 =", "def read_lines(path):", "def write_lines(path):"]
    plain = Engine(BUILTIN_MODEL, drafter="none", dtype="float32")
    params = SamplingParams(max_tokens=40)
    expected = [output.token_ids for output in plain.generate(prompts, params)]
    engine = Engine(plain.target, plain.tokenizer, drafter="sam[recycling]", memory=True, guard=False)
    found = []
    for prompt in prompts:
        found += engine.generate(prompt, params)
        remembered(engine)
    assert [output.token_ids for output in found] == expected
    assert found[2].figures.mean_accepted_tokens > 1.5 * found[0].figures.mean_accepted_tokens
    assert np.mean([output.figures.mean_accepted_tokens for output in found]) > 1.5
