"""Jobs in processes of their own: results, progress, failure, and no life without the parent."""

import importlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ospruner.workers import Workers

MODULE = """
import os, time
import torch

def square(number, *, progress):
    progress("square", number**2, os.getpid(), str(torch.get_num_threads()))

def wait_for_ever(mark, *, progress):
    mark.write_text(str(os.getpid()))
    time.sleep(600)

def fail_after(mark, *, progress):
    while not mark.exists() or not mark.read_text():
        time.sleep(0.05)
    raise ValueError("this one fails")
"""


PARENT = """
import sys
from functools import partial
from pathlib import Path
from functions_of_jobs import wait_for_ever
from ospruner.workers import Workers
if __name__ == "__main__":
    with Workers(1) as workers:
        workers.run({"one": partial(wait_for_ever, Path(sys.argv[1]))}, lambda *state: None)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Functions that other processes can import."""
    (tmp_path / "functions_of_jobs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "functions_of_jobs", raising=False)
    return importlib.import_module("functions_of_jobs")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: int) -> bool:
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_jobs_run_on_a_thread_elsewhere_and_a_failure_ends_all(module: Any, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int, str]] = {}

    def noted(phase: str, done: int, total: int, note: str = "") -> None:
        seen[phase] = (done, total, note)

    jobs = {str(number): partial(module.square, number) for number in (3, 4, 5)}
    mark = tmp_path / "pid"
    both = {"waits": module.wait_for_ever, "fails": module.fail_after}
    failing = {name: partial(job, mark) for name, job in both.items()}

    def run_all() -> None:
        with Workers(2) as workers:
            for one in (jobs, {"6": partial(module.square, 6)}, failing):
                workers.run(one, noted)

    with pytest.raises(ValueError, match="this one fails"):
        run_all()
    assert ends(int(mark.read_text()))
    squares, processes, threads = zip(*seen.values(), strict=True)
    found = dict(zip(seen, squares, strict=True))
    assert found == {f"{number}: square": number**2 for number in (3, 4, 5, 6)}
    assert os.getpid() not in processes
    assert len({*processes}) <= 2, "they stay for the next jobs"
    assert {*threads} == {"1"}


@pytest.mark.usefixtures("module")
def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(mark)])
    while not mark.exists() or not mark.read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    worker = int(mark.read_text())
    assert alive(worker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert ends(worker)
