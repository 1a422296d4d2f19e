"""Independent pieces of work side by side, in processes of one thread each.

What a job computes does not depend on how many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import Queue
from typing import Any, Protocol, TypeVar

import torch

from .progress import Progress

__all__ = ["Job", "run_jobs"]

Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    """A function of a module, or a `functools.partial` of one: it is sent to another process."""

    def __call__(self, *, progress: Progress) -> Result:
        """Does the work, and tells how far it is."""


_SECONDS_BETWEEN_LOOKS = 0.2
_told: Queue[Any]  # in a worker: where what is done is told


def run_jobs(
    jobs: Mapping[str, Job[Result]], processes: int, progress: Progress
) -> dict[str, Result]:
    """Runs jobs, as many at a time as there are processes, in the order given.

    Where one fails, or this process ends, the others are ended; so each should be able to go on
    from where it was.

    Args:
        jobs: by name.
        processes: how many at a time; 1 or more.
        progress: called for each job with the phase "NAME: PHASE".

    Returns:
        What each returned, by name.

    Raises:
        BaseException: what the first job that failed has raised, or `BrokenProcessPool` where its
            process died.
    """
    context = multiprocessing.get_context("spawn")
    told: Queue[Any] = context.Queue()
    others = set(multiprocessing.active_children())

    def draw() -> None:
        while not told.empty():
            name, phase, *state = told.get()
            progress(f"{name}: {phase}", *state)

    size = min(processes, len(jobs))
    with ProcessPoolExecutor(size, context, initializer=_begin, initargs=(told,)) as pool:
        try:
            futures = {name: pool.submit(_do, job, name) for name, job in jobs.items()}
            left: set[Future[Result]] = set(futures.values())
            while left:
                done, left = wait(left, _SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
                draw()
                for future in done:
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise
    draw()
    return {name: future.result() for name, future in futures.items()}


def _begin(told: Queue[Any]) -> None:
    """What a worker does first: one thread, and no life without its parent."""
    global _told
    _told = told
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot end its workers, and they hold locks of folders


def _do(job: Job[Result], name: str) -> Result:
    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        _told.put((name, phase, done, total, note))

    return job(progress=progress)
