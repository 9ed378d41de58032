"""Replay: what a drafter would have saved on outputs that were recorded before, without a model.

Each trace is one sequence. The drafter gets the prompt, then the first output token as prefill gives it; then, step
after step, it drafts, what agrees with the recorded output is accepted, and the recorded token after it is the bonus
token. Nothing past the recorded end is accepted.

**Mean accepted tokens** (MAT): committed tokens a step, over all traces together; bonus tokens and the end-of-sequence
token count, prefill's step and its first token do not. 1.00 is plain autoregressive decoding. **Nodes a step** are
those that would be verified, roots excluded. **Drafting time** is all the drafter's own work (``open``, ``propose``,
``observe``, ``close``) over the number of steps, after everything was compiled; **reducing time** is that of
calibration, selection and the budget, and **memory time** that of taking a finished output into the memory.

What is drafted is calibrated, then cut by `outpace.reduce.select`: to ``max_nodes``, and to a budget where there is one.
With a memory, the outputs of the traces before feed the drafters: nothing is known of a trace before it is replayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outpace._compile import compiled
from outpace.bench.reliability import Reliability, ReliabilityLog
from outpace.bench.traces import Trace
from outpace.draft import Drafter, build_drafter
from outpace.draft.sources import Sources
from outpace.errors import ConfigError
from outpace.reduce import Calibrator, NodeBudget, select
from outpace.suffix.corpus import Corpus
from outpace.suffix.memory import ResponseMemory
from outpace.tree import DraftTrees, Int32Array, Verdicts

MAX_NODES = 64  # of one step, where nothing else is said
_KEY = 0
_WARM_UP = "warm-up"  # a namespace
_NO_PATH = np.zeros(0, np.int32)
_NO_PATH_OFFSETS = np.zeros(2, np.int32)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of one replay.

    Attributes:
        drafter: Its spec.
        mean_accepted_tokens: Committed tokens a step.
        by_category: The same for each category of traces.
        nodes_per_step: Drafted nodes that were verified, a step.
        draft_us_per_step: Microseconds of the drafter's own work, a step.
        steps: Verify steps.
        tokens: Tokens that they committed.
        traces: Recorded outputs.
        max_nodes: Limit of each tree's nodes.
        budget: Limit of the mean number of nodes a step, or None.
        memory: Whether the outputs before fed the drafter.
        corpora: Folders of the corpora that fed it.
        reduce_us_per_step: Microseconds of calibration, selection and the budget, a step.
        memory_us_per_step: Microseconds of taking outputs into the memory, over the steps.
        calibration: Estimates against outcomes, of all nodes and by set of origins; None if it was not asked for.
    """

    drafter: str
    mean_accepted_tokens: float
    by_category: dict[str, float]
    nodes_per_step: float
    draft_us_per_step: float
    steps: int
    tokens: int
    traces: int
    max_nodes: int
    budget: float | None = None
    memory: bool = False
    corpora: tuple[str, ...] = ()
    reduce_us_per_step: float = 0.0
    memory_us_per_step: float = 0.0
    calibration: tuple[Reliability, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    draft_ns: int = 0
    reduce_ns: int = 0
    memory_ns: int = 0

    def add(self, other: _Counts) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.draft_ns += other.draft_ns
        self.reduce_ns += other.reduce_ns
        self.memory_ns += other.memory_ns


@dataclass(slots=True)
class Replay:
    """A replay under way: add traces one by one, then take the `result`.

    Attributes:
        drafter: What drafts.
        name: How the result calls it.
        max_nodes: Limit of each tree's nodes.
        sources: What the drafter knows beside each request; outputs go into its memory, if it has one.
        budget: Limit of the mean number of nodes a step, or None.
        reliability: Where judged nodes are noted, or None.
    """

    drafter: Drafter
    name: str
    max_nodes: int = MAX_NODES
    sources: Sources = field(default_factory=Sources)
    budget: NodeBudget | None = None
    reliability: ReliabilityLog | None = None
    _calibrator: Calibrator = field(default_factory=Calibrator)
    _total: _Counts = field(default_factory=_Counts)
    _by_category: dict[str, _Counts] = field(default_factory=dict)
    _traces: int = 0

    def add(self, trace: Trace, namespace: str = "") -> None:
        """Replay one trace, then remember its output."""
        counts = self._replay(trace, namespace)
        self._traces += 1
        for part in (self._total, self._by_category.setdefault(trace.category, _Counts())):
            part.add(counts)

    @property
    def result(self) -> ReplayResult:
        """The figures so far; means over no steps are 0."""
        total, steps = self._total, max(self._total.steps, 1)
        return ReplayResult(
            drafter=self.name,
            mean_accepted_tokens=total.tokens / steps,
            by_category={name: c.tokens / max(c.steps, 1) for name, c in sorted(self._by_category.items())},
            nodes_per_step=total.nodes / steps,
            draft_us_per_step=total.draft_ns / 1000 / steps,
            steps=total.steps,
            tokens=total.tokens,
            traces=self._traces,
            max_nodes=self.max_nodes,
            budget=None if self.budget is None else self.budget.nodes_per_step,
            memory=self.sources.memory is not None,
            corpora=tuple(str(corpus.folder) for corpus in self.sources.corpora),
            reduce_us_per_step=total.reduce_ns / 1000 / steps,
            memory_us_per_step=total.memory_ns / 1000 / steps,
            calibration=None if self.reliability is None else self.reliability.curves(),
        )

    def _replay(self, trace: Trace, namespace: str) -> _Counts:
        clock, drafter, recorded = time.perf_counter_ns, self.drafter, trace.output_ids
        keys, caps = [_KEY], np.full(1, self.max_nodes, np.int32)
        counts = _Counts()
        first = _verdicts(_NO_PATH, recorded[:1])
        begin = clock()
        drafter.open(_KEY, trace.prompt_ids, namespace)
        drafter.observe(keys, first)
        counts.draft_ns += clock() - begin
        at = 1
        while at < len(recorded):
            begin = clock()
            drafted = drafter.propose(keys, caps)
            proposed = clock()
            corrected, trees = self._reduced(drafted)
            counts.draft_ns += proposed - begin
            counts.reduce_ns += clock() - proposed

            path = _accepted(trees.tokens, trees.parents, recorded, at)
            committed = recorded[at : at + len(path) + 1]
            verdicts = _verdicts(path, committed)
            begin = clock()
            drafter.observe(keys, verdicts)
            observed = clock()
            self._calibrator.record(drafted, verdicts)
            counts.draft_ns += observed - begin
            counts.reduce_ns += clock() - observed
            if self.reliability is not None:
                self.reliability.record(drafted, corrected, verdicts)
            at += len(committed)
            counts.steps += 1
            counts.tokens += len(committed)
            counts.nodes += trees.num_nodes
        begin = clock()
        drafter.close(_KEY)
        closed = clock()
        counts.draft_ns += closed - begin
        if self.sources.memory is not None:
            self.sources.memory.remember(namespace, recorded)
            self.sources.memory.flush()
            counts.memory_ns += clock() - closed
        return counts

    def _reduced(self, drafted: DraftTrees) -> tuple[DraftTrees, DraftTrees]:
        """The trees with corrected estimates, and what is kept of them."""
        corrected = self._calibrator.apply(drafted)
        if self.budget is None:
            return corrected, select(corrected, self.max_nodes)
        min_path_prob, total = self.budget.offer(corrected, self.max_nodes)
        kept = select(corrected, self.max_nodes, total=total, min_path_prob=min_path_prob)
        self.budget.spend(kept.num_nodes)
        return corrected, kept


def start_replay(
    drafter: str | Drafter,
    traces: Iterable[Trace],
    max_nodes: int = MAX_NODES,
    *,
    memory: bool = False,
    corpora: SequenceOf[Corpus] = (),
    budget: float | None = None,
    calibration: bool = False,
) -> Replay:
    """Build the drafter, tell it the recorded outputs if it needs them (``oracle``), and compile what it runs.

    Args:
        drafter: A spec, or a drafter with no open sequences. A drafter keeps what it learned from a short text of chance
            tokens that everything is compiled with; of a spec two are built, one for that.
        traces: All that will be added. Of several with the same prompt, ``oracle`` knows the last.
        max_nodes: Limit of each tree's nodes; the drafter's own may be lower.
        memory: Let each trace's output feed the drafters of later traces of its namespace.
        corpora: Let these feed the drafters.
        budget: Limit of the mean number of nodes a step, over the run and at every moment of it; None for none.
        calibration: Note estimates against outcomes.

    Raises:
        ConfigError: The drafter or a limit cannot be used, or a drafter that is built already is to be fed.
    """
    if max_nodes < 0:
        raise ConfigError(f"max_nodes must be at least 0, found {max_nodes}")
    if isinstance(drafter, Drafter) and (memory or corpora):
        raise ConfigError("memory and corpora are given to a drafter when it is built: name it by a spec")
    warm_up = _warm_up_trace()
    known = {tuple(t.prompt_ids.tolist()): t.output_ids.tolist() for t in (*traces, warm_up)}
    name = drafter if isinstance(drafter, str) else drafter.name

    def new_replay() -> Replay:
        sources = Sources(ResponseMemory(background=False) if memory else None, tuple(corpora))
        bounded = None if budget is None else NodeBudget(budget)
        log = ReliabilityLog() if calibration else None
        return Replay(build_drafter(drafter, known, sources), name, max_nodes, sources, bounded, log)

    rehearsal = new_replay()
    for _ in range(2 if memory else 1):  # the second time with something to remember
        rehearsal.add(warm_up, _WARM_UP)
    return new_replay()


def replay_traces(
    traces: Iterable[Trace],
    drafter: str | Drafter,
    max_nodes: int = MAX_NODES,
    *,
    memory: bool = False,
    corpora: SequenceOf[Corpus] = (),
    budget: float | None = None,
    calibration: bool = False,
) -> ReplayResult:
    """Replay recorded outputs through a drafter; see `start_replay`."""
    traces = list(traces)
    run = start_replay(
        drafter, traces, max_nodes, memory=memory, corpora=corpora, budget=budget, calibration=calibration
    )
    for trace in traces:
        run.add(trace)
    return run.result


def _warm_up_trace() -> Trace:
    """A text that takes a drafter through its paths: matches, misses, text that outgrows what was reserved."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 40, 1200).astype(np.int32)
    text[600:700] = text[500:600]
    return Trace(text[:100], text[100:])


def _verdicts(path: Int32Array, committed: Int32Array) -> Verdicts:
    """Verdicts of a batch of one."""
    path_offsets = np.array([0, len(path)], np.int32) if len(path) else _NO_PATH_OFFSETS
    return Verdicts(path_offsets, path, np.array([0, len(committed)], np.int32), committed)


@compiled
def _accepted(tokens: Int32Array, parents: Int32Array, recorded: Int32Array, at: int) -> Int32Array:
    """The nodes of one tree that agree with ``recorded[at:]``, from the root downwards."""
    path = np.empty(min(len(tokens), len(recorded) - at), np.int32)
    depth, node = 0, -1
    for candidate in range(len(tokens)):  # parents come first, so one pass finds the whole path
        if depth == len(path):
            break
        if parents[candidate] == node and tokens[candidate] == recorded[at + depth]:
            path[depth] = candidate
            node = candidate
            depth += 1
    return path[:depth]
