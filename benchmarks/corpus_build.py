"""Static corpora: how fast they are built, how large they are, how fast they are opened and followed.

By default, GSM8K (if it is given) and the Python standard library of this interpreter are tokenised and built:

    python benchmarks/corpus_build.py --tokenizer llama.model --gsm8k train.jsonl

`build_ids_per_second` is one core's, in memory, the median of several runs. Transitions are those of `step_frozen` over
the documents themselves, and over one document in twenty, left out of an automaton of the others. `open_ms` is the median
of opening the folder, which is in the page cache.

With `--grow N`, corpora of N/16 to N tokens are built from the same texts, repeated with noise: in each repetition, one
token in ten is another one, drawn from the text. Then `outpace corpus build`'s own figures are shown, disk included.

    python benchmarks/corpus_build.py --tokenizer llama.model --grow 100000000 --memory 4GB
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outpace._compile import compiled
from outpace.corpora.build import BuildOptions, BuildReport, build_corpus
from outpace.corpora.memory import parse_size
from outpace.suffix.corpus import Corpus
from outpace.suffix.frozen import FrozenAutomaton, step_frozen

NOISE = 0.1
HELD_OUT_ONE_IN = 20
DOCUMENT = 2**20  # tokens of a document that is repeated with noise


@compiled
def follow(image: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> int:
    """Match documents, token by token, each from the root; returns the sum of the lengths."""
    total = 0
    for document in range(len(offsets) - 1):
        state, length = 0, 0
        for at in range(offsets[document], offsets[document + 1]):
            state, length = step_frozen(image, state, length, tokens[at])
            total += length
    return total


def stdlib_files(folder: Path) -> list[Path]:
    """Python files in UTF-8, without installed packages."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.relative_to(folder).parts:
            continue
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found.append(path)
    return found


def joined(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(documents), np.cumsum([0, *map(len, documents)]).astype(np.int64)


def seconds(function: Any, *arguments: Any, repeat: int = 1) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def transition_us(automaton: FrozenAutomaton, documents: list[np.ndarray], repeat: int) -> dict[str, float]:
    tokens, offsets = joined(documents)
    follow(automaton.image, tokens[:1], np.array([0, 1]))
    took = seconds(follow, automaton.image, tokens, offsets, repeat=repeat)
    mean_match = follow(automaton.image, tokens, offsets) / len(tokens)
    return {"us": round(took / len(tokens) * 1e6, 4), "mean_match": round(mean_match, 1)}


def measure(name: str, inputs: list[Path], options: BuildOptions, folder: Path, repeat: int) -> dict[str, Any]:
    report = build_corpus(folder / name, inputs, options)
    corpus = Corpus.open(report.folder)
    documents = [document for shard in corpus.shards for document in shard.documents()]
    tokens, offsets = joined(documents)
    FrozenAutomaton.build(tokens[:1000], np.array([0, 1000]))  # compiles
    build = seconds(FrozenAutomaton.build, tokens, offsets, repeat=repeat)
    kept = [document for number, document in enumerate(documents) if number % HELD_OUT_ONE_IN]
    others = FrozenAutomaton.build(*joined(kept))
    return {
        "texts": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "build_ids_per_second": round(len(tokens) / build),
        "bytes_per_token": round(report.manifest.nbytes / len(tokens), 2),
        "open_ms": round(seconds(Corpus.open, report.folder, repeat=20) * 1e3, 2),
        "transition_own": transition_us(others, kept, repeat),
        "transition_held_out": transition_us(others, documents[::HELD_OUT_ONE_IN], repeat),
        "reading_tokens_per_second": round(len(tokens) / report.seconds_reading),
        "shards": len(corpus.shards),
    }


def noisy_documents(text: np.ndarray, num_tokens: int) -> Iterator[np.ndarray]:
    """The text over and over, from other places, one token in ten another one of it; the first time as it is."""
    rng = np.random.default_rng(0)
    at = 0
    while at < num_tokens:
        size = min(DOCUMENT, num_tokens - at)
        ids = np.take(text, np.arange(at, at + size), mode="wrap")
        if at >= len(text):
            changed = rng.random(size) < NOISE
            ids[changed] = rng.choice(text, int(changed.sum()))
        yield ids
        at += size


def grow(most: int, text: np.ndarray, options: BuildOptions, folder: Path) -> Iterator[dict[str, Any]]:
    for num_tokens in (most // 16, most // 8, most // 4, most // 2, most):
        with tempfile.TemporaryDirectory(dir=folder) as inputs:
            for number, ids in enumerate(noisy_documents(text, num_tokens)):
                np.save(Path(inputs, f"{number:06}.npy"), ids)
            report: BuildReport = build_corpus(Path(inputs, "out"), sorted(Path(inputs).glob("*.npy")), options)
            opening = seconds(Corpus.open, report.folder, repeat=20)
        yield {
            "tokens": report.manifest.tokens,
            "shards": len(report.manifest.shards),
            "building_tokens_per_second": round(report.manifest.tokens / report.seconds_building),
            "reading_tokens_per_second": round(report.manifest.tokens / report.seconds_reading),
            "peak_bytes_of_a_process": report.peak_memory,
            "peak_bytes_of_a_worker": report.peak_worker,
            "peak_bytes_per_token_of_a_shard": round(
                report.peak_worker / max(shard.tokens for shard in report.manifest.shards), 1
            ),
            "bytes_per_token": round(report.manifest.nbytes / report.manifest.tokens, 2),
            "open_ms": round(opening * 1e3, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="outpace-tiny", help="as `outpace corpus build` takes it")
    parser.add_argument("--gsm8k", type=Path, help="JSON lines with question and answer")
    parser.add_argument(
        "--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="a folder of Python files"
    )
    parser.add_argument("--grow", type=int, metavar="N", help="most tokens of the texts repeated with noise")
    parser.add_argument("--memory", type=parse_size, help="as `outpace corpus build` takes it")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to put what is built; deleted afterwards")
    args = parser.parse_args()
    options = BuildOptions(
        args.tokenizer, memory=args.memory, workers=args.workers, fields=("question", "answer"), skip_bad_lines=True
    )
    texts = {"gsm8k": [args.gsm8k]} if args.gsm8k else {}
    texts["stdlib"] = stdlib_files(args.stdlib)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.grow:
            report = build_corpus(Path(folder, "texts"), [path for paths in texts.values() for path in paths], options)
            shards = Corpus.open(report.folder).shards
            text = np.concatenate([document for shard in shards for document in shard.documents()])
            for figures in grow(args.grow, text, options, Path(folder)):
                print(json.dumps(figures), flush=True)
            return
        for name, paths in texts.items():
            print(json.dumps(measure(name, paths, options, Path(folder), args.repeat)), flush=True)


if __name__ == "__main__":
    main()
