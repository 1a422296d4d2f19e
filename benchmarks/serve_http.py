"""Latency over HTTP, policy off and on: vLLM's load generator against `ospruner serve`.

    python benchmarks/serve_http.py [--quick] [--streams 1 16 64] [--json FILE] [--seed N]
    python benchmarks/serve_http.py --policy DIR --labels DIR [--price 1e-3] [--dtype bfloat16]

One server on the embedded reasoner's policy, then one on that of random weights in 28 layers. Each
gets the same chat requests, so many at a time, streamed: with the policy off, on and never
stopping, and stopping at the first step end after a budget. The load generator is that of
`vllm bench serve`, called as a module: as one request ends the next one is sent. The random base
writes tokens of a short list, of which one ends a paragraph, up to `max_tokens`.

With `--policy`, its own base takes the place of both, greedily on the labels' problems, and it
stops early by itself, as at a price.
"""

import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import serve  # sets vLLM up for CPUs, too
import timing
from bases import VLLM_NEVER, served
from transformers import AutoConfig, AutoTokenizer
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as generate_load
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ospruner.demo.shipped import draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.formats import guess

MEASURES = ("ttft", "tpot", "e2el")  # to the first token, per further token, end to end


def send(
    url: str, case: serve.Case, body: Mapping[str, Any], requests: int, streams: int, seed: int
) -> dict[str, Any]:
    """One pass of the load generator over the first requests of a case; `body` goes with each.

    Returns:
        p50 and p99 of each measure in ms, tokens a second, and tokens: generated, and all but the
        answers' texts.

    Raises:
        RuntimeError: a request failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    toys = (user_message(one, guess(tokenizer)) for one in draw_split("test", requests, 0))
    chats = itertools.islice(itertools.cycle(case.asked or toys), requests)
    asked = f"--backend openai-chat --endpoint /v1/chat/completions --base-url {url} --seed {seed}"
    asked += f" --model {case.policy} --served-model-name policy --skip-chat-template"
    asked += f" --dataset-name custom --num-prompts {requests} --save-detailed"
    asked += f" --custom-output-len {case.max_tokens} --max-concurrency {streams} --disable-tqdm"
    asked += f" --percentile-metrics {','.join(MEASURES)} --metric-percentiles 50,99"
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as problems:
        problems.writelines(json.dumps({"prompt": one}) + "\n" for one in chats)
        problems.flush()
        more = ["--dataset-path", problems.name, "--extra-body", json.dumps(body)]
        with contextlib.redirect_stdout(sys.stderr):
            result = generate_load(parser.parse_args([*asked.split(), *more]))
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {requests} requests failed: {result['errors']}")
    answers = tokenizer(result["generated_texts"], add_special_tokens=False).input_ids
    tokens = result["total_output_tokens"]
    found = {f"{m}_p{p}_ms": result[f"p{p}_{m}_ms"] for m in MEASURES for p in (50, 99)}
    found["tokens_per_second"] = result["output_throughput"]
    found = {name: round(value, 1) for name, value in found.items()}
    return {**found, "generated_tokens": tokens, "thinking_tokens": tokens - sum(map(len, answers))}


def measure(case: serve.Case, args: Any) -> dict[str, Any]:
    """All arms on one server at each number of streams, printed as tables."""
    arms = {"off": {"stop_policy": False}, "never": VLLM_NEVER, "on": case.early}
    bodies = {arm: {**case.sampling, "vllm_xargs": ours} for arm, ours in arms.items()}
    told: dict[str, Any] = {}
    # Prefix caching off: the second pass would find the first one's prompts computed.
    most = AutoConfig.from_pretrained(case.base).max_position_embeddings
    asked = f"--dtype {args.dtype} --max-model-len {min(most, 512 + case.max_tokens)}"
    asked += " --opt-in --no-enable-prefix-caching"
    # The server has an engine process; `serve` turned that off for engines of its own.
    with served(case.policy, asked, VLLM_ENABLE_V1_MULTIPROCESSING="1") as url:
        for streams in args.streams:
            requests, how = args.requests or 3 * streams, (streams, args.seed)
            for body in bodies.values():
                send(url, case, body, min(requests, streams), *how)  # warms up
            found = {arm: send(url, case, body, requests, *how) for arm, body in bodies.items()}
            table = pd.DataFrame(told.setdefault(str(streams), found))
            table["on/off"] = table["on"] / table["off"]
            print(f"{case.name}: {requests} requests, {streams} at a time")
            print(table.round(2).to_string(), flush=True)
    return told


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    sizes = {"tokens": (256, 96, "a request, of the random base")}
    quick = "the random base alone, shorter; its numbers are rough"
    parser = timing.options(__doc__, quick, sizes=sizes)
    parser.add_argument("--streams", type=int, nargs="+", default=[serve.STREAMS], help="at a time")
    serve.add_case(parser, "256")
    parser.add_argument("--requests", type=int, help="of each pass (default: 3 times the streams)")
    args = timing.parse(parser)
    with tempfile.TemporaryDirectory() as name:
        folder, built = Path(name), {"dtype": args.dtype, "tuning": args.tuning}
        if args.policy:
            most = args.requests or 3 * max(args.streams)
            case = serve.policy_case(args.policy, args.labels, most, args.price)
            result = {case.name: measure(case, args), "price": args.price}
        else:
            case = serve.random_case(folder, 0, args.shape, args.tokens, args.seed, **built)
            result = {"random": measure(case, args)}
        if not (args.policy or args.quick):
            case = serve.reasoner_case(folder / "reasoner", 0, 600, tuning=args.tuning)
            result["reasoner"] = measure(case, args)
    asked = {one: vars(args)[one] for one in ("streams", "shape", "tokens", "seed")}
    timing.print_last_line({**result, **asked}, args.json)


if __name__ == "__main__":
    main()
