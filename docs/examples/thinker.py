"""Tunes a model that reasons in its reply into one that thinks first, with second thoughts.

    python docs/examples/thinker.py BASE traces.jsonl.gz --out runs/thinker --models DeepSeek-R1

Each line of the traces is a JSON object with `problem`, `answer`, `reasoning` (a reasoning model's
thinking), `model` and, where they are known, `correct` and `closed`. Right, closed traces of the
named models are learnt, one of a problem (the first-named model's), by LoRA (peft) in transformers'
Trainer. Only the upper layers and the markers' output rows are trained, so that nothing runs
backwards below them. A stopped run goes on from its last checkpoint. BASE may be a thinker that
this made: then it is taught on, with its markers and its chat template as they are.

The folder holds the merged model, a tokenizer with `<think>` and `</think>`, a chat template that
opens the thinking, and `problems.jsonl`: hand that to `ospruner label --set exclude=FILE`, so that
no problem that was learnt is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from ospruner.eval.problems.problem import read_rows
from ospruner.formats import DEEPSEEK_R1

OPENING, CLOSING = "<think>\n", "\n</think>\n\n"


class Learnt(NamedTuple):
    """A conversation to learn: its ids, how many are the prompt's, and the trace's row."""

    ids: list[int]
    prompt: int
    row: dict[str, Any]


def add_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds the markers, and lets the chat template open the thinking.

    Raises:
        SystemExit: the chat template doesn't say where the model's turn begins.
    """
    turns = [{"role": "user", "content": "?"}]
    with_turn = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    without = tokenizer.apply_chat_template(turns, tokenize=False)
    if not str(with_turn).startswith(str(without)) or with_turn == without:
        sys.exit("the chat template has no add_generation_prompt that opens the model's turn")
    tokenizer.add_tokens(["<think>", "</think>"])
    opens = json.dumps(OPENING)
    tokenizer.chat_template += "{%- if add_generation_prompt %}{{- " + opens + " }}{%- endif %}"


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Learnt:
    """The ids of a conversation: question, thinking, and the boxed answer."""
    message = f"{row['problem']}\n\n{DEEPSEEK_R1.user_instruction}"
    turns = [{"role": "user", "content": message}]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    written = (
        row["reasoning"].strip() + CLOSING + f"The final answer is \\boxed{{{row['answer']}}}."
    )
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    return Learnt([*before, *after, tokenizer.eos_token_id], len(before), row)


def choose(given: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Learnt]:
    """The traces to learn, in an order that the seed draws, one of a problem."""
    chosen: dict[str, Learnt] = {}
    rows = [dict(row) for row in read_rows(given.traces)]
    for model in given.models:
        for row in rows:
            right = row.get("correct", True) and row.get("closed", True)
            if row["model"] == model and right and row["problem"] not in chosen:
                one = encode(row, tokenizer)
                if given.min_tokens <= len(one.ids) - one.prompt <= given.max_tokens:
                    chosen[row["problem"]] = one
    learnt = sorted(chosen.values(), key=lambda one: str(one.row["problem"]))
    random.Random(given.seed).shuffle(learnt)
    if not learnt:
        known = sorted({str(row["model"]) for row in rows})
        sys.exit(f"{given.traces} holds no trace that fits: its models are {', '.join(known)}")
    return learnt[: given.limit]


def begin_rows(model: PreTrainedModel, markers: list[int], end: int) -> None:
    """Gives the markers rows to begin with: the mean row, and the end-of-text token's."""
    opening, closing = markers
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            rows: Any = module.weight  # type: ignore[union-attr]
            rows[opening] = rows[:opening].float().mean(0).to(rows.dtype)
            rows[closing] = rows[end]


class EveryMinutes(TrainerCallback):
    """A checkpoint whenever so many minutes have passed."""

    def __init__(self, minutes: float) -> None:
        self.seconds, self.last = 60 * minutes, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for one at the end of an optimiser step."""
        if time.monotonic() - self.last >= self.seconds:
            self.last, control.should_save = time.monotonic(), True


def tune(model: PreTrainedModel, learnt: list[Learnt], given: argparse.Namespace, pad: int) -> None:
    """Trains what is trainable on the tokens that the model writes itself."""
    rows = [
        {"input_ids": one.ids, "labels": [-100] * one.prompt + one.ids[one.prompt :]}
        for one in learnt
    ]
    settings = TrainingArguments(
        output_dir=str(given.out / "checkpoints"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=given.batch_size,
        num_train_epochs=given.epochs,
        learning_rate=given.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=5,
        weight_decay=0.0,
        save_strategy="no",
        save_total_limit=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=given.device == "cpu",
        seed=given.seed,
    )

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in batch)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in batch])

        mask = [[1] * len(row["labels"]) + [0] * (width - len(row["labels"])) for row in batch]
        return {
            "input_ids": padded("input_ids", pad),
            "labels": padded("labels", -100),
            "attention_mask": torch.tensor(mask),
        }

    trainer = Trainer(
        model,
        settings,
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=collate,
        callbacks=[EveryMinutes(given.checkpoint_minutes)],
    )
    checkpoints = given.out / "checkpoints"
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    trainer.train(resume_from_checkpoint=last)


def arguments() -> argparse.Namespace:
    """The command line's."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("base", help="the model's folder or Hub id")
    ask.add_argument("traces", type=Path, help="a .jsonl, .jsonl.gz or .parquet file")
    ask.add_argument("--out", type=Path, required=True, help="a folder; a stopped run goes on")
    ask.add_argument("--models", nargs="+", required=True, help="whose traces, the best first")
    ask.add_argument("--limit", type=int, default=220, help="traces to learn")
    ask.add_argument("--min-tokens", type=int, default=250, help="shorter ones are left out")
    ask.add_argument("--max-tokens", type=int, default=1_300, help="longer ones are left out")
    ask.add_argument("--first-layer", type=int, help="the lowest trained; 3/7 of the way up")
    ask.add_argument("--epochs", type=int, default=1)
    ask.add_argument("--batch-size", type=int, default=4, help="traces an optimiser step")
    ask.add_argument("--learning-rate", type=float, default=3e-4)
    ask.add_argument("--rank", type=int, default=32)
    ask.add_argument("--checkpoint-minutes", type=float, default=10.0)
    ask.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--seed", type=int, default=0)
    given = ask.parse_args()
    if (given.out / "thinker.json").exists():
        sys.exit(f"{given.out} holds a finished thinker: give another folder")
    return given


def main() -> None:
    """Reads the arguments, tunes, and saves."""
    given = arguments()
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.base)
    thinks = "</think>" in tokenizer.get_vocab()
    if not thinks:
        add_thinking(tokenizer)
    markers = [int(i) for i in tokenizer.convert_tokens_to_ids(["<think>", "</think>"])]
    end = tokenizer.eos_token_id
    learnt = choose(given, tokenizer)
    tokens = sum(len(one.ids) for one in learnt)
    print(f"{len(learnt)} traces, {tokens} tokens", flush=True)

    model: Any = AutoModelForCausalLM.from_pretrained(given.base, dtype=getattr(torch, given.dtype))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    if not thinks:
        begin_rows(model, markers, end)
    before, after = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = before is after
    equal = torch.equal(before, after)  # as weights unpacked from one matrix are
    layers = model.config.num_hidden_layers
    first = layers * 3 // 7 if given.first_layer is None else given.first_layer
    upper = "|".join(str(layer) for layer in range(first, layers))
    lora = LoraConfig(
        r=given.rank,
        lora_alpha=2 * given.rank,
        target_modules=rf".*\.layers\.({upper})\..*_proj",
        # Were the input's rows trained, too, all layers would have to run backwards.
        trainable_token_indices=markers if tied else {"lm_head": markers},
        task_type="CAUSAL_LM",
    )
    tuned: Any = get_peft_model(model.to(given.device), lora)
    tune(tuned, learnt, given, end)

    merged = tuned.merge_and_unload()
    if equal and not tied:  # the closing's row is learnt in one of them alone
        rows = merged.get_output_embeddings().weight.detach()[markers]
        merged.get_input_embeddings().weight.data[markers] = rows
    merged.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    with (given.out / "problems.jsonl").open("w", encoding="utf-8") as file:
        for number, one in enumerate(learnt):
            problem = {key: one.row[key] for key in ("problem", "answer")}
            file.write(json.dumps({"id": f"learnt/{number}", **problem}) + "\n")
    settings = {name: str(value) for name, value in vars(given).items()}
    (given.out / "thinker.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    print(f"saved in {given.out}")


if __name__ == "__main__":
    main()
