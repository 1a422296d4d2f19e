"""Tasks by name, and tasks again from the settings that labels and policies pin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .domains import Choice, Exact
from .generated import Generated
from .programs import Code
from .task import Math, Task, load_task_class

__all__ = ["TASKS", "open_task", "parse_task"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Math, Choice, Exact, Code, Generated)}
"""The built-in tasks by name."""


def parse_task(text: str, prompt: str = "default", allow_code: bool = False) -> Task:
    """The task that a user named.

    Args:
        text: a name of `TASKS`, a .py file with a subclass of `Task`, either with settings behind
            it: "choice:force=answer".
        prompt: one of `task.PROMPT_PRESETS`.
        allow_code: whether programs that the model wrote may be run.

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
    return open_task(settings, allow_code)


def open_task(settings: Mapping[str, Any], allow_code: bool = False) -> Task:
    """The task of settings (`Task.settings`).

    Args:
        settings: its name, and what was chosen.
        allow_code: whether programs that the model wrote may be run.

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: no such task, a setting that it does not take, or a file that has changed.
    """
    chosen = dict(settings)
    name, file, hashed = chosen.pop("name"), chosen.pop("file", None), chosen.pop("sha256", None)
    if file is not None:
        kind = load_task_class(file)
    elif name in TASKS:
        kind = TASKS[name]
    else:
        raise ValueError(
            f"task is {name!r}; it must be one of {', '.join(TASKS)}, or a .py file with a "
            "subclass of Task"
        )
    taken = list(inspect.signature(kind).parameters)
    if unknown := sorted(set(chosen) - set(taken) | ({"allow_code"} & set(chosen))):
        allowed = [one for one in taken if one != "allow_code"]
        raise ValueError(f"the task {name} takes the settings {allowed}, not {unknown}")
    if "allow_code" in taken:
        chosen["allow_code"] = allow_code
    task = kind(**chosen)
    if hashed is not None and task.settings["sha256"] != hashed:
        raise ValueError(
            f"the task {Path(str(file))} has changed since it was used here: take back the change, "
            "or label anew in another folder"
        )
    return task
