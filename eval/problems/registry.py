"""Tasks by name, and tasks again from the settings that labels and policies pin."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ospruner.rules.families import run_file

from .domains import Choice, Exact
from .task import Math, Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Math, Choice, Exact)}
"""The built-in tasks by name."""


def parse_task(text: str, prompt: str = "default") -> Task:
    """The task that a user named.

    Args:
        text: a name of `TASKS`, a .py file with a subclass of `Task`, either with settings behind
            it: "choice:force=answer".
        prompt: one of `task.PROMPT_PRESETS`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: no such task, or a setting that it does not take.
    """
    name, _, given = text.partition(":")
    parts = [part.partition("=") for part in given.split(",") if part]
    if bad := [key for key, sign, _ in parts if not sign]:
        raise ValueError(f"task is {text!r}: {bad} are no settings; write name:setting=value")
    settings: dict[str, Any] = {"name": name, **{key: value for key, _, value in parts}}
    if name.endswith(".py"):
        settings["file"] = name
    if prompt != "default":
        settings["prompt"] = prompt
    return open_task(settings)


def open_task(settings: Mapping[str, Any]) -> Task:
    """The task of settings (`Task.settings`).

    Args:
        settings: its name, and what was chosen.

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: no such task, a setting that it does not take, or a file that has changed.
    """
    chosen = dict(settings)
    name, file, hashed = chosen.pop("name"), chosen.pop("file", None), chosen.pop("sha256", None)
    if file is None and name not in TASKS:
        raise ValueError(
            f"task is {name!r}; it must be one of {', '.join(TASKS)}, or a .py file with a "
            "subclass of Task"
        )
    kind = TASKS[name] if file is None else load_task_class(file)
    allowed = set(inspect.signature(kind).parameters)
    if unknown := sorted(set(chosen) - allowed):
        raise ValueError(f"the task {name} takes the settings {sorted(allowed)}, not {unknown}")
    task = kind(**chosen)
    if hashed not in (None, kind.sha256):
        raise ValueError(
            f"the task {Path(str(file))} has changed since it was used here: take back the change, "
            "or label anew in another folder"
        )
    return task


def load_task_class(path: str | Path) -> type[Task]:
    """The one subclass of `Task` in a Python file, which is run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be run, or defines none, or several.
    """
    path, module = Path(path), f"ospruner_task_{Path(path).stem}"
    values = run_file(path, "task", "a subclass of Task", module).values()
    classes = [value for value in values if inspect.isclass(value)]
    found = [one for one in classes if issubclass(one, Task) and one.__module__ == module]
    if len(found) != 1:
        raise ValueError(f"{path} defines {len(found)} subclasses of Task; it must define one")
    kind: type[Task] = found[0]
    kind.file, kind.sha256 = str(path), hashlib.sha256(path.read_bytes()).hexdigest()
    return kind
