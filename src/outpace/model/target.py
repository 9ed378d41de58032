"""The target: a probed model, ready to run packed steps."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outpace.errors import UnknownNameError, UnsupportedModelError
from outpace.model.arena import KVArena
from outpace.model.attention import AttentionStep, selected
from outpace.model.backends import AttentionBackend, make_backend
from outpace.model.compiled import CompilationFailed, CompiledModel
from outpace.model.cpu_modules import StandIns
from outpace.model.masks import MaskSpec
from outpace.model.plan import StepPlan
from outpace.model.rope import RopeSwitch
from outpace.model.storage import LayerKV
from outpace.tree import Int32Array


@dataclass(frozen=True, eq=False)
class Target:
    """A model that passed the probe. Nothing is set on it; each pass selects our attention and puts the old one back.

    Attributes:
        model: The unmodified causal model (without a PEFT wrapper; adapters that were injected stay in force).
        configs: Configs in which the attention implementation is selected.
        layers: What each attention layer stores, in call order.
        masks: The mask pattern of each attention layer.
        layer_of: ``id`` of each attention module to its index.
        vocab_size: Width of the logits; a padded head is wider than the vocabulary that the config names.
        num_embeddings: Token ids that the model can read: below this.
        context_length: Most tokens of a sequence, or None where the model names no limit.
        rope_switch: Where rotary frequencies change, or None.
        device: Where token ids go in.
        probe_difference: Largest difference of logits that the probe saw between packed and alone.
        backend: Name of the attention backend.
        stand_ins: What computes in place of some of the model's modules during a pass, or None.
        compiled: The model through ``torch.compile``, or None.
    """

    model: PreTrainedModel
    configs: list[PreTrainedConfig]
    layers: list[LayerKV]
    masks: list[MaskSpec]
    layer_of: dict[int, int]
    vocab_size: int
    num_embeddings: int
    context_length: int | None
    rope_switch: RopeSwitch | None
    device: torch.device
    probe_difference: float
    backend: str = "auto"
    stand_ins: StandIns | None = None
    compiled: CompiledModel | None = None
    # A mask of four dimensions is handed on untouched by Transformers, so no mask is ever built for a packed pass.
    _no_mask: torch.Tensor = field(default_factory=lambda: torch.zeros((1, 1, 1, 1), device="cpu"))
    _backend: AttentionBackend = field(init=False)

    def __post_init__(self) -> None:
        """Make the backend.

        Raises:
            UnknownNameError: No such backend.
            ConfigError: The backend cannot run these layers.
        """
        object.__setattr__(self, "_backend", make_backend(self.backend, self.layers, self.layer_of, self.masks))

    @torch.no_grad()
    def run(
        self, plan: StepPlan, arena: KVArena, capture: SequenceOf[str] = ()
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Execute one packed step; keys and values of its tokens are written to the arena.

        Args:
            plan: The step.
            arena: Where keys and values are.
            capture: Names of modules whose output is wanted.

        Returns:
            ``[R, vocab]``, the logits at ``plan.logit_rows``, in the model's dtype, on the model's output device; and
            ``[T, width]`` for each captured module.
        """
        # Hooks that were added after compiling are never called, so a pass that captures goes uncompiled.
        if self.compiled is not None and self.compiled.works and not capture:
            try:
                return self._pass(self.compiled, plan, arena, capture)
            except CompilationFailed:
                pass  # keys and values are written again by the pass that follows
        with nullcontext() if self.stand_ins is None else self.stand_ins.installed():
            return self._pass(self.model, plan, arena, capture)

    def _pass(
        self, model: PreTrainedModel | CompiledModel, plan: StepPlan, arena: KVArena, capture: SequenceOf[str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        step = self._backend.step(plan, arena)
        rows = torch.from_numpy(plan.logit_rows)
        # Where layers are spread over devices, hooks would bring the index to another device than the states it picks from.
        spread = any(layer.device != self.device for layer in self.layers)
        wanted = None if spread else rows.to(self.device)
        with _captured(self.model, capture) as hidden:
            logits = packed_forward(
                model, self.configs, plan.input_ids, plan.position_ids, step, self._no_mask, self.device, wanted
            )
        return (logits.index_select(0, rows.to(logits.device)) if spread else logits), hidden

    def check_modules(self, names: SequenceOf[str]) -> None:
        """See that modules whose output is wanted exist.

        Raises:
            UnknownNameError: One does not.
        """
        for name in names:
            _module(self.model, name)

    @torch.no_grad()
    def plain_logits(self, tokens: Int32Array) -> torch.Tensor:
        """Logits of the model's own plain pass over one text, ``[len(tokens), vocab]``, own attention and masks."""
        input_ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)[None]
        output: Any = self.model(input_ids=input_ids, use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits


def _module(model: PreTrainedModel, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in model.named_modules() if known]
        raise UnknownNameError("module of the model", name, known) from None


@contextmanager
def _captured(model: PreTrainedModel, names: SequenceOf[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Keep the outputs of named modules, ``[T, width]`` each, for the length of a pass."""
    hidden: dict[str, torch.Tensor] = {}
    handles = []
    try:
        for name in names:

            def keep(_module: torch.nn.Module, _args: object, output: Any, name: str = name) -> None:
                hidden[name] = (output[0] if isinstance(output, tuple) else output)[0]

            handles.append(_module(model, name).register_forward_hook(keep))
        yield hidden
    finally:
        for handle in handles:
            handle.remove()


def packed_forward(
    model: PreTrainedModel | CompiledModel,
    configs: list[PreTrainedConfig],
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    step: AttentionStep,
    mask: torch.Tensor,
    device: torch.device,
    logit_rows: torch.Tensor | None,
) -> torch.Tensor:
    """Call the unmodified model on one packed row; ``[R, vocab]``."""
    extra: dict[str, Any] = {} if logit_rows is None else {"logits_to_keep": logit_rows}
    with selected(configs):
        output: Any = model(
            input_ids=torch.from_numpy(input_ids).to(device)[None],
            position_ids=torch.from_numpy(position_ids).to(device)[None],
            attention_mask=mask.to(device),
            use_cache=False,
            outpace_step=step,
            **extra,
        )
    logits: torch.Tensor = output.logits
    if logits.ndim != 3 or logits.shape[0] != 1:
        raise UnsupportedModelError(f"expected logits of shape [1, rows, vocab], found {list(logits.shape)}")
    return logits[0]
