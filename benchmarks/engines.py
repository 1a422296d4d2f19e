"""What each engine does a second on a base of yours: choose by that before a long label run.

    python benchmarks/engines.py --base DIR --dataset FILE --arms vllm:bfloat16 [--json FILE]

Each arm, an engine and a dtype, labels the same problems as `ospruner label` would: it samples a
trace of each, up to a cap, and forces an answer after every step. The rate is that of thinking
tokens; the time holds the prompts' and the forced answers', but not the engine's start.
"""

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import timing

from ospruner.engines.opening import load_tokenizer, open_engine
from ospruner.train.labels.label import LabelConfig, load_run_problems, read_format
from ospruner.train.labels.making import Labeller, label_problems


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Labels all problems but the first, which is labelled before to start the engine."""
    name, _, dtype = arm.partition(":")
    given = ("base", "dataset", "split", "format", "prompt", "seed")
    asked: dict[str, Any] = {one: vars(args)[one] for one in given}
    asked |= {"limit": args.limit + 1, "batch_size": args.limit, "dtype": dtype or "auto"}
    asked |= {"temperature": 0.7, "top_p": 1.0, "step_tokens": 0}
    config = LabelConfig(**asked, max_thinking_tokens=args.max_tokens)
    task, tokenizer = config.open_task(), load_tokenizer(args.base)
    fmt = read_format(config, tokenizer, task)
    labeller = Labeller(tokenizer, fmt, config.settings(task, fmt), task)
    first, *others = load_run_problems(config).problems
    engine = open_engine(name, tokenizer, config.engine_options())
    with tempfile.TemporaryDirectory() as folder:
        label_problems([first], engine, labeller, Path(folder, "first"))
        work = partial(label_problems, others, engine, labeller, Path(folder, "others"))
        made, taken = timing.timed(work)
        tokens = sum(map(len, made["trace_ids"]))
    seconds, rate = round(taken.wall_seconds, 3), round(tokens / taken.wall_seconds, 1)
    print(f"{arm}: {tokens} thinking tokens, {rate} a second", flush=True)
    found = {"problems": len(others), "thinking_tokens": tokens, "seconds": seconds}
    return {**found, "thinking_tokens_per_second": rate}


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    parser = timing.options(__doc__)
    parser.add_argument("--base", required=True, help="folder or Hub id of the model")
    parser.add_argument("--dataset", required=True, help="problems, as `ospruner label` takes them")
    parser.add_argument("--split", help="of a dataset that is no file")
    parser.add_argument("--arms", nargs="+", required=True, help="engine:dtype, one or several")
    parser.add_argument("--format", help="the base's reasoning format (default: by its markers)")
    parser.add_argument("--prompt", default="default", help="how problems are put")
    parser.add_argument("--limit", type=int, default=32, help="problems, all worked on at once")
    parser.add_argument("--max-tokens", type=int, default=192, help="of a trace's thinking")
    args = timing.parse(parser)
    # Each in a process of its own, so that it has the whole memory.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        arms = {arm: processes.submit(measure, arm, args).result() for arm in args.arms}
    sizes = {"max_tokens": args.max_tokens, "seed": args.seed}
    timing.print_last_line({"arms": arms, **sizes}, args.json)


if __name__ == "__main__":
    main()
