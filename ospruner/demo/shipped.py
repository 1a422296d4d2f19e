"""The embedded reasoner, loaded: the engine that runs it, and how its traces are labelled."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.durable import replace_file
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Math
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.train.labels.label import LabelConfig
from ospruner.train.labels.making import Labeller, label_problems

from . import REASONER
from .problems import Split, iterate_problems

MAX_THINKING_TOKENS = 800
MAX_ANSWER_TOKENS = 16
# As `ospruner label` has it, so that its labels and the demo's policies go together.
FORMAT = replace(DEEPSEEK_R1, step_tokens=LabelConfig.step_tokens)


class Reasoner:
    """An embedded reasoner with what it takes to sample and label its traces.

    Attributes:
        folder: Its folder.
        model: The base, in float32.
        tokenizer: Its tokenizer.
        token_format: How it writes its thinking.
        engine: The transformers engine that runs it.
    """

    def __init__(self) -> None:
        disable_progress_bar()  # transformers' own bars would break into ours
        self.folder = REASONER
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32
        )
        self.token_format = TokenFormat.compile(FORMAT, self.tokenizer)
        self.engine = TransformersEngine(self.model, self.tokenizer, batch_size=256)

    def label_settings(self, seed: int) -> LabelSettings:
        """How its traces are made: T = 0.6, top-p 0.95, forced answers."""
        return LabelSettings(
            base_model=str(self.folder),
            reasoning_format=FORMAT.to_dict(),
            seed=seed,
            max_new_tokens=MAX_THINKING_TOKENS,
            max_answer_tokens=MAX_ANSWER_TOKENS,
            task=Math().settings,
        )

    def label(self, problems: Sequence[Problem], out_dir: Path, seed: int) -> Dataset:
        """Sample and label one trace a problem in `out_dir`; a stopped run continues."""
        labeller = Labeller(self.tokenizer, self.token_format, self.label_settings(seed))
        return label_problems(problems, self.engine, labeller, out_dir, chunk_traces=512)


def draw_split(split: Split, count: int, seed: int) -> list[Problem]:
    """The first `count` problems of a split, as labelling takes them."""
    return [problem.as_problem() for problem in islice(iterate_problems(split, seed), count)]


def write_split(out: Path, split: Split, count: int, seed: int) -> Path:
    """Writes the first `count` problems of a split to `out/SPLIT.jsonl`, which it returns."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(vars(one)) for one in draw_split(split, count, seed)]
    replace_file(file := out / f"{split}.jsonl", "\n".join([*lines, ""]).encode())
    return file
