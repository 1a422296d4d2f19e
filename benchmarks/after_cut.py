"""Who thinks on after the cut, in vLLM: free answers after a budget and after a trace's own end.

    python benchmarks/after_cut.py LABELS BUDGET [--base DIR] [--limit N] [--wind-down SENTENCE]

What `ospruner compare LABELS budget:BUDGET --online --set answer=free --set samples=1` measures in
transformers, by a server of an untrained policy on the labels' base, which never stops by itself.
All replies are asked for at once, in the labels' own tokens, without a seed: that can end vLLM
0.32 on a CPU. A trace as long as the labels' cap is closed at its next step end. The file's form is
that of the comparison.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import timing
from bases import VLLM_NEVER, served, vllm_on_a_cpu
from openai import OpenAI
from transformers import AutoModelForCausalLM

from modeling_ospruner.formats_ospruner import ReasoningFormat
from ospruner.engines.opening import load_tokenizer
from ospruner.eval.online import How, OnlineProblem, SampleRow, evaluate_online, labelled_problems
from ospruner.eval.problems.domains import open_task
from ospruner.eval.schema import FREE_ANSWER_TOKENS, LabelSettings
from ospruner.rules import Budget
from ospruner.train.labels.loading import load_labels
from ospruner.train.untrained import untrained


@contextmanager
def serving(settings: LabelSettings, base: str, dtype: str, prompt: int) -> Iterator[str]:
    """The address of a server of an untrained policy on a base, for prompts of so many tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        fmt = ReasoningFormat.from_dict(settings.reasoning_format)
        untrained(model, load_tokenizer(base), reasoning_format=fmt).save_pretrained(folder)
        del model
        most = prompt + settings.max_new_tokens + settings.max_answer_tokens
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GB
        vllm_on_a_cpu()
        with served(folder, f"--dtype {dtype} --max-model-len {most}") as url:
            yield url


def asker(url: str, said: LabelSettings, tokenizer: Any) -> Callable[..., list[SampleRow]]:
    """What asks a server for the replies to a batch of problems, all at a time: a row for each."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=1e5, max_retries=0)
    task, cap = open_task(said.task), said.max_new_tokens

    def ask(budget: int, one: OnlineProblem) -> SampleRow:
        name, budget = uuid4().hex, min(cap, budget)
        keys = {**VLLM_NEVER, "max_thinking_tokens": budget, "stop_id": name}
        keys["max_answer_tokens"] = said.max_answer_tokens
        reply = client.completions.create(
            model="policy",
            prompt=list(one.prompt_ids),
            max_tokens=cap + said.max_answer_tokens,
            temperature=said.temperature,
            top_p=said.top_p,
            extra_body={"vllm_xargs": keys, "return_token_ids": True},
        )
        told: Any = client.get(f"{url}/ospruner/stops/{name}", cast_to=object)
        ids = reply.choices[0].model_dump()["token_ids"]
        count = told["answer_tokens"]
        added = int(count == said.max_answer_tokens)  # an end of text after a cap
        text = str(tokenizer.decode(ids[len(ids) - count - added :]))
        plain = not said.reasoning_format["think_end"]
        if plain and told["reason"] == "natural" and not count:  # the trace is the reply
            text = str(tokenizer.decode(ids[: told["thinking_tokens"]]))
        answer = task.read_free(text) or ""
        cut = told["reason"] == "length" or (budget == cap and told["reason"] == "budget")
        return SampleRow(
            tokens=min(told["thinking_tokens"], cap),
            answer_tokens=count,
            answer=answer,
            correct=task.grade(answer or None, one.problem) or 0.0,
            reason="cap" if cut else told["reason"],
            rethinks=told["rethinks"],
            seconds=math.nan,  # all share the server
        )

    def run(how: How, batch: Sequence[OnlineProblem], start: int) -> list[SampleRow]:
        with ThreadPoolExecutor(len(batch)) as pool:
            return list(pool.map(partial(ask, int(how.parameter or 0)), batch))

    return run


def main() -> None:
    """Measures, prints the table, and the numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.add_argument("labels", help="a label folder")
    parser.add_argument("budget", type=int, help="thinking tokens")
    parser.add_argument("--base", help="where the base lies now")
    parser.add_argument("--limit", type=int, help="of the labels' problems")
    parser.add_argument("--dtype", default="float32", help="of the base")
    parser.add_argument("--wind-down", default="", help="a sentence forced before the closing")
    parser.add_argument("--model", help="what tables call the base")
    args = timing.parse(parser)
    labels = load_labels(args.labels)
    base = args.base or labels.settings.base_model
    changed: dict[str, Any] = {"answer": "free", "max_answer_tokens": FREE_ANSWER_TOKENS}
    if args.wind_down:
        written = labels.settings.reasoning_format
        changed["reasoning_format"] = {**written, "wind_down": args.wind_down}
    settings = replace(labels.settings, samples_per_problem=1, seed=args.seed, **changed)
    problems = labelled_problems(labels.traces, args.limit)
    about = {"model": args.model or Path(base).name, "benchmark": Path(args.labels).name}
    longest = max(len(one.prompt_ids) for one in problems)
    with serving(settings, base, args.dtype, longest) as url:
        run, rules = asker(url, settings, load_tokenizer(base)), [Budget(args.budget)]
        many = len(problems)
        report = evaluate_online(problems, rules, run, settings, about, batch_problems=many)
    columns = ["accuracy", "tokens", "answer_after_stop", "answer_after_end", "rethought"]
    print(report.frame[["method", "setting", *columns]].to_string())
    timing.print_json(report.results.to_dict(), args.json)


if __name__ == "__main__":
    main()
