"""One shard: from the spool to a file. Run as a program, it is a worker process that builds one shard and ends.

``python -m outpace.corpora.worker FOLDER NAME FIRST LAST`` prints a JSON object: the shard's entry of the manifest and
the largest resident size, or what went wrong. Its standard input is a pipe that nobody writes to: when that ends, the
process that wanted the shard is gone, and the worker ends as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from outpace.corpora.memory import peak_resident
from outpace.corpora.spool import read_spool
from outpace.suffix.corpus import ShardEntry, describe_file
from outpace.suffix.frozen import FrozenAutomaton
from outpace.suffix.image import NUM_EDGES, NUM_STATES


@dataclass(frozen=True, slots=True)
class Job:
    """A shard to build.

    Attributes:
        folder: Where the spool is, and where the shard goes.
        name: Name of its file.
        first: Its first document in the spool.
        last: The document after its last one.
    """

    folder: Path
    name: str
    first: int
    last: int


def build_shard(job: Job) -> ShardEntry:
    """Build a shard and write it.

    Raises:
        OSError: It cannot be written, for instance because the disk is full.
    """
    tokens, offsets = read_spool(job.folder, job.first, job.last)
    automaton = FrozenAutomaton.build(tokens, offsets)
    path = job.folder / job.name
    automaton.save(path)
    header = automaton.image
    counts = (automaton.num_documents, automaton.num_tokens, int(header[NUM_STATES]), int(header[NUM_EDGES]))
    del automaton, header, tokens  # its memory, before the file is read
    entry = describe_file(path)
    return ShardEntry(entry.name, entry.bytes, entry.sha256, *counts)


def _end_with_input() -> None:
    while os.read(0, 1):  # not through the file, whose lock exit waits for
        pass
    os._exit(1)


def _main(arguments: list[str]) -> None:
    folder, name, first, last = arguments
    told: dict[str, object]
    try:
        told = {"shard": dataclasses.asdict(build_shard(Job(Path(folder), name, int(first), int(last))))}
    except OSError as error:
        told = {"errno": error.errno, "strerror": error.strerror or str(error)}
    except MemoryError:
        told = {"out_of_memory": True}
    print(json.dumps({**told, "peak": peak_resident()}))


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    _main(sys.argv[1:])
