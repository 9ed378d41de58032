"""Shards built side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import IO

from outpace.corpora.worker import Job, build_shard
from outpace.errors import CorpusError
from outpace.suffix.corpus import ShardEntry

_IN_THIS_PROCESS = 2**21  # tokens; starting another costs as long as building these
_POLL = 0.1  # seconds
_ONE_THREAD = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Tell = Callable[[list[ShardEntry], list[int]], None]


@dataclass(eq=False)
class _Worker:
    """A process, and where its output goes."""

    job: Job
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]


def run_jobs(jobs: SequenceOf[Job], num_tokens: int, num_workers: int, tell: Tell) -> tuple[list[ShardEntry], int]:
    """Build every shard.

    Processes are used unless there is little to do: compiled code cannot be interrupted, a process can.

    Args:
        jobs: The shards.
        num_tokens: Of all shards.
        num_workers: How many processes at a time.
        tell: Called several times a second with the shards that are done and the numbers of the processes.

    Returns:
        The shards' entries in the order of the jobs, and the most bytes that a process held.

    Raises:
        OSError: A shard cannot be written.
        MemoryError: A process got no memory.
        CorpusError: A process ended in another way.
    """
    if len(jobs) == 1 and num_tokens <= _IN_THIS_PROCESS:
        return [build_shard(jobs[0])], 0
    waiting = list(reversed(jobs))
    running: list[_Worker] = []
    done: dict[str, ShardEntry] = {}
    most = 0
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_start(waiting.pop()))
            time.sleep(_POLL)
            for worker in [worker for worker in running if worker.process.poll() is not None]:
                entry, peak = _result_of(worker)
                running.remove(worker)
                done[entry.name] = entry
                most = max(most, peak)
            tell(list(done.values()), [worker.process.pid for worker in running])
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.wait()
            _close_input(worker)
    return [done[job.name] for job in jobs], most


def _start(job: Job) -> _Worker:
    """Start a worker that a Ctrl-C in the terminal does not reach: ending it is up to this process.

    With ``-P``, modules in the current folder do not stand in for installed ones. The worker's standard input stays open
    and empty as long as this process lives; at its end, the worker ends.
    """
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read when it has ended
    program = [sys.executable, "-P", "-m", "outpace.corpora.worker"]
    command = [*program, str(job.folder), job.name, str(job.first), str(job.last)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **_ONE_THREAD}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=errors, env=environment, start_new_session=True
    )
    return _Worker(job, process, output, errors)


def _close_input(worker: _Worker) -> None:
    if worker.process.stdin is not None:
        worker.process.stdin.close()


def _result_of(worker: _Worker) -> tuple[ShardEntry, int]:
    _close_input(worker)
    worker.output.seek(0)
    worker.errors.seek(0)
    with worker.output, worker.errors:
        output, errors = worker.output.read(), worker.errors.read().decode("utf-8", "replace")
    status = worker.process.returncode
    if status == -signal.SIGKILL:
        raise MemoryError
    try:
        told = json.loads(output) if status == 0 else None
    except ValueError:
        told = None
    if told is None:
        said = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
        raise CorpusError(f"the process that built {worker.job.name} failed: {said}")
    if "out_of_memory" in told:
        raise MemoryError
    if "shard" not in told:
        raise OSError(told["errno"], told["strerror"]) if told["errno"] else OSError(told["strerror"])
    return ShardEntry(**told["shard"]), int(told["peak"])
