"""The recipe of the model in the box, on a few short texts."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace.bench.heldout import read_held_out
from outpace.errors import InputError
from outpace.train.corpus import CodeBlock, code_blocks, is_held_out, read_gsm8k, read_stdlib
from outpace.train.edits import _MAKERS, make_edit
from outpace.train.prompts import held_out_prompts
from outpace.train.texts import TrainingTexts
from outpace.train.tiny import TinyRecipe, _ChunkedCrossEntropy, train_tiny
from outpace.train.tokenizer import load_tokenizer

FUNCTION = '''def take(items, size, default=None):
    """Take the first items, at most a given number of them.

    More than there are is no error.
    """
    # count what was taken
    result = []
    for item in items:
        if len(result) == size:
            break
        result.append(item)
    name = 'first items'
    print(name, len(result), 10)
    return result or default
'''


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A library of 60 files and 60 questions."""
    folder = tmp_path_factory.mktemp("sources")
    library = folder / "lib"
    (library / "test").mkdir(parents=True)
    for number in range(60):
        name = f"test/test_{number}.py" if number % 3 == 0 else f"module_{number}.py"
        (library / name).write_text(FUNCTION.replace("take", f"take_{number}") * 2)
    (library / "broken.py").write_bytes(b"\xff\xfe\x00 no text")
    questions = folder / "train.jsonl"
    rows = [
        {
            "question": f"Ann has {n} pens and buys {n} more. How many has she?",
            "answer": f"{n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
        }
        for n in range(60)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return library, questions


def test_sources_are_split_by_name_alone(sources: tuple[Path, Path]) -> None:
    library, questions = sources
    texts = TrainingTexts(questions, library)
    assert len(texts.files) + len(texts.held_out_files) == 60  # the broken one is passed over
    assert texts.held_out_files
    assert texts.held_out_problems
    assert all(is_held_out(file.name) for file in texts.held_out_files)
    assert not any(is_held_out(problem.question) for problem in texts.problems)


def test_calculator_notes_are_taken_out(sources: tuple[Path, Path]) -> None:
    problem = read_gsm8k(sources[1])[7]
    assert problem.answer == "7+7 = 14\n#### 14"


def test_questions_are_found_in_their_folder(sources: tuple[Path, Path], tmp_path: Path) -> None:
    assert read_gsm8k(sources[1].parent) == read_gsm8k(sources[1])
    with pytest.raises(InputError, match="found none"):
        read_gsm8k(tmp_path)


@pytest.mark.parametrize("line", ["{", "[]", '{"question": 1, "answer": 2}', '{"question": "no answer"}'])
def test_a_broken_question_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"train\.jsonl:2"):
        read_gsm8k(path)


def test_a_folder_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Python file"):
        read_stdlib(tmp_path)


@pytest.mark.parametrize("maker", [maker for maker, _ in _MAKERS], ids=lambda maker: maker.__name__)
def test_each_kind_of_edit_gives_code_that_parses(maker: object) -> None:
    (block,) = code_blocks(read_stdlib_file(FUNCTION))
    instruction, after = maker(block, Random(1))  # type: ignore[operator]
    ast.parse(after)
    assert instruction.endswith(".")
    assert (after == block.code) == (maker.__name__ == "_repeat")  # type: ignore[attr-defined]


def read_stdlib_file(text: str) -> object:
    from outpace.train.corpus import SourceFile

    return SourceFile("file.py", text, is_test=False)


def test_a_rename_changes_every_occurrence_and_nothing_else() -> None:
    block = CodeBlock("file.py", "take", FUNCTION.rstrip())
    for seed in range(200):
        edit = make_edit(block, Random(seed))
        if edit is not None and edit.instruction.startswith("Rename `"):
            old, new = edit.instruction.split("`")[1:4:2]
            assert edit.after.replace(new, old) == edit.before
            return
    pytest.fail("no rename was drawn")


def test_chunked_cross_entropy_is_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 32, requires_grad=True), torch.randn(50, 32, requires_grad=True)
    targets = torch.randint(0, 50, (700,))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    found = _ChunkedCrossEntropy.apply(hidden, weight, targets)
    gradients = torch.autograd.grad(found, (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # computed in bfloat16
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0.05, atol=2e-4)


def test_a_short_training_writes_a_checkpoint_that_loads(sources: tuple[Path, Path], tmp_path: Path) -> None:
    library, questions = sources
    recipe = TinyRecipe(
        hidden=32, intermediate=64, layers=1, heads=2, kv_heads=1, context=64, tokens=4096, batch_tokens=512,
        lengths=((0.5, 32), (1.0, 64)),
    )  # fmt: skip
    losses: list[float] = []

    def note(*, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        assert 1 <= step <= steps == 8
        assert tokens_per_second > 0
        losses.append(loss)

    figures = train_tiny(tmp_path, gsm8k=questions, stdlib=library, recipe=recipe, progress=note, snapshot_seconds=0)
    assert losses[-1] < losses[0]
    assert {"stdlib", "edits", "copies", "arithmetic", "train", "tokens", "seconds"} == figures.keys()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype is torch.bfloat16
    assert len(tokenizer) == model.config.vocab_size
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|user|>How many?<|end|><|assistant|>"
    text = "def f(x):\n\treturn  'é' * 12\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert {prompt.kind for prompt in read_held_out(tmp_path / "prompts.jsonl")} >= {"editing", "arithmetic"}

    again = train_tiny(tmp_path / "more", gsm8k=questions, stdlib=library, recipe=recipe, start_from=tmp_path)
    assert again["train"] < losses[0]
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(tmp_path / "more").get_vocab()


def test_held_out_prompts_come_from_held_out_texts(sources: tuple[Path, Path]) -> None:
    library, questions = sources
    texts = TrainingTexts(questions, library)
    held_out = {file.name for file in texts.held_out_files}
    prompts = held_out_prompts(texts)
    assert prompts == held_out_prompts(texts)
    for prompt in prompts:
        if prompt["kind"] in ("completion", "editing"):
            assert prompt["source"].split(":")[0] in held_out
