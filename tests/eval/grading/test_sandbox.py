"""Hostile programs, and what is left of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ospruner.eval.grading.sandbox import Ran, check_sandbox, run_program

try:
    check_sandbox()
except ValueError as why:
    pytest.skip(str(why), allow_module_level=True)

REFUSED = Ran("error", "PermissionError")


def test_a_program_runs_and_says_its_result() -> None:
    assert run_program("import math; result = math.comb(5, 2)") == Ran("done", 10)
    assert run_program("result = [x * 2 for x in given]", given={"given": [1, 2]}).result == [2, 4]
    assert run_program("1 / 0") == Ran("error", "ZeroDivisionError")
    threads = "import threading as t; a = t.Thread(target=int); a.start(); a.join(); result = 1"
    assert run_program(threads) == Ran("done", 1)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.Popen(['true'])",
        "import multiprocessing as m; m.Process(target=print).start()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.setsid()",
        "import os; os.kill(os.getppid(), 9)",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import socket; socket.socket(socket.AF_UNIX)",
        "open('file', 'w')",
        "import os; os.mkdir('folder')",
        "import os; os.memfd_create('memory')",
        "open('/etc/passwd')",
        "open(f'/proc/{__import__(\"os\").getppid()}/environ')",
        "open('/proc/self/environ')",
    ],
)
def test_what_reaches_beyond_is_refused(program: str) -> None:
    assert run_program(program) == REFUSED


def test_files_stay_what_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    mode, time = kept.stat().st_mode, kept.stat().st_mtime_ns
    name = str(kept)
    for program in (
        f"import os; os.remove({name!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"open({name!r}, 'a').write('more')",
        f"import os; os.truncate({name!r}, 0)",
        f"import os; os.rename({name!r}, {name + '2'!r})",
        f"import os; os.symlink({name!r}, {name + '2'!r})",
        f"import os; os.chmod({name!r}, 0)",
        f"import os; os.utime({name!r})",
    ):
        assert run_program(program) == REFUSED, program
    assert kept.read_text() == "kept"
    assert (kept.stat().st_mode, kept.stat().st_mtime_ns) == (mode, time)
    assert os.listdir(tmp_path) == ["kept"]


def test_no_secret_is_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    ran = run_program("import os; result = dict(os.environ)")
    assert ran.ended == "done"
    assert "SECRET_KEY" not in ran.result


def test_time_and_memory_have_an_end() -> None:
    assert run_program("import time; time.sleep(600)", 2).ended == "time limit"
    assert run_program("while True: pass", 2).ended == "time limit"
    assert run_program("while True: print('x' * 10**6)", 2).ended == "time limit"
    assert run_program("x = bytearray(1 << 40)").ended == "memory"
    flood = "import os\nwhile True: [os.write(fd, b'x' * 9999) for fd in range(3, 9) if ok(fd)]"
    ok = "def ok(fd):\n    try: return os.write(fd, b'') == 0\n    except OSError: return False\n"
    assert run_program(ok + flood, 20).ended == "output"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("import os; os._exit(0)", "error"),
        ("raise SystemExit(0)", "error"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("def f(): f()\nf()", "error"),
        ("print('locked'); print('00 true')", "done"),
    ],
)
def test_an_end_before_the_last_line_is_no_success(program: str, ended: str) -> None:
    ran = run_program(program)
    assert (ran.ended, ran.result if ended == "done" else None) == (ended, None)


def test_installed_packages_are_out_of_reach_unless_asked_for() -> None:
    wanted = "import math_verify; result = 1"
    assert run_program(wanted) == Ran("error", "ModuleNotFoundError")
    packages = [path for path in sys.path if path.endswith("-packages")]
    assert packages
    assert run_program("import yaml; result = 1", 60, packages=True) == Ran("done", 1)
