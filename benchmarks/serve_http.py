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
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from serve import STREAMS, Case, random_case, reasoner_case  # sets vLLM up for CPUs, too
from timing import environment, options, parse, print_last_line
from transformers import AutoTokenizer
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as generate_load
from vllm.utils.argparse_utils import FlexibleArgumentParser

from modeling_ospruner.formats_ospruner import VISIBLE, TokenFormat
from ospruner.demo.shipped import draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.formats import guess

MEASURES = ("ttft", "tpot", "e2el")  # to the first token, per further token, end to end
PERCENTILES = (50, 99)
WORDS = 40  # tokens that the random base may write; each is a break with 1/40
START_SECONDS = 900  # as long as a server takes on two busy cores


@dataclass(frozen=True)
class Load:
    """What a server is sent.

    Attributes:
        case: of benchmarks/serve.py: the policy that is served, prompts, tokens of each request.
        common: of each request's body.
    """

    case: Case
    common: dict[str, Any]

    def problems(self) -> Path:
        """Writes the case's prompts as chats, in a JSON-lines file."""
        file = self.case.policy.with_name("problems.jsonl")
        fmt = guess(AutoTokenizer.from_pretrained(self.case.policy))
        asked = [user_message(p, fmt) for p in draw_split("test", len(self.case.prompts), 0)]
        file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
        return file


def random_words(case: Case) -> dict[str, Any]:
    """What makes random weights write paragraphs: all tokens of a list are about as likely."""
    tokenizer = AutoTokenizer.from_pretrained(case.policy)
    kinds = TokenFormat.compile(guess(tokenizer), tokenizer).kinds
    visible = [i for i, kind in enumerate(kinds) if kind == VISIBLE][: WORDS - 1]
    return {"temperature": 1.0, "allowed_token_ids": [case.extra[0]["break_id"], *visible]}


@contextlib.contextmanager
def served(policy: Path, log: Path) -> Iterator[str]:
    """A server on a policy, ready to answer; all of its processes end afterwards.

    Raises:
        RuntimeError: it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "ospruner.cli", "serve", str(policy), "--opt-in"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    # Otherwise the second pass would find the first one's prompts computed.
    command += ["--block-size", "32", "--no-enable-prefix-caching"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {log.read_text()[-4000:]}")
            time.sleep(1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def send(url: str, load: Load, keys: Mapping[str, Any], requests: int, seed: int) -> dict[str, Any]:
    """One pass of the load generator.

    Args:
        url: the server.
        load: what is sent.
        keys: of `vllm_xargs`.
        requests: how many of the load's, the first ones.
        seed: of the requests' order.

    Returns:
        p50 and p99 of each measure in ms, and tokens: generated, and all but the answers' texts.

    Raises:
        RuntimeError: a request failed.
    """
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    asked = {
        "backend": "openai-chat", "endpoint": "/v1/chat/completions", "base-url": url,
        "model": load.case.policy, "served-model-name": "policy", "dataset-name": "custom",
        "dataset-path": load.problems(), "custom-output-len": load.case.max_tokens,
        "num-prompts": requests, "max-concurrency": STREAMS, "seed": seed,
        "percentile-metrics": ",".join(MEASURES),
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "extra-body": json.dumps({**load.common, "vllm_xargs": dict(keys)}),
    }  # fmt: skip
    arguments = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    arguments += ["--skip-chat-template", "--disable-tqdm", "--save-detailed"]
    with contextlib.redirect_stdout(sys.stderr):
        result = generate_load(parser.parse_args(arguments))
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {requests} requests failed: {result['errors']}")
    told: dict[str, Any] = {
        f"{measure}_p{percent}_ms": round(result[f"p{percent}_{measure}_ms"], 1)
        for measure in MEASURES
        for percent in PERCENTILES
    }
    tokenizer = AutoTokenizer.from_pretrained(load.case.policy)
    answers = tokenizer(result["generated_texts"], add_special_tokens=False).input_ids
    told["generated_tokens"] = result["total_output_tokens"]
    told["thinking_tokens"] = result["total_output_tokens"] - sum(map(len, answers))
    return told


def measure(load: Load, seed: int) -> dict[str, dict[str, Any]]:
    """Both arms on one server, printed as a table."""
    case, requests = load.case, len(load.case.prompts)
    budget = case.early["max_thinking_tokens"]
    on = {"stop_mode": "threshold", "stop_threshold": 1.0, "max_answer_tokens": 8}
    pruned = on | {"max_thinking_tokens": budget}
    arms: dict[str, dict[str, Any]] = {"off": {"stop_policy": False}, "on": pruned}
    with served(case.policy, case.policy.with_name("server.log")) as url:
        for keys in arms.values():
            send(url, load, keys, min(requests, STREAMS), seed)  # warms up
        told = {arm: send(url, load, keys, requests, seed) for arm, keys in arms.items()}
    print(f"{case.name}: {requests} requests, {STREAMS} at a time, to {case.max_tokens} tokens")
    table = pd.DataFrame(told).rename(columns={"off": "policy off", "on": f"on, {budget}"})
    print(table.assign(**{"on/off": table.iloc[:, 1] / table.iloc[:, 0]}).round(2).to_string())
    sys.stdout.flush()
    return told


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    parser = options(__doc__, "few requests; its numbers are rough")
    parser.add_argument("--hidden", type=int, default=256, help="of the random base")
    parser.add_argument("--requests", type=int, help="of each pass; 3 times those at a time")
    args = parse(parser)
    requests = args.requests or (STREAMS if args.quick else 3 * STREAMS)
    tokens = 96 if args.quick else 256
    # The server has an engine process; `serve` turned that off for engines of its own.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reasoner = reasoner_case(folder / "reasoner", requests, 600)
        random = random_case(folder / "random", requests, args.hidden, tokens, args.seed)
        loads = {
            "reasoner": Load(reasoner, {"temperature": 0.0}),
            "random": Load(random, random_words(random)),
        }
        result: dict[str, Any] = {key: measure(load, args.seed) for key, load in loads.items()}
    result |= {"streams": STREAMS, "requests": requests, "hidden": args.hidden, "tokens": tokens}
    if args.quick:
        print("--quick: these numbers are rough; quote those of a run without it")
    print_last_line(result | environment(), args.json)


if __name__ == "__main__":
    main()
