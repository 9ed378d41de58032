"""Loading through Transformers, with errors that say what is wrong with the checkpoint."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from outpace.assets import builtin_folder, is_builtin
from outpace.errors import CheckpointError, ConfigError, UnknownNameError, UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is loaded. All of it is handed to Transformers.

    Attributes:
        dtype: ``"auto"`` (as saved), a name such as ``"bfloat16"``, or a `torch.dtype`.
        device: ``"auto"`` (a GPU if there is one), or a device such as ``"cpu"`` or ``"cuda:1"``. Not with ``device_map``.
        device_map: Spreads the layers over devices (needs accelerate).
        quantization_config: Of Transformers, for instance `BitsAndBytesConfig` (needs accelerate).
        adapter: Folder or hub id of a PEFT adapter (needs peft).
        revision: Of a hub checkpoint.
        trust_remote_code: Run modeling code that comes with the checkpoint. Off, because it is code.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    device_map: str | Mapping[str, Any] | None = None
    quantization_config: Any = None
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Check names.

        Raises:
            ConfigError: An unknown dtype or device, or ``device`` together with ``device_map``.
        """
        dtype: object = self.dtype
        if isinstance(dtype, str):
            if dtype != "auto" and dtype not in DTYPES:
                raise UnknownNameError("dtype", dtype, ["auto", *DTYPES])
        elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a name or a floating-point torch.dtype, found {dtype}")
        if self.device_map is not None and self.device != "auto":
            raise ConfigError("give either device or device_map, not both")
        if isinstance(self.device, str) and self.device != "auto":
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ConfigError(
                    f"device must be 'auto', 'cpu', 'cuda', 'cuda:N' or alike, found {self.device!r}"
                ) from error

    def torch_dtype(self) -> str | torch.dtype:
        """``dtype`` as Transformers takes it."""
        return self.dtype if isinstance(self.dtype, torch.dtype) else DTYPES.get(self.dtype, "auto")

    def torch_device(self) -> torch.device:
        """``device``, with ``"auto"`` decided."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def load_model(name: str | os.PathLike[str], options: LoadOptions) -> torch.nn.Module:
    """Load a causal model from a folder or the hub, in evaluation mode; ``"outpace-tiny"`` is the model in the box.

    Raises:
        CheckpointError: Nothing there, a shard or weights are missing, or Transformers cannot read it.
        UnsupportedModelError: It is no decoder-only causal model.
    """
    path = _place_of(name)
    _check_folder(path)
    common: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **common)
    except Exception as error:
        raise CheckpointError(f"cannot read the configuration of {path!r}: {_said(path, error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{path!r} is an encoder-decoder ({config.model_type}); Outpace runs decoder-only models"
        )
    arguments = {**common, "config": config, "dtype": options.torch_dtype(), "output_loading_info": True}
    device = options.torch_device()
    # Quantised weights cannot be moved, or only some kinds of them: they are loaded where they shall be.
    quantised = options.quantization_config is not None or getattr(config, "quantization_config", None) is not None
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    elif quantised:
        arguments["device_map"] = str(device)
    if options.quantization_config is not None:
        arguments["quantization_config"] = options.quantization_config
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **arguments)
        model, report = loaded
    except Exception as error:
        raise CheckpointError(f"cannot load {path!r}: {_first_line(error)}") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"checkpoint {path!r} lacks weights that the model needs: {shown}")
    if "device_map" not in arguments:
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise CheckpointError(f"cannot move {path!r} to {device}: {_first_line(error)}") from error
    if options.adapter is not None:
        model = _with_adapter(model, options.adapter)
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(name: str | os.PathLike[str], options: LoadOptions | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub; ``"outpace-tiny"`` is that of the model in the box.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    options = options or LoadOptions()
    path = _place_of(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:
        raise CheckpointError(f"cannot load a tokenizer from {path!r}: {_first_line(error)}") from error
    return tokenizer


def _with_adapter(model: Any, adapter: str) -> torch.nn.Module:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError("an adapter needs the package peft: pip install 'outpace[peft]'") from error
    try:
        wrapped: torch.nn.Module = PeftModel.from_pretrained(model, adapter)
    except Exception as error:
        raise CheckpointError(f"cannot load the adapter {adapter!r}: {_first_line(error)}") from error
    return wrapped


def _place_of(name: str | os.PathLike[str]) -> str:
    """The folder or hub id that a name means."""
    return str(builtin_folder()) if is_builtin(name) else os.fspath(name)


def _check_folder(path: str) -> None:
    """Say what is wrong with a local folder before Transformers wraps it in a hub error."""
    folder = Path(path)
    if not folder.is_dir():
        looks_local = (
            path.startswith((".", "/", "~")) or path.count("/") > 1 or (folder.parent.is_dir() and "/" in path)
        )
        if folder.exists():
            raise CheckpointError(f"{path!r} is a file; expected a folder with config.json, or a hub id")
        if looks_local:
            raise CheckpointError(f"no folder {path!r}{_close_folders(folder)}")
        return
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{path!r} has no config.json{_close_folders(folder / 'x')}")
    index = _weight_index(folder)
    if index is None:
        return
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} is not a weight index: {_first_line(error)}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{path!r} lacks {len(missing)} of {len(names)} weight files named in {index.name}: {', '.join(missing[:5])}; "
            "download the checkpoint again"
        )


def _weight_index(folder: Path) -> Path | None:
    """The index of weight files that Transformers will follow; other formats may lie beside it with files missing."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return None
        if (folder / f"{name}.index.json").is_file():
            return folder / f"{name}.index.json"
    return None


def _said(path: str, error: BaseException) -> str:
    """What Transformers said; for what is no folder here, that the hub was asked, and which folders have close names."""
    said = _first_line(error)
    if Path(path).is_dir():
        return said
    close = difflib.get_close_matches(Path(path).name, _checkpoints_in(Path()), n=3)
    here = f"; checkpoints here with a name like it: {', '.join(close)}" if close else ""
    return f"no folder of that name here, and the hub said: {said}{here}"


def _checkpoints_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if (path / "config.json").is_file()]


def _close_folders(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return f"; {str(parent)!r} does not exist either"
    known = _checkpoints_in(parent)
    close = difflib.get_close_matches(folder.name, known, n=3, cutoff=0.4) or sorted(known)[:5]
    return f"; checkpoints beside it: {', '.join(close)}" if close else f"; {str(parent)!r} holds no checkpoints"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
