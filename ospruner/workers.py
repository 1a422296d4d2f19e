"""Independent pieces of work side by side, in processes of one thread each.

What a job computes does not depend on how many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from ospruner.progress import Progress

__all__ = ["Job", "Workers"]

Job = Callable[..., object]
"""A function of a module, or a `functools.partial` of one, that is called with `progress` alone."""
_told: Any  # in a worker: the queue by which it tells what is done


class Workers:
    """Processes that run jobs; a context.

    They are started when the first jobs come, and wait for the next until the context ends. Where a
    job fails, or this process ends, they are ended; so each job should be able to go on from where
    it was.

    Args:
        processes: how many jobs run at a time; 1 or more.
        modules: are imported once for all processes of this program, where it has none yet.
    """

    def __init__(self, processes: int, *modules: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(modules))
        # A simple queue: what a job has told is in it before the job's result is known.
        self._told: Any = context.SimpleQueue()
        self._others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(processes, context, _begin, (self._told,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - self._others:
                child.terminate()
        self._pool.shutdown()

    def run(self, jobs: Mapping[str, Job], progress: Progress) -> None:
        """Runs jobs in the order given; what they make, they leave in files.

        Args:
            jobs: by name.
            progress: called for each job with the phase "NAME: PHASE".

        Raises:
            BaseException: what the first job that failed has raised, or `BrokenProcessPool` where
                its process died.
        """

        def listen() -> None:
            for name, phase, *state in iter(self._told.get, None):
                progress(f"{name}: {phase}", *state)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        futures = [self._pool.submit(_do, job, name) for name, job in jobs.items()]
        for done in wait(futures, return_when=FIRST_EXCEPTION).done:
            done.result()
        self._told.put(None)
        listener.join()


def _begin(told: Any) -> None:
    """What a worker does first: one thread, and no life without its parent."""
    global _told
    _told = told
    torch.set_num_threads(1)
    disable_progress_bar()  # transformers' own bars would break into ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot end its workers, and they hold locks of folders


def _do(job: Job, name: str) -> None:
    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        _told.put((name, phase, done, total, note))

    job(progress=progress)
