"""FlashThink, a baseline: a verifier model of its own judges whether the thinking suffices.

The verifier is any causal LM; it reads the problem and the thinking so far in a prompt, through its
own tokenizer. Its last layers and a linear head are tuned to say whether an answer forced here is
right (the paper's section on baselines; it tunes two layers of Qwen2.5-7B-Instruct). As the
thinking stands last in the prompt, one causal pass reads it at every step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.modeling_ospruner import WEIGHTS, load_base, load_policy
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.bases import dtype_on
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import IntArray, TraceTable
from ospruner.provenance import check_place

from .traces import LabelledTraces

PROMPT = (
    "Another model is thinking about a problem. Judge after each paragraph of its thinking whether "
    "the thinking so far suffices to give the right answer.\n\nProblem:\n{problem}\n\n"
    "Thinking so far:\n"
)
"""What the verifier reads before the thinking; inside a user turn where it has a chat template."""

_ABOUT = "flashthink.json"
_THINKING = "<<thinking>>"


@dataclass
class Verifier:
    """A verifier with its tuned copy of the last layers and head: what the training loop trains."""

    base: PreTrainedModel  # the frozen verifier model
    policy: StoppingPolicy  # what is tuned; its logits say whether the thinking suffices
    config: OSPrunerConfig  # names the verifier as the base
    traces_of: tuple[str, str | None]  # name and revision of the model whose traces it judges

    @classmethod
    def load(cls, folder: str | Path, labelled: LabelSettings, device: torch.device) -> Verifier:
        """What `save_pretrained` wrote, with the verifier model that it names, on a device.

        Raises:
            ValueError: it was trained on other traces than those with these settings.
        """
        config = OSPrunerConfig.from_pretrained(folder)
        about = json.loads((Path(folder) / _ABOUT).read_text("utf-8"))
        theirs = (about["traces_of"], about["traces_of_revision"], config.step_stride)
        ours = (labelled.base_model, labelled.base_revision, labelled.step_stride)
        if theirs != ours:
            told = ("{} at revision {} with step_stride {}".format(*one) for one in (theirs, ours))
            raise ValueError(
                "{} was trained on traces of {}, these are of {}: train FlashThink on traces like "
                "these".format(folder, *told)
            )
        base = load_base(config, {}, {"dtype": dtype_on(device, config.base_model_name_or_path)})
        torch.nn.Module.to(base, device)
        return cls(base, load_policy(str(folder), config, base, {}), config, ours[:2])

    def save_pretrained(self, folder: Path) -> None:
        """Saves what was tuned, its configuration, and the prompt in a folder."""
        self.config.save_pretrained(folder)
        write_own(self.policy, folder)
        name, revision = self.traces_of
        about = {"prompt": PROMPT, "traces_of": name, "traces_of_revision": revision}
        (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", "utf-8")


def write_own(policy: StoppingPolicy, folder: Path) -> None:
    """Writes a policy's own tensors; not by `save_file`, whose files only their owner may read."""
    own, tensors = policy.own_names(), policy.state_dict()
    named = {f"policy.{name}": tensor for name, tensor in tensors.items() if name in own}
    (folder / WEIGHTS).write_bytes(save(named, metadata={"format": "pt"}))


def load_verifier_base(
    name: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A verifier, the folder or Hub id of any causal LM, read on a device; and its tokenizer."""
    check_place("verifier", name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype_on(device, name)), tokenizer


def verifier_traces(
    dataset: Dataset,
    base_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
    states: str | None = None,
) -> LabelledTraces:
    """Labelled traces of a base as the verifier reads them: its own tokens, the labels unchanged.

    The text of each step is tokenized by itself, so that what is read at a step's end does not
    depend on what comes after it.
    """
    table = TraceTable.from_dataset(dataset)
    sequences: list[IntArray] = []
    positions = np.zeros(table.mask.shape, dtype=np.int64)
    for n, row in enumerate(dataset.select_columns(["problem", "trace_ids", "step_ends"])):
        ids, ends = _prompt_ids(row["problem"], tokenizer), row["step_ends"]
        for t, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            text = base_tokenizer.decode(row["trace_ids"][start:end])
            ids += tokenizer.encode(text, add_special_tokens=False)
            positions[n, t] = len(ids) - 1
        sequences.append(np.array(ids, dtype=np.int64))
    return LabelledTraces(table, sequences, positions, states)


def tokens_read(traces: LabelledTraces) -> IntArray:
    """(N, T) tokens that the verifier has read at each step: its prompt and the thinking so far."""
    return np.where(traces.table.mask, traces.positions + 1, 0)


def _prompt_ids(problem: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = PROMPT.format(problem=problem)
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text + _THINKING}]
    rendered = str(tokenizer.apply_chat_template(turn, tokenize=False))
    before, found, _ = rendered.partition(_THINKING)
    if not found:
        raise ValueError(
            "the verifier's chat template changes or drops the user's text, so that the thinking "
            "cannot be put behind the problem: choose another verifier"
        )
    return list(tokenizer.encode(before, add_special_tokens=False))
