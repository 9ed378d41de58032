"""What every test runs under: one thread a worker, no network, a silent Transformers."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable

import pytest
import torch
import transformers

import families


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the models are tiny: more threads, in each of several workers, only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT asks Transformers by the old name.
    config.addinivalue_line("filterwarnings", "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def reference() -> Callable[[str], families.Reference]:
    """`reference(name)`: a family's model, its prompts and their greedy continuations; computed once a worker."""
    return families.reference
