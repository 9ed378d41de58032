"""What the probe lets through, what it refuses and why, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers.models.llama import modeling_llama as llama

from families import FAMILIES, REFUSED, VOCAB, WINDOW, build, greedy, prompts, reference
from outpace import Engine, SamplingParams
from outpace.errors import ConfigError, LifecycleError, ModelError, UnknownNameError, UnsupportedModelError
from outpace.model import MaskSpec, probe
from outpace.model.cpu_backend import CpuBackend
from outpace.model.torch_backend import TorchBackend

FULL = MaskSpec("full")
WINDOWED = MaskSpec("window", WINDOW)
CHUNKED = MaskSpec("chunk", WINDOW)
PATTERNS = {
    "mistral-window": [WINDOWED] * 3,
    "starcoder2-window": [WINDOWED] * 3,
    "gemma2": [WINDOWED, FULL, WINDOWED],
    "gemma3": [WINDOWED, FULL, WINDOWED],
    "gpt-oss": [WINDOWED, FULL, WINDOWED],
    "llama4": [CHUNKED, CHUNKED, CHUNKED, FULL],
}
SHORT = SamplingParams(max_tokens=8)


# --- Passing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str) -> None:
    model = reference(family).model
    target = probe(model)
    assert target.model is model
    assert target.probe_difference < 5e-5
    assert target.masks == PATTERNS.get(family, [FULL] * 3)
    assert len(target.layers) == len(target.layer_of) == len(target.masks) == model.config.num_hidden_layers
    assert target.vocab_size == VOCAB
    assert target.context_length == model.config.max_position_embeddings
    heads = target.layers[0]
    assert (heads.key_dim != heads.value_dim) == (family == "deepseek-v3")
    assert heads.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in ("llama", "gemma2", "gpt-oss", "deepseek-v3")),
        *((family, torch.float64) for family in ("llama", "gemma2", "gpt2")),  # experts have no float64 in torch
    ],
)
def test_other_dtypes_pass(family: str, dtype: torch.dtype) -> None:
    target = probe(build(family).to(dtype))
    assert {layer.dtype for layer in target.layers} == {dtype}


def test_a_context_of_the_callers_own() -> None:
    assert probe(reference("llama").model, context_length=77).context_length == 77


# --- Refusing --------------------------------------------------------------------------------------------------------

REASONS = {
    "falcon": "FalconForCausalLM does not use Transformers' attention interface",
    "bloom": "BloomForCausalLM does not use Transformers' attention interface",
    "mpt": "MptForCausalLM does not use Transformers' attention interface",
    "gptj": "GPTJForCausalLM does not use Transformers' attention interface",
    "qwen3-next": "Qwen3NextForCausalLM keeps a recurrent state",
    "llama4-tuned": r"Llama4ForCausalLM scales queries by .* attn_temperature_tuning=False .* \(8192 tokens\)",
    "t5": "T5ForConditionalGeneration is an encoder-decoder",
    "bart": "BartForConditionalGeneration is an encoder-decoder",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REASONS[name]):
        probe(REFUSED[name]())


def test_an_encoder_is_refused() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = hf.BertLMHeadModel(hf.BertConfig(num_attention_heads=4, **sizes)).eval()
    with pytest.raises(UnsupportedModelError, match=r"BertLMHeadModel.*neither causal"):
        probe(model)


def test_no_head() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-modelling head"):
        probe(build("llama").model)


def test_no_transformers_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"expected a Transformers model \(PreTrainedModel\), found Linear"):
        probe(nn.Linear(2, 2))


def test_training_mode() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is in training mode.*model\.eval\(\)"):
        probe(build("llama").train())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = value
    with pytest.raises(ModelError, match="NaN or infinite; are the weights loaded"):
        probe(model)


def test_virtual_tokens() -> None:
    wrapped = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(UnsupportedModelError, match=r"PROMPT_TUNING adds virtual tokens"):
        probe(wrapped)


def test_an_unknown_backend() -> None:
    with pytest.raises(UnknownNameError, match="unknown attention backend 'touch'; did you mean 'torch'"):
        probe(reference("llama").model, backend="touch")


def test_a_backend_that_cannot_run_a_model() -> None:
    model = build("llama").to(torch.float16)
    with pytest.raises(ConfigError, match=r"layer 0 is on cpu in float16 .* Use 'auto' or 'torch'"):
        probe(model, backend="cpu")
    assert isinstance(probe(model, backend="auto")._backend, TorchBackend)
    assert isinstance(probe(reference("llama").model, backend="auto")._backend, CpuBackend)
    assert isinstance(probe(reference("llama").model, backend="cpu")._backend, CpuBackend)
    assert isinstance(probe(reference("llama").model, backend="torch")._backend, TorchBackend)


def test_our_attention_selected_by_hand_says_so() -> None:
    probe(reference("llama").model)  # registers the name
    model = build("llama")
    model.set_attn_implementation("outpace")
    with pytest.raises(LifecycleError, match=r"only works inside outpace\.Engine"):
        model(torch.tensor([[1, 2, 3]]))


# --- Silent failures ---------------------------------------------------------------------------------------------------
# Models that run without complaint and are wrong in a packed pass, each by one change to a Llama.


def _layer_forward(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Make ``change(attention, hidden_states, options)`` stand in front of the attention of the middle layer."""

    def spoil(model: Any) -> None:
        attention = model.model.layers[1].self_attn
        own = attention.forward

        def forward(hidden_states: torch.Tensor, **options: Any) -> Any:
            hidden_states, options = change(attention, hidden_states, options)
            return own(hidden_states=hidden_states, **options)

        attention.forward = forward

    return spoil


def _arange(hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden_states.shape[1])[None]


def _ignores_positions(model: Any) -> None:
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: own(x, _arange(x))


def _adds_learned_positions_by_row(model: Any) -> None:
    table = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    own = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden_states, *a, **k: own(
        hidden_states + table[: hidden_states.shape[1]], *a, **k
    )


def _mixes_neighbours(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    """A token shift, as some linear attentions have."""
    shifted = torch.cat([hidden_states[:, :1], hidden_states[:, :-1]], dim=1)
    return (hidden_states + shifted) / 2, options


def _scales_by_row(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    return hidden_states * (1 + 0.1 * _arange(hidden_states)[..., None]), options


def _looks_at_the_whole_row(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    return hidden_states - hidden_states.cumsum(1) / 50, options


def _drops_our_arguments(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    return hidden_states, {k: v for k, v in options.items() if k != "outpace_step"}


def _passes_no_mask(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    return hidden_states, {**options, "attention_mask": None}


def _makes_its_own_mask(attention: Any, hidden_states: torch.Tensor, options: Any) -> Any:
    length = hidden_states.shape[1]
    return hidden_states, {**options, "attention_mask": torch.full((1, 1, length, length), -1e9).triu(1)}


def _says_it_is_not_causal(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


def _skips_our_function(model: Any) -> None:
    def forward(hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states.cumsum(1), None

    model.model.layers[1].self_attn.forward = forward


def _ignores_the_mask_and_our_function(model: Any) -> None:
    """Eager attention of its own over the whole row, whatever was asked for."""
    attention = model.model.layers[1].self_attn

    def forward(hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2)), None

    attention.forward = forward


def _asks_twice(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(**options: Any) -> Any:
        first, weights = own(**options)
        return first + own(**options)[0], weights

    attention.forward = forward


def _shares_a_layer(model: Any) -> None:
    model.model.layers[2] = model.model.layers[0]


def _ignores_logits_to_keep(model: Any) -> None:
    own = model.forward
    model.forward = lambda *a, logits_to_keep=0, **k: own(*a, **k)


def _fails_on_a_mask_of_four_dimensions(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            raise TypeError("a mask of two dimensions, please")
        return own(*args, attention_mask=attention_mask, **options)

    model.forward = forward


SILENT: dict[str, tuple[Callable[[Any], None], str]] = {
    "ignores positions": (_ignores_positions, "they differ by"),
    "learned positions by row": (_adds_learned_positions_by_row, "they differ by"),
    "token shift": (_layer_forward(_mixes_neighbours), "they differ by"),
    "scaled by row": (_layer_forward(_scales_by_row), "they differ by"),
    "running mean": (_layer_forward(_looks_at_the_whole_row), "they differ by"),
    "ignores logits_to_keep": (_ignores_logits_to_keep, "they differ by"),
    "drops arguments": (_layer_forward(_drops_our_arguments), "does not hand keyword arguments on"),
    "no mask": (_layer_forward(_passes_no_mask), "attention layer 1: .* found no mask at all"),
    "own mask": (_layer_forward(_makes_its_own_mask), "attention layer 1: .* found a Tensor of its own"),
    "not causal": (_says_it_is_not_causal, "attention layer 1 is not causal"),
    "no attention": (_skips_our_function, "each of 3 layers to call .* once, found 2 calls from 2 modules"),
    "own attention": (_ignores_the_mask_and_our_function, "each of 3 layers .* found 2 calls from 2 modules"),
    "asks twice": (_asks_twice, "each of 3 layers .* found 4 calls from 3 modules"),
    "shared layer": (_shares_a_layer, "each of 3 layers .* found 3 calls from 2 modules"),
    "mask of two dimensions": (_fails_on_a_mask_of_four_dimensions, "a packed pass failed: a mask of two dimensions"),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_model_that_would_be_wrong_is_refused(name: str) -> None:
    spoil, reason = SILENT[name]
    model = build("llama")
    spoil(model)
    model(torch.tensor([[1, 2, 3]]))  # alone it runs
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM.*{reason}"):
        probe(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_window_that_is_not_applied_is_seen() -> None:
    """Windows are shrunk below the probe's texts: unshrunk, 13 tokens would not reach a window of 24."""
    model = build("mistral-window")
    own = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda **k: own(
        **{**k, "attention_mask": _unwindowed(k["attention_mask"])}
    )
    with pytest.raises(UnsupportedModelError, match="they differ by"):
        probe(model)


def _unwindowed(mask: Any) -> Any:
    """What a layer that forgets its window makes of its mask; in ours nothing changes."""
    if not isinstance(mask, torch.Tensor) or mask.shape[-1] == 1:
        return mask
    return torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)


# --- Leaving no trace ------------------------------------------------------------------------------------------------


class State:
    """Everything of a model that somebody could change."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: set(vars(module)) for name, module in model.named_modules()}
        self.hooks = {name: self._hooks(module) for name, module in model.named_modules()}
        self.training = {name: module.training for name, module in model.named_modules()}
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        self.configs = [copy.deepcopy(vars(config)) for config in self._configs(model)]
        self.generation = copy.deepcopy(vars(model.generation_config))

    @staticmethod
    def _hooks(module: nn.Module) -> list[int]:
        return [len(value) for name, value in vars(module).items() if name.endswith("_hooks") and value is not None]

    @staticmethod
    def _configs(model: nn.Module) -> Iterator[hf.PreTrainedConfig]:
        seen: set[int] = set()
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, hf.PreTrainedConfig) and id(config) not in seen:
                seen.add(id(config))
                yield config

    def assert_same(self, other: State) -> None:
        for name in ("modules", "hooks", "training", "configs", "generation"):
            assert getattr(self, name) == getattr(other, name), name
        for name in ("weights", "buffers"):
            before, after = getattr(self, name), getattr(other, name)
            assert before.keys() == after.keys()
            for key, tensor in before.items():
                assert torch.equal(tensor, after[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_used_model_is_as_it_was_found(family: str) -> None:
    model, texts, continuations = reference(family)
    greedy(model, texts[1], 8)  # longrope keeps what its last pass was rotated by
    before = State(model)
    implementation = model.config._attn_implementation
    outputs = Engine(model).generate(texts[:2], SHORT)
    before.assert_same(State(model))
    assert [output.token_ids for output in outputs] == [tokens[:8] for tokens in continuations[:2]]
    assert model.config._attn_implementation == implementation
    assert greedy(model, texts[1], 8) == continuations[1][:8]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_that_the_caller_chose_stays(implementation: str) -> None:
    model = build("llama")
    model.set_attn_implementation(implementation)
    Engine(model).generate([[1, 2, 3]], SHORT)
    assert model.config._attn_implementation == implementation
    assert build("llama").config._attn_implementation == "sdpa"


def test_parts_with_configs_of_their_own_keep_them() -> None:
    """A vision-language model's text half is what generates; its configs are nested."""
    text = FAMILIES["gemma3"].config()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    before = State(model)
    chosen = (config.text_config._attn_implementation, config.vision_config._attn_implementation)
    try:
        Engine(model).generate([[5, 6, 7]], SHORT)
    except UnsupportedModelError as error:
        assert "Gemma3ForConditionalGeneration" in str(error)  # noqa: PT017 - either is right; leaving a trace is not
    before.assert_same(State(model))
    assert (model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation) == chosen


@pytest.mark.parametrize("pass_number", [0, 1, 2, 4])
def test_an_exception_in_the_probe_leaves_no_trace(pass_number: int) -> None:
    """Passes: two of discovery, one alone for each text, then packed ones."""
    model = build("gemma3")
    before = State(model)
    passes = 0

    def fail(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes > pass_number:
            raise ValueError("the machine is on fire")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match=r"Gemma3ForCausalLM: .* failed: the machine is on fire"):
        probe(model)
    handle.remove()
    before.assert_same(State(model))
    probe(model)


def test_an_exception_in_a_pass_leaves_no_trace() -> None:
    model, texts, continuations = reference("gemma2")
    before = State(model)
    engine = Engine(model)

    def fail(*_: object) -> None:
        raise ValueError("the machine is on fire")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ModelError, match=r"failed in a pass over .* with ValueError: the machine is on fire"):
        engine.generate(texts[:2], SHORT)
    handle.remove()
    before.assert_same(State(model))
    assert greedy(model, texts[0], 8) == continuations[0][:8]


def test_captured_modules_keep_no_hook() -> None:
    model = reference("llama").model
    target = probe(model)
    before = State(model)
    with pytest.raises(UnknownNameError, match=r"unknown module of the model 'model\.layers\.7'"):
        run_once(target, ["model.layers.0", "model.layers.7"])
    before.assert_same(State(model))
    _, hidden = run_once(target, ["model.layers.0", "model.norm"])
    assert {name: states.shape for name, states in hidden.items()} == {"model.layers.0": (3, 64), "model.norm": (3, 64)}
    before.assert_same(State(model))


def run_once(target: Any, capture: list[str]) -> Any:
    import numpy as np

    from outpace.model import KVArena, pack
    from outpace.tree import DraftTrees

    arena = KVArena(target.layers, max_rows=8)
    arena.open(0)
    arena.prepare(0, 3)
    plan = pack([np.array([1, 2, 3], np.int32)], [0], DraftTrees.empty(1), [[]], [arena.write_start(0)], [True])
    return target.run(plan, arena, capture)


# --- Adapters --------------------------------------------------------------------------------------------------------


def test_an_adapter_generates_what_it_generates() -> None:
    text = prompts(VOCAB, seed=1, lengths=(20,))[0]
    base = build("llama")
    plain = greedy(base, text, 24)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
        )
        adapted = get_peft_model(base, lora).eval()
    wanted = greedy(adapted, text, 24)
    assert wanted != plain
    before = State(adapted)
    engine = Engine(adapted)
    params = SamplingParams(max_tokens=24)
    assert engine.generate([text], params)[0].token_ids == wanted
    before.assert_same(State(adapted))
    with adapted.disable_adapter():
        assert engine.generate([text], params)[0].token_ids == plain


def test_the_context_may_only_be_shortened() -> None:
    model = build("gpt2")
    own = model.config.max_position_embeddings
    assert probe(model, context_length=own - 1).context_length == own - 1
    with pytest.raises(ConfigError, match=f"may only shorten what GPT2LMHeadModel has, {own} tokens; found {own + 1}"):
        probe(model, context_length=own + 1)
