"""Tunes a model that reasons in its reply into one that thinks first, with second thoughts.

    python docs/examples/thinker.py BASE traces.jsonl.gz --out runs/thinker

Each line of the traces is a JSON object with `problem`, `answer`, `reasoning` (a reasoning model's
thinking), and, where they are known, `correct`, `closed`, `dataset` and `model`. The shortest that
are right are learnt, one of a problem, by LoRA (peft) on the tokens that the model writes itself.
The folder holds the merged model, a tokenizer with `<think>` and `</think>`, a chat template that
opens the thinking, and `problems.jsonl`: hand that to `ospruner label --exclude`, so that no
problem that was learnt is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.eval.problems.problem import read_rows

OPENING, CLOSING = "<think>\n", "\n</think>\n\n"


class Learnt(NamedTuple):
    """A conversation to learn: its ids, how many are the prompt's, the problem and its answer."""

    ids: list[int]
    prompt: int
    problem: str
    answer: str


def right_traces(path: Path, dataset: str | None, model: str | None) -> Iterator[dict[str, Any]]:
    """The closed, right traces of a file."""
    for row in read_rows(path):
        wanted = dataset in (None, row.get("dataset")) and model in (None, row.get("model"))
        if wanted and row.get("correct", True) and row.get("closed", True):
            yield dict(row)


def add_thinking(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Adds the markers, and lets the chat template open the thinking; gives the markers' ids.

    Raises:
        SystemExit: the tokenizer has the markers, or its chat template doesn't say where the
            model's turn begins.
    """
    if "</think>" in tokenizer.get_vocab():
        sys.exit("the tokenizer has a </think>: this model thinks already")
    turns = [{"role": "user", "content": "?"}]
    with_turn = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    without = tokenizer.apply_chat_template(turns, tokenize=False)
    if not str(with_turn).startswith(str(without)) or with_turn == without:
        sys.exit("the chat template has no add_generation_prompt that opens the model's turn")
    tokenizer.add_tokens(["<think>", "</think>"])
    opens = json.dumps(OPENING)
    tokenizer.chat_template += "{%- if add_generation_prompt %}{{- " + opens + " }}{%- endif %}"
    return [int(i) for i in tokenizer.convert_tokens_to_ids(["<think>", "</think>"])]


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """The ids of a conversation, and how many of them are the prompt's."""
    message = f"{row['problem']}\n\n{DEEPSEEK_R1.user_instruction}"
    turns = [{"role": "user", "content": message}]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    written = (
        row["reasoning"].strip() + CLOSING + f"The final answer is \\boxed{{{row['answer']}}}."
    )
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    return [*before, *after, tokenizer.eos_token_id], len(before)


def choose(given: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Learnt]:
    """The shortest right trace of each problem, the shortest problems first."""
    shortest: dict[str, Learnt] = {}
    for row in right_traces(given.traces, given.dataset, given.model):
        ids, prompt = encode(row, tokenizer)
        known = shortest.get(row["problem"])
        if len(ids) <= given.max_tokens and (known is None or len(ids) < len(known.ids)):
            shortest[row["problem"]] = Learnt(ids, prompt, row["problem"], row["answer"])
    learnt = sorted(shortest.values(), key=lambda one: len(one.ids))[: given.limit]
    if not learnt:
        sys.exit(f"{given.traces} holds no right, closed trace that fits: widen the arguments")
    return learnt


def tune(model: PreTrainedModel, learnt: list[Learnt], given: argparse.Namespace) -> None:
    """Trains what is trainable, a trace at a time, and prints the loss a written token."""
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = given.epochs * -(-len(learnt) // given.batch_size)
    optimizer = torch.optim.AdamW(trained, lr=given.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, given.learning_rate, total_steps=steps + 1, pct_start=0.1
    )
    order = random.Random(given.seed)
    for epoch in range(given.epochs):
        order.shuffle(learnt)
        for start in range(0, len(learnt), given.batch_size):
            batch = learnt[start : start + given.batch_size]
            written = sum(len(one.ids) - one.prompt for one in batch)
            total = 0.0
            for one in batch:
                inputs = torch.tensor([one.ids], device=given.device)
                kept = len(one.ids) - one.prompt + 1
                logits = model(inputs, logits_to_keep=kept).logits[0, :-1]
                loss = cross_entropy(logits.float(), inputs[0, one.prompt :], reduction="sum")
                (loss / written).backward()
                total += loss.item()
            clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(
                f"epoch {epoch + 1}, {start + len(batch)}: loss {total / written:.4f}", flush=True
            )


def arguments() -> argparse.Namespace:
    """The command line's."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("base", help="the model's folder or Hub id")
    ask.add_argument("traces", type=Path, help="a .jsonl, .jsonl.gz or .parquet file")
    ask.add_argument("--out", type=Path, required=True, help="an empty folder")
    ask.add_argument("--dataset", help="only traces of this dataset")
    ask.add_argument("--model", help="only traces of this model")
    ask.add_argument("--limit", type=int, default=150, help="traces to learn, the shortest first")
    ask.add_argument("--max-tokens", type=int, default=2_000, help="longer traces are left out")
    ask.add_argument("--epochs", type=int, default=2)
    ask.add_argument("--batch-size", type=int, default=8, help="traces an optimiser step")
    ask.add_argument("--learning-rate", type=float, default=2e-4)
    ask.add_argument("--rank", type=int, default=16)
    ask.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--seed", type=int, default=0)
    given = ask.parse_args()
    if given.out.exists() and any(given.out.iterdir()):
        sys.exit(f"{given.out} is not empty: give an empty folder")
    return given


def main() -> None:
    """Reads the arguments, tunes, and saves."""
    given = arguments()
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.base)
    markers = add_thinking(tokenizer)
    learnt = choose(given, tokenizer)
    tokens = sum(len(one.ids) for one in learnt)
    print(f"{len(learnt)} traces, {tokens} tokens, the longest {len(learnt[-1].ids)}", flush=True)

    model: Any = AutoModelForCausalLM.from_pretrained(given.base, dtype=getattr(torch, given.dtype))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    rows = model.get_input_embeddings().weight
    with torch.no_grad():  # rows that no text has trained
        rows[markers] = rows[: min(markers)].float().mean(0).to(rows.dtype)
    lora = LoraConfig(
        r=given.rank,
        lora_alpha=2 * given.rank,
        target_modules="all-linear",
        trainable_token_indices=markers,
        task_type="CAUSAL_LM",
    )
    tuned: Any = get_peft_model(model.to(given.device), lora)
    tune(tuned, list(learnt), given)

    given.out.mkdir(parents=True, exist_ok=True)
    tuned.merge_and_unload().save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    with (given.out / "problems.jsonl").open("w", encoding="utf-8") as file:
        for number, one in enumerate(learnt):
            problem = {"id": f"learnt/{number}", "problem": one.problem, "answer": one.answer}
            file.write(json.dumps(problem) + "\n")
    settings = {name: str(value) for name, value in vars(given).items()}
    (given.out / "thinker.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    print(f"saved in {given.out}")


if __name__ == "__main__":
    main()
