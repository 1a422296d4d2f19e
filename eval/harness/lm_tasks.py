"""Problems of a `Task` as a task of lm_eval: asked, read and graded as in `ospruner eval online`.

A YAML file of lm_eval names the class and says in `dataset_kwargs` what `ProblemsTask` takes:

    task: arc
    class: !function ospruner.eval.harness.lm_tasks.ProblemsTask
    dataset_kwargs: {dataset: arc-challenge, split: test, task: choice}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from ospruner.formats import DEEPSEEK_R1

from ..problems.problem import Problem
from ..problems.registry import parse_task
from ..problems.sources import load_source

TAKEN = ("split", "files", "task", "prompt")


class ProblemsTask(ConfigurableTask):
    """A set of problems, as one of our tasks asks and grades it.

    Metrics: `acc`, the mean grade (an answer without a verdict counts 0), and `ungraded`, the share
    of answers without one; a reply without an answer is wrong, not ungraded.

    Args:
        config: lm_eval's settings of a task. `task` names it; `dataset_kwargs` holds `dataset`,
            `split` and `files` as `load_source` takes them, `task` ("math", "choice:force=answer",
            "FILE.py"; default "math"), and `prompt` (one of PROMPT_PRESETS).

    Raises:
        FileNotFoundError: a file that does not exist.
        ValueError: an unknown setting, task or split, or problems that the task cannot grade here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        own = {name: value for name, value in config.items() if name != "class"}
        given = dict(own.pop("dataset_kwargs", None) or {})
        unknown = sorted(set(given) - {"dataset", *TAKEN})
        if "dataset" not in given or unknown:
            raise ValueError(
                f"dataset_kwargs is {given}; it needs `dataset`, and may hold {', '.join(TAKEN)}, "
                f"not {unknown}"
            )
        self.domain = parse_task(given.get("task", "math"), given.get("prompt", "default"))
        self.domain.check()
        source = {"files": given.get("files", ()), "split": given.get("split")}
        problems = load_source(given["dataset"], **source, read=self.domain.read_row).problems
        rows = Dataset.from_list([vars(problem) for problem in problems])
        defaults = {
            "task": f"ospruner_{self.domain.name}",
            "custom_dataset": lambda **_: {"test": rows},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": self._asked,
            "doc_to_target": "{{answer}}",
            "process_results": self._graded,
            "metric_list": [
                {"metric": name, "higher_is_better": name == "acc", "aggregation": "mean"}
                for name in ("acc", "ungraded")
            ],
            "generation_kwargs": {"until": []},
            "metadata": {"version": 1},
        }
        super().__init__(config={**defaults, **own})

    def _asked(self, row: Mapping[str, Any]) -> str:
        return self.domain.message(Problem(**row), DEEPSEEK_R1)

    def _graded(self, row: Mapping[str, Any], replies: Sequence[str]) -> dict[str, float]:
        answer = self.domain.read_free(replies[0]) or ""
        (grade,) = self.domain.grade_many([(answer, Problem(**row))])
        undecided = grade.value is None and bool(answer)
        return {"acc": grade.value or 0.0, "ungraded": float(undecided)}
