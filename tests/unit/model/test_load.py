"""Checkpoints as they come: whole, broken, misspelt. The weights are tiny and written here."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import outpace.assets
from checkpoints import SENTENCES, write_adapter, write_checkpoint
from families import greedy
from outpace import Engine, SamplingParams
from outpace.errors import CheckpointError, ConfigError, UnknownNameError, UnsupportedModelError
from outpace.model import LoadOptions, load_model, load_tokenizer

CPU = LoadOptions(device="cpu")
INDEX = "model.safetensors.index.json"
TEXT = torch.tensor([[7, 30, 21, 9]])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("load") / "llama")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(pristine, tmp_path / "llama-tiny")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TEXT).logits


def without(folder: Path, name: str) -> None:
    """Remove one weight from the shard that holds it."""
    index = json.loads((folder / INDEX).read_text())
    shard = folder / index["weight_map"].pop(name)
    weights = load_file(shard)
    del weights[name]
    save_file(weights, shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


# --- What loads ------------------------------------------------------------------------------------------------------


def test_shards_and_one_file_are_the_same_model(pristine: Path, tmp_path: Path) -> None:
    sharded = load_model(pristine, CPU)
    whole = load_model(str(write_checkpoint(tmp_path / "whole", shards=False)), CPU)
    expected = hf.AutoModelForCausalLM.from_pretrained(pristine).eval()
    for model in (sharded, whole):
        assert not model.training
        assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    ("given", "saved", "found"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
    ],
)
def test_dtypes(pristine: Path, tmp_path: Path, given: Any, saved: torch.dtype, found: torch.dtype) -> None:
    folder = tmp_path / "saved"
    hf.AutoModelForCausalLM.from_pretrained(pristine, dtype=saved).save_pretrained(folder)
    model = load_model(folder, LoadOptions(dtype=given, device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {found}


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_a_device_map_gives_the_same_tokens(pristine: Path, device_map: Any) -> None:
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("the GPU rounds differently")
    options = SamplingParams(max_tokens=12)
    plain = Engine(pristine, device="cpu").generate(SENTENCES[:2], options)
    mapped = Engine(pristine, device_map=device_map).generate(SENTENCES[:2], options)
    assert [output.token_ids for output in mapped] == [output.token_ids for output in plain]
    assert [output.text for output in mapped] == [output.text for output in plain]


def test_an_adapter_is_put_on(pristine: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", pristine)
    prompt = load_tokenizer(pristine)(SENTENCES[0])["input_ids"]
    options = SamplingParams(max_tokens=16, ignore_eos=True)
    plain, adapted = (
        Engine(pristine, device="cpu", adapter=name).generate([prompt], options)[0].token_ids
        for name in (None, str(adapter))
    )
    model = load_model(pristine, LoadOptions(device="cpu", adapter=str(adapter)))
    assert not model.training
    model.generation_config.eos_token_id = None
    assert adapted == greedy(model, prompt, 16)
    assert adapted != plain


def test_files_that_transformers_does_not_read_may_be_missing(folder: Path) -> None:
    """Repositories that hold the weights twice: one downloads the safetensors, and the other index comes along."""
    weights = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(weights))
    (folder / "openvino_model.index.json").write_text("[]")
    load_model(folder, CPU)


def test_one_file_is_read_before_an_old_index(pristine: Path, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", shards=False)
    shutil.copy(pristine / INDEX, whole / INDEX)
    load_model(whole, CPU)


# --- What does not ---------------------------------------------------------------------------------------------------


def refused(name: Any, message: str, options: LoadOptions = CPU) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(name, options)


def test_a_missing_shard(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("model-*.safetensors"))
    (folder / names[1]).unlink()
    refused(folder, rf"lacks 1 of {len(names)} weight files named in {INDEX}: {names[1]}; download")


def test_weights_that_no_shard_holds(folder: Path) -> None:
    without(folder, "model.layers.1.mlp.up_proj.weight")
    refused(folder, r"lacks weights that the model needs: model\.layers\.1\.mlp\.up_proj\.weight$")


def test_no_head_in_the_checkpoint(pristine: Path, tmp_path: Path) -> None:
    hf.AutoModelForCausalLM.from_pretrained(pristine).model.save_pretrained(tmp_path / "headless")
    refused(tmp_path / "headless", r"lacks weights that the model needs: lm_head\.weight")


def test_weights_of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    refused(folder, "cannot load .*llama-tiny")


def test_a_shard_cut_short(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:1000])
    refused(folder, "cannot load .*llama-tiny")


def test_no_weights_at_all(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    refused(folder, "cannot load .*llama-tiny")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "{}", '{"weight_map": []}', '{"weight_map": null}', b"\xff\xfe"],
)
def test_a_broken_index(folder: Path, content: str | bytes) -> None:
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(folder, f"{INDEX} is not a weight index")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"llama-tiny' has no config\.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no-such-model"}'])
def test_a_broken_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refused(folder, "cannot read the configuration of .*llama-tiny")


def test_a_file_is_no_folder(folder: Path) -> None:
    refused(folder / "config.json", "is a file; expected a folder with config.json")


def test_a_misspelt_folder(folder: Path) -> None:
    refused(folder.parent / "lama-tiny", "no folder .*lama-tiny'; checkpoints beside it: llama-tiny$")
    refused(folder.parent / "no" / "such", "no folder .*such'; .*no' does not exist either")
    (folder.parent / "empty").mkdir()
    refused(folder.parent / "empty" / "model", "holds no checkpoints")


def test_a_hub_id_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it read the environment long ago
    name = "outpace-tests/no-such-model"
    refused(
        name, f"cannot read the configuration of '{name}': no folder of that name here, and the hub said: OSError: "
    )


def test_a_bare_name_asks_the_hub_and_shows_folders_with_close_names(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-llama").symlink_to(pristine)
    (tmp_path / "my-lama2").mkdir()  # holds no checkpoint
    said = "no folder of that name here, and the hub said: OSError: "
    refused("my-lama", rf"configuration of 'my-lama': {said}.*; checkpoints here with a name like it: my-llama$")
    refused("someone/my-lama", "with a name like it: my-llama$")
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model("nope", CPU)
    assert "checkpoints here" not in str(caught.value)


def test_an_encoder_decoder(tmp_path: Path) -> None:
    hf.T5Config(d_model=16).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"t5' is an encoder-decoder \(t5\)"):
        load_model(tmp_path / "t5", CPU)


def test_no_causal_model(tmp_path: Path) -> None:
    hf.ViTConfig().save_pretrained(tmp_path / "vit")
    refused(tmp_path / "vit", "cannot load .*vit")


def test_an_adapter_that_is_not_there(pristine: Path, tmp_path: Path) -> None:
    options = LoadOptions(device="cpu", adapter=str(tmp_path / "nothing"))
    refused(pristine, "cannot load the adapter .*nothing", options)


def test_no_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot load a tokenizer from .*llama-tiny"):
        load_tokenizer(folder)
    engine = Engine(folder, device="cpu")
    assert engine.tokenizer is None
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


# --- Options ---------------------------------------------------------------------------------------------------------


def test_options_that_cannot_be() -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        LoadOptions(dtype="bfloat61")
    for dtype in (5, None, torch.int8):
        with pytest.raises(ConfigError, match=f"dtype must be .*, found {dtype}"):
            LoadOptions(dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="either device or device_map, not both"):
        LoadOptions(device="cpu", device_map="auto")
    with pytest.raises(ConfigError, match=r"device must be .*, found 'gpu'"):
        LoadOptions(device="gpu")


def test_a_device_that_is_not_there(pristine: Path) -> None:
    refused(pristine, r"cannot move .*llama' to cuda:99", LoadOptions(device="cuda:99"))


def test_a_model_that_refuses_to_move(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def to(*_: object) -> None:
        raise ValueError("`.to` is not supported for this model")

    monkeypatch.setattr(hf.LlamaForCausalLM, "to", to)
    refused(pristine, r"cannot move .*llama' to cpu: ValueError: `\.to` is not supported")


# --- Quantisation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Transformers is asked for; quantised models as they are without the packages and the GPU that make them."""
    asked: dict[str, Any] = {}

    def from_pretrained(path: str, config: hf.PretrainedConfig, **arguments: Any) -> Any:
        asked.update(arguments)
        return Fixed(), {"missing_keys": set()}

    monkeypatch.setattr("outpace.model.load.AutoModelForCausalLM.from_pretrained", from_pretrained)
    return asked


class Fixed(torch.nn.Module):
    def to(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("moved a quantised model")


@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:1"])
def test_quantised_weights_are_loaded_where_they_shall_be(
    folder: Path, loaded_with: dict[str, Any], in_checkpoint: bool, device: str
) -> None:
    quantisation = {"quant_method": "fp8"}
    if in_checkpoint:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    load_model(folder, LoadOptions(device=device, quantization_config=None if in_checkpoint else quantisation))
    assert loaded_with["device_map"] == str(LoadOptions(device=device).torch_device())
    assert loaded_with.get("quantization_config") == (None if in_checkpoint else quantisation)


def test_a_device_map_places_quantised_weights(folder: Path, loaded_with: dict[str, Any]) -> None:
    load_model(folder, LoadOptions(device_map="auto", quantization_config={"quant_method": "fp8"}))
    assert loaded_with["device_map"] == "auto"


# --- Code that comes with a checkpoint ---------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({witness!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
"""


@pytest.mark.parametrize("model_type", ["llama", "llama-with-code"])
def test_code_does_not_run(folder: Path, tmp_path: Path, model_type: str) -> None:
    """With a model type that Transformers knows, its own class is used; with another, there is an error."""
    witness = tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(witness=str(witness)))
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": auto_map}))
    if model_type == "llama":
        assert type(load_model(folder, CPU)) is hf.LlamaForCausalLM
    else:
        refused(folder, "cannot read the configuration")
    assert not witness.exists()
    load_tokenizer(folder)
    assert not witness.exists()


# --- the model in the box --------------------------------------------------------------------------------------------


def test_the_model_in_the_box_by_name(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name means the packaged folder; a path means what lies there."""
    shutil.copytree(pristine, tmp_path / "box" / outpace.assets.BUILTIN_MODEL)
    monkeypatch.setattr(outpace.assets, "files", lambda _: tmp_path / "box")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(load_model("outpace-tiny", CPU)), logits(load_model(pristine, CPU)))
    assert load_tokenizer("outpace-tiny").get_vocab() == load_tokenizer(pristine).get_vocab()
    for path in ("./outpace-tiny", Path("outpace-tiny")):
        with pytest.raises(CheckpointError):
            load_model(path, CPU)
    (tmp_path / "box" / "outpace-tiny" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="not in this installation"):
        load_model("outpace-tiny", CPU)


def test_the_model_in_the_box_is_packaged() -> None:
    """Whatever lies in its folder is named in the build's settings, and the folder is no package of its own."""
    root = Path(__file__).resolve().parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"where": ["src"], "namespaces": False}
    assets = root / "src" / "outpace" / "assets"
    named = {path for pattern in settings["package-data"]["outpace.assets"] for path in assets.glob(pattern)}
    here = {path for path in assets.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert here <= named
