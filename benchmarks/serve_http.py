"""Latency over HTTP, policy off and on: vLLM's load generator against `ospruner serve`.

    python benchmarks/serve_http.py [--quick] [--json FILE] [--seed N]

One server on the embedded reasoner's policy, then one on that of random weights in 28 layers. Each
gets the same chat requests twice, 64 at a time, streamed: with the policy off, and stopping at the
first step end after a budget. The load generator is that of `vllm bench serve`, called as a module.
The random base writes tokens of a short list, of which one ends a paragraph, up to `max_tokens`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import timing
from serve import STREAMS, Case, random_case, reasoner_case  # sets vLLM up for CPUs, too
from transformers import AutoTokenizer
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as generate_load
from vllm.utils.argparse_utils import FlexibleArgumentParser

from modeling_ospruner.formats_ospruner import VISIBLE, TokenFormat
from ospruner.demo.shipped import draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.formats import guess

MEASURES = ("ttft", "tpot", "e2el")  # to the first token, per further token, end to end
WORDS = 40  # tokens that the random base may write; each is a break with 1/40


def problems_of(case: Case) -> Path:
    """Writes as many chats as a case has prompts, in a JSON-lines file."""
    file = case.policy.with_name("problems.jsonl")
    fmt = guess(AutoTokenizer.from_pretrained(case.policy))
    asked = [user_message(p, fmt) for p in draw_split("test", len(case.prompts), 0)]
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    return file


def random_words(case: Case) -> dict[str, Any]:
    """What makes random weights write paragraphs: all tokens of a list are about as likely."""
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    kinds = TokenFormat.compile(guess(tokenizer), tokenizer).kinds
    visible = [i for i, kind in enumerate(kinds) if kind == VISIBLE][: WORDS - 1]
    return {"temperature": 1.0, "allowed_token_ids": [case.extra[0]["break_id"], *visible]}


def send(url: str, case: Case, body: Mapping[str, Any], requests: int, seed: int) -> dict[str, Any]:
    """One pass of the load generator over the first requests of a case; `body` goes with each.

    Returns:
        p50 and p99 of each measure in ms, and tokens: generated, and all but the answers' texts.

    Raises:
        RuntimeError: a request failed.
    """
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    asked = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": url,
        "model": case.policy,
        "served-model-name": "policy",
        "dataset-name": "custom",
        "dataset-path": problems_of(case),
        "custom-output-len": case.max_tokens,
        "num-prompts": requests,
        "max-concurrency": STREAMS,
        "seed": seed,
        "percentile-metrics": ",".join(MEASURES),
        "metric-percentiles": "50,99",
        "extra-body": json.dumps(body),
    }
    arguments = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    arguments += ["--skip-chat-template", "--disable-tqdm", "--save-detailed"]
    with contextlib.redirect_stdout(sys.stderr):
        result = generate_load(parser.parse_args(arguments))
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {requests} requests failed: {result['errors']}")
    names = [(measure, percent) for measure in MEASURES for percent in (50, 99)]
    told: dict[str, Any] = {f"{m}_p{p}_ms": round(result[f"p{p}_{m}_ms"], 1) for m, p in names}
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    answers = tokenizer(result["generated_texts"], add_special_tokens=False).input_ids
    told["generated_tokens"] = result["total_output_tokens"]
    told["thinking_tokens"] = result["total_output_tokens"] - sum(map(len, answers))
    return told


def measure(case: Case, common: Mapping[str, Any], seed: int) -> dict[str, dict[str, Any]]:
    """Both arms on one server, printed as a table; `common` are keys of all requests' bodies."""
    sys.path.append(str(timing.HERE))
    from tests.server_process import free_port, running_server

    requests, budget = len(case.prompts), case.early["max_thinking_tokens"]
    on = {"stop_mode": "threshold", "stop_threshold": 1.0, "max_answer_tokens": 8}
    keys = {"off": {"stop_policy": False}, "on": {**on, "max_thinking_tokens": budget}}
    arms = {arm: {**common, "vllm_xargs": ours} for arm, ours in keys.items()}
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "ospruner.cli", "serve", str(case.policy), "--opt-in"]
    command += ["--host", "127.0.0.1", "--port", port, "--served-model-name", "policy"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    # Otherwise the second pass would find the first one's prompts computed.
    command += ["--block-size", "32", "--no-enable-prefix-caching"]
    # The server has an engine process; `serve` turned that off for engines of its own.
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with running_server(command, url, processes, case.policy.with_name("server.log")):
        for body in arms.values():
            send(url, case, body, min(requests, STREAMS), seed)  # warms up
        told = {arm: send(url, case, body, requests, seed) for arm, body in arms.items()}
    print(f"{case.name}: {requests} requests, {STREAMS} at a time, to {case.max_tokens} tokens")
    table = pd.DataFrame(told).rename(columns={"off": "policy off", "on": f"on, {budget}"})
    table["on/off"] = table.iloc[:, 1] / table.iloc[:, 0]
    print(table.round(2).to_string(), flush=True)
    return told


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    parser = timing.options(__doc__, "few requests; its numbers are rough")
    parser.add_argument("--hidden", type=int, default=256, help="of the random base")
    parser.add_argument("--requests", type=int, help="of each pass; 3 times those at a time")
    args = timing.parse(parser)
    requests = args.requests or (STREAMS if args.quick else 3 * STREAMS)
    tokens = 96 if args.quick else 256
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reasoner = reasoner_case(folder / "reasoner", requests, 600)
        random = random_case(folder / "random", requests, args.hidden, tokens, args.seed)
        result: dict[str, Any] = {
            "reasoner": measure(reasoner, {"temperature": 0.0}, args.seed),
            "random": measure(random, random_words(random), args.seed),
        }
    result |= {"streams": STREAMS, "requests": requests, "hidden": args.hidden, "tokens": tokens}
    timing.print_last_line(result, args.json)


if __name__ == "__main__":
    main()
