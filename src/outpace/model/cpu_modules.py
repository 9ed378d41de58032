"""What a model computes between its attention layers, faster on a CPU: linear layers and root-mean-square norms.

A **stand-in** computes what one module computes, with fewer and larger calls. Stand-ins are in force only inside a packed
pass; between passes the model is as it was. A module takes part only if it is exactly what its stand-in knows, and nobody
has put another ``forward`` on it.

* One token through a linear layer is bound by reading the weights; `outpace.kernels.linear` reads them at the memory's speed.
* More tokens are multiplied by oneDNN (the library under PyTorch's linear layer), which prefers weights laid out in blocks.
  PyTorch hands it plain ones at every call; here they are **packed** once. The copy doubles the memory of the weights, so
  it is made only where there is plenty.
* A norm written in Python is six passes over its rows; `outpace.kernels.norm` makes one. Which of the ways to round
  a norm uses is found by trying; one that fits none is left alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from outpace import kernels
from outpace._compile import c_function
from outpace.kernels import linear, norm
from outpace.kernels.team import Kernel, Team, team
from outpace.model.memory import free_memory

_LOG = logging.getLogger(__name__)
_SHARE_OF_FREE_MEMORY = 0.25
_DTYPES = (torch.float32, torch.bfloat16)
# Up to so many numbers in a weight, up to so many tokens are faster without oneDNN (measured on two cores with AVX-512).
_MOST_TOKENS = {
    torch.float32: ((2**21, 32), (2**63, 4)),
    torch.bfloat16: ((2**19, 32), (2**20, 8), (2**63, 1)),
}
_SAMPLED = 16  # numbers of a weight that are compared, to notice what is written through ``.data``
_SMALL_NORM = 16 * 1024  # numbers: up to here, one thread is as fast as a team


@cache
def _kernels() -> tuple[Kernel, Kernel]:
    """The compiled kernels; the first call of a machine takes about a second, later ones read Numba's cache."""
    sources = sorted(Path(kernels.__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file())).hexdigest()

    def linear_layer(block):  # type: ignore[no-untyped-def]
        if digest:  # part of the cache's key
            linear.linear(block)

    def rms_norm(block):  # type: ignore[no-untyped-def]
        if digest:
            norm.rms_norm(block)

    return Kernel(c_function(linear_layer)), Kernel(c_function(rms_norm))


class StandIns:
    """The stand-ins of a model.

    Args:
        model: The model.
        pack: Whether to keep packed copies of the weights; None does where they fit into a quarter of the free memory.
        threads: What the kernels run in.
    """

    def __init__(self, model: nn.Module, pack: bool | None = None, threads: Team | None = None) -> None:
        threads = threads or team()
        linears = [module for module in model.modules() if _is_linear(module)]
        packs = bool(linears) and pack is not False and _has_packed_products() and (bool(pack) or _fits(linears))
        copies = _Packs(packs)
        self._parts: list[_Linear | _Norm] = []
        for module in linears:
            assert isinstance(module, nn.Linear)
            self._parts.append(_Linear(module, copies, threads))
        for module in model.modules():
            kind = _norm_kind(module)
            if kind is not None:
                self._parts.append(_Norm(module, kind, threads))

    def __len__(self) -> int:
        """How many modules have a stand-in."""
        return len(self._parts)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the stand-ins compute for as long as the context lasts."""
        installed = []
        try:
            for part in self._parts:
                if part.is_current():
                    part.module.__dict__["forward"] = part.forward
                    installed.append(part.module)
            yield
        finally:
            for module in installed:
                del module.__dict__["forward"]


class _Packs:
    """Packed copies of weights, one for each weight however many layers share it."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._copies: dict[int, tuple[_Seen, torch.Tensor]] = {}

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed copy of what ``weight`` holds now, made when it is first wanted; None if none is to be kept."""
        if not self._wanted:
            return None
        found = self._copies.get(id(weight))
        if found is None or not found[0].is_same(weight):
            copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
            found = self._copies[id(weight)] = _Seen(weight), copy
        return found[1]


class _Seen:
    """A tensor as it was at one time.

    What is written through ``tensor.data`` counts in no version, so a few numbers are compared as well.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version, self._address = _version(tensor), tensor.data_ptr()
        flat = tensor.detach().view(-1)
        self._sample = flat[:: max(1, len(flat) // _SAMPLED)]
        self._numbers = self._sample.clone()

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is this one, and nobody has written to it or moved it since."""
        return (
            tensor is self.tensor
            and _version(tensor) == self._version
            and tensor.data_ptr() == self._address
            and torch.equal(self._sample, self._numbers)
        )


class _Linear:
    """Stand-in of a linear layer."""

    def __init__(self, module: nn.Linear, packs: _Packs, threads: Team) -> None:
        self.module = module
        self._packs, self._threads = packs, threads
        self._kernel, _ = _kernels()
        weight = module.weight
        self._dtype, self._shape = weight.dtype, weight.shape
        self._outputs, self._width = weight.shape
        has_unit_lengths = self._width % linear.UNIT == 0 and self._outputs % linear.UNIT == 0
        self._most_tokens = _most_tokens(weight) if has_unit_lengths else 0
        self._no_bias = torch.zeros(self._outputs, dtype=self._dtype, device="cpu")
        block = np.zeros(linear.PARAMETERS, np.int64)
        block[linear.IN_FEATURES], block[linear.OUT_FEATURES] = self._width, self._outputs
        block[linear.HALVES] = self._dtype is torch.bfloat16
        self._block, self._address = memoryview(block.data), block.ctypes.data
        self._compute = torch.ops.mkldnn._linear_pointwise.default

    def is_current(self) -> bool:
        """Whether the layer still is what this stands in for; from here on, it computes with the weights as they are now."""
        module = self.module
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if (
            weight is None
            or weight.dtype is not self._dtype
            or weight.shape != self._shape
            or not weight.is_contiguous()
        ):
            return False
        if weight.device.type != "cpu" or "forward" in module.__dict__:
            return False
        added: torch.Tensor = self._no_bias if bias is None else bias
        if added.dtype is not self._dtype or len(added) != self._outputs or not added.is_contiguous():
            return False
        self._block[linear.WEIGHT], self._block[linear.BIAS] = weight.data_ptr(), added.data_ptr()
        return True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that `nn.Linear` has
        """What the layer's own ``forward`` gives, up to rounding: ``[..., out_features]``."""
        module = self.module
        if input.dtype is not self._dtype or input.shape[-1] != self._width or not input.is_contiguous():
            return nn.functional.linear(input, module.weight, module.bias)
        tokens = input.numel() // self._width
        if 0 < tokens <= self._most_tokens:
            output = input.new_empty((*input.shape[:-1], self._outputs))
            block, threads = self._block, self._threads.num_threads
            block[linear.INPUT], block[linear.OUTPUT] = input.data_ptr(), output.data_ptr()
            block[linear.NEXT_FEATURE], block[linear.TOKENS] = 0, tokens
            # Two blocks a thread: long streams, and something left to share if one thread is late.
            block[linear.BLOCK] = max(linear.UNIT, -(-self._outputs // (32 * threads)) * 16)
            self._threads.run(self._kernel, self._address, threads)
            return output
        packed = self._packs.of(module.weight)
        if packed is None:
            return nn.functional.linear(input, module.weight, module.bias)
        result: torch.Tensor = self._compute(input, packed, module.bias, "none", [], "")
        return result


class _Norm:
    """Stand-in of a root-mean-square norm."""

    def __init__(self, module: nn.Module, kind: int, threads: Team) -> None:
        self.module = module
        self._threads = threads
        _, self._kernel = _kernels()
        weight = _norm_weight(module)
        self._dtype, self._width = weight.dtype, len(weight)
        block = np.zeros(norm.PARAMETERS, np.int64)
        block[norm.WIDTH], block[norm.KIND] = self._width, kind
        block[norm.HALVES] = self._dtype is torch.bfloat16
        block[norm.EPSILON : norm.EPSILON + 1].view(np.float64)[0] = _epsilon(module)
        self._block, self._address = memoryview(block.data), block.ctypes.data

    def is_current(self) -> bool:
        """Whether the norm still is what this stands in for."""
        weight = self.module._parameters.get("weight")
        if weight is None or weight.dtype is not self._dtype or weight.shape != (self._width,):
            return False
        if weight.device.type != "cpu" or not weight.is_contiguous() or "forward" in self.module.__dict__:
            return False
        self._block[norm.WEIGHT] = weight.data_ptr()
        return True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the norm's own ``forward`` gives, up to rounding, of the input's shape."""
        if hidden_states.dtype is not self._dtype or hidden_states.shape[-1] != self._width:
            result: torch.Tensor = type(self.module).forward(self.module, hidden_states)
            return result
        source = hidden_states.contiguous()
        output = torch.empty_like(source)
        block, size = self._block, source.numel()
        block[norm.INPUT], block[norm.OUTPUT] = source.data_ptr(), output.data_ptr()
        block[norm.NEXT_ROW], block[norm.ROWS] = 0, size // self._width
        threads = 1 if size <= _SMALL_NORM else self._threads.num_threads
        self._threads.run(self._kernel, self._address, threads)
        return output


def _is_linear(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    weight, bias = module.weight, module.bias
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not weight.is_contiguous():
        return False
    return bias is None or (bias.dtype is weight.dtype and bias.is_contiguous())


def _most_tokens(weight: torch.Tensor) -> int:
    """Up to how many tokens the kernel of `outpace.kernels.linear` is the faster one."""
    if not linear.multiplies_groups(weight.dtype is torch.bfloat16):
        return 1
    return next(tokens for numbers, tokens in _MOST_TOKENS[weight.dtype] if weight.numel() <= numbers)


def _fits(linears: list[nn.Module]) -> bool:
    weights = {
        id(weight): weight for module in linears for name, weight in module.named_parameters() if name == "weight"
    }
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    limit = free_memory(torch.device("cpu")) * _SHARE_OF_FREE_MEMORY
    if size > limit:
        _LOG.info("weights are not packed: copies of %.1f GiB, and there is room for %.1f", size / 2**30, limit / 2**30)
    return size <= limit


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; tensors made in inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


@cache
def _has_packed_products() -> bool:
    """Whether this build of PyTorch has packed products; they are not part of its public interface."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros((16, 16), device="cpu"), 1)
        torch.ops.mkldnn._linear_pointwise.default(torch.zeros((1, 16), device="cpu"), packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        _LOG.info("weights are not packed: this build of PyTorch has no packed products (%s)", error)
        return False
    return True


def _norm_weight(module: nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _epsilon(module: nn.Module) -> float | None:
    """The number that a norm adds to the mean square, under one of its usual names."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@torch.no_grad()
def _norm_kind(module: nn.Module) -> int | None:
    """Which of the kernel's ways to round a norm uses; None if the module is no such norm."""
    if "RMSNorm" not in type(module).__name__ or "forward" in module.__dict__ or _epsilon(module) is None:
        return None
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return None
    weight = _norm_weight(module)
    if (
        weight is None
        or weight.ndim != 1
        or weight.device.type != "cpu"
        or weight.dtype not in _DTYPES
        or len(weight) % 16
    ):
        return None
    sizes = torch.tensor([[1e-3], [0.1], [1.0], [40.0]], device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    rows = (torch.randn((4, len(weight)), generator=generator, device="cpu") * sizes).to(weight.dtype)
    expected = type(module).forward(module, rows)  # past hooks, which are for passes
    if not isinstance(expected, torch.Tensor) or expected.dtype is not weight.dtype or expected.shape != rows.shape:
        return None
    # Sums in another order may round a number in a thousand differently; another way to round, one in three.
    threads = Team(None)
    for kind in norm.KINDS:
        trial = _Norm(module, kind, threads)
        if not trial.is_current():
            return None
        found = trial.forward(rows)
        close = torch.allclose(
            found.float(), expected.float(), rtol=1e-2 if weight.dtype is torch.bfloat16 else 1e-6, atol=0
        )
        differing = float((found != expected).float().mean())
        if close and (weight.dtype is torch.float32 or differing < 0.02):
            return kind
    return None
