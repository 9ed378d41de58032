"""SAM-Decoding's ablations: parts removed (its Table 3), l_bias and l_threshold (Figure 2), draft size (Figure 3).

By replay of recorded outputs where no model is needed: static automata, dynamic automaton and memory removed one by one, the
grid, and draft sizes from 5 to 70. Without an auxiliary drafter l_threshold decides nothing, so in the replayed grid another
drafter that needs no model stands in for it (`--auxiliary`). Token Recycling reads the model's passes, so what it adds or
loses is measured with the model in the box on its held-out prompts, without the guard, whose cuts depend on times. The
memory is fed in the order of traces and prompts.

Writes OUT/ablations.md and plots beside it; mean accepted tokens are exact, tokens/s are of this machine.

    python benchmarks/ablations.py OUT --traces ../shared/data/traces/*.jsonl --corpus gsm8k
    python benchmarks/ablations.py OUT --traces traces.jsonl --limit 60 --no-model
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from models import BUILTIN, build

from outpace import Engine, SamplingParams
from outpace.assets import BUILTIN_MODEL
from outpace.bench import ReplayResult, Trace, read_traces, replay_traces
from outpace.bench.check import distinct_ngrams
from outpace.bench.heldout import first_of_each_kind, read_held_out
from outpace.bench.plots import check_plot_path, draw_lines
from outpace.draft.sources import Sources
from outpace.engine.prompts import to_token_ids
from outpace.model import LoadOptions, load_tokenizer
from outpace.suffix.corpus import Corpus
from outpace.suffix.memory import ResponseMemory

LIMITS = (0, 1, 2, 3, 5, 7, 10, 15)
SIZES = (5, 10, 15, 20, 25, 30, 40, 50, 60, 70)
PARTS = {
    "all": "",
    "without static": "static=false",
    "without dynamic": "dynamic=false",
    "without memory": "memory=false",
    "dynamic alone": "static=false, memory=false",
}
AUXILIARY = "recycling"
LOOPS_UNDER = 0.6
Rows = list[list[str]]


@dataclass(frozen=True)
class Setting:
    """What everything is measured with: the traces by file, and what feeds the drafters."""

    traces: dict[str, list[Trace]]
    corpora: tuple[Corpus, ...]
    auxiliary: str

    def replays(self, spec: str) -> list[ReplayResult]:
        """One replay for each file, with a memory of its own."""
        return [replay_traces(found, spec, 128, memory=True, corpora=self.corpora) for found in self.traces.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for ablations.md and the plots")
    parser.add_argument("--traces", nargs="*", default=[], help="trace files; without any, only the model is asked")
    parser.add_argument("--corpus", action="append", default=[], help="folder of a corpus of the traces' tokenizer")
    parser.add_argument("--limit", type=int, help="only the first traces of each file")
    parser.add_argument("--auxiliary", default="lookup", help="stands in for Token Recycling in the replayed grid")
    parser.add_argument("--no-model", action="store_true", help="replays alone")
    parser.add_argument(
        "--model-corpus", action="append", default=[], help="folder of a corpus of the model's tokenizer"
    )
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    check_plot_path(args.out / "draft-size.svg")
    pages = ["# Ablations of SAM-Decoding\n"]
    if args.traces:
        traces = {Path(path).stem: list(read_traces(path))[: args.limit] for path in args.traces}
        setting = Setting(traces, tuple(Corpus.open(folder) for folder in args.corpus), args.auxiliary)
        pages += [parts_removed(setting), limits(setting, args.out), draft_sizes(setting, args.out)]
    if not args.no_model:
        torch.set_num_threads(args.threads)
        corpora = tuple(Corpus.open(folder) for folder in args.model_corpus)
        pages += [auxiliary_removed(corpora, args.prompts, args.tokens, args.repeat)]
    (args.out / "ablations.md").write_text("\n".join(pages))
    print("\n".join(pages))


def parts_removed(setting: Setting) -> str:
    """Table 3 as far as no model is needed."""
    rows: Rows = []
    for label, options in PARTS.items():
        spec = f"sam({options})" if options else "sam"
        cells = [f"{r.mean_accepted_tokens:.3f} ({r.nodes_per_step:.1f})" for r in setting.replays(spec)]
        rows.append([label, f"`{spec}`", *cells])
        note(label, cells)
    about = "Mean accepted tokens (nodes a step), replayed with a memory of the outputs before" + (
        f" and {len(setting.corpora)} corpora." if setting.corpora else "; there was no corpus, so no static automaton."
    )
    return section("Parts removed", about, ["", "drafter", *setting.traces], rows)


def limits(setting: Setting, out: Path) -> str:
    """Figure 2."""
    rows: Rows = []
    names = list(setting.traces)
    lines: dict[str, list[tuple[float, float]]] = {}
    for bias in LIMITS:
        means: list[list[float]] = []
        for threshold in LIMITS:
            spec = f"sam(l_bias={bias}, l_threshold={threshold})[{setting.auxiliary}]"
            means.append([result.mean_accepted_tokens for result in setting.replays(spec)])
        for name, column in zip(names, zip(*means, strict=True), strict=True):
            rows.append([name, str(bias), *(f"{mean:.3f}" for mean in column)])
            lines.setdefault(f"{name}, l_bias {bias}", []).extend(zip(map(float, LIMITS), column, strict=True))
        note(f"l_bias {bias}", means)
    for name in names:
        own = {label.split(", ")[1]: points for label, points in lines.items() if label.startswith(name + ",")}
        draw_lines(out / f"limits-{name}.svg", own, name, "l_threshold", "mean accepted tokens")
    rows.sort(key=lambda row: (names.index(row[0]), int(row[1])))
    about = f"Mean accepted tokens of `sam[{setting.auxiliary}]`: a row for each l_bias, a column for each l_threshold."
    plots = "".join(f"\n![{name}](limits-{name}.svg)\n" for name in names)
    return section("l_bias and l_threshold", about, ["outputs", "l_bias", *map(str, LIMITS)], rows) + plots


def draft_sizes(setting: Setting, out: Path) -> str:
    """Figure 3."""
    rows: Rows = []
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in setting.traces}
    for size in SIZES:
        results = setting.replays(f"sam(draft_size={size})")
        rows.append([str(size), *(f"{r.mean_accepted_tokens:.3f} ({r.nodes_per_step:.1f})" for r in results)])
        for points, result in zip(lines.values(), results, strict=True):
            points.append((size, result.mean_accepted_tokens))
        note(f"draft_size {size}", rows[-1][1:])
    draw_lines(out / "draft-size.svg", lines, "sam, with memory", "draft size", "mean accepted tokens")
    about = "Mean accepted tokens (nodes a step) of `sam`."
    table = section("Draft size", about, ["draft size", *setting.traces], rows)
    return table + "\n![draft size](draft-size.svg)\n"


def auxiliary_removed(corpora: tuple[Corpus, ...], prompts_of_a_kind: int, num_tokens: int, repeat: int) -> str:
    """Table 3 with the auxiliary drafter, which needs the model's passes."""
    model, tokenizer = build(BUILTIN), load_tokenizer(BUILTIN_MODEL, LoadOptions())
    specs = {"plain": "none", f"{AUXILIARY} alone": AUXILIARY, f"without {AUXILIARY}": "sam"}
    specs |= {
        label: f"sam({options})[{AUXILIARY}]" if options else f"sam[{AUXILIARY}]" for label, options in PARTS.items()
    }
    prompts = first_of_each_kind(read_held_out(), prompts_of_a_kind)
    encoded = [to_token_ids(prompt.prompt, tokenizer, model.config.vocab_size, "").tolist() for prompt in prompts]
    params = SamplingParams(max_tokens=num_tokens)
    seconds: dict[str, list[list[float]]] = {label: [[] for _ in encoded] for label in specs}
    accepted: dict[str, list[float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    engines = {
        label: Engine(model, tokenizer, drafter=spec, sources=Sources(None, corpora), guard=False)
        for label, spec in specs.items()
    }
    for engine in engines.values():
        engine.generate([encoded[0]], params)  # compile
    for turn in range(repeat):
        for label, spec in specs.items():
            # Every turn begins with an empty memory: what was measured before must not be known.
            sources = Sources(ResponseMemory(), corpora)
            engine = Engine(engines[label].target, tokenizer, drafter=spec, sources=sources, guard=False)
            accepted[label], outputs[label] = [], []
            for index, ids in enumerate(encoded):
                begin = time.perf_counter()
                output = engine.generate([ids], params)[0]
                seconds[label][index].append(time.perf_counter() - begin)
                accepted[label].append(output.figures.mean_accepted_tokens or 1.0)
                outputs[label].append(output.token_ids)
                sources.memory.flush()
            note(f"turn {turn}, {label}", f"{statistics.mean(accepted[label]):.3f}")
    loops = [distinct_ngrams([ids]) < LOOPS_UNDER for ids in outputs["plain"]]
    fastest = {label: [statistics.median(times) for times in found] for label, found in seconds.items()}
    rows: Rows = []
    for label, spec in specs.items():
        cells = []
        for wanted in (False, True):
            chosen = [index for index, loop in enumerate(loops) if loop == wanted]
            cells += [
                mean_of(accepted[label][index] for index in chosen),
                mean_of(fastest["plain"][index] / fastest[label][index] for index in chosen),
            ]
        same = sum(a == b for a, b in zip(outputs[label], outputs["plain"], strict=True))
        rows.append([label, f"`{spec}`", *cells, f"{same} of {len(encoded)}"])
    about = (
        f"The model in the box, greedy, batch 1, {num_tokens} tokens, {len(encoded)} held-out prompts of which {sum(loops)} "
        f"loop (a share of distinct 4-grams under {LOOPS_UNDER}); means over prompts of accepted tokens and of the speedup "
        f"over plain decoding, the median of {repeat} times each."
    )
    heads = ["", "drafter", "MAT", "speedup", "MAT, looping", "speedup, looping", "same as plain"]
    return section("With the auxiliary drafter", about, heads, rows)


def mean_of(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.mean(found):.3f}" if found else "-"


def note(what: str, found: object) -> None:
    print(f"# {what}: {found}", flush=True)


def section(title: str, about: str, heads: list[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]
    return f"## {title}\n\n{about}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
