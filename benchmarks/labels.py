"""Cost of labels: tokens computed over unique tokens, and time against encoding each prefix anew.

    OMP_NUM_THREADS=1 python benchmarks/labels.py [--quick] [--json FILE] [--limit N] [--seed N]
        [--before DIR --before-python FILE]

What the embedded reasoner thinks is laid end to end until it is as long as real traces
(trace_shapes.json: R1-Distill-Qwen-7B on MATH-500), and answers are forced where those had their
steps: once by the engine, which computes shared tokens once, and once from batches of whole
prefixes, left-padded, each encoded anew. Both arms use the same stop rule, and their answers are
compared. `unique` are the tokens that cannot be shared. Where vLLM is installed it forks the
same traces, from blocks of 32 tokens on a CPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing
from timing import Timed

from modeling_ospruner import TokenFormat
from ospruner.demo.shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Reasoner
from ospruner.engines.interface import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    SamplingSettings,
    TokenCount,
)

SHAPES = Path(__file__).with_name("trace_shapes.json")


def forked(
    engine: Engine, fmt: TokenFormat, requests: Sequence[ForkRequest]
) -> tuple[list[list[ForkedAnswer]], Timed]:
    """The forced answers, and how long they took."""
    suffix = fmt.forced_suffix()
    return timing.timed(lambda: engine.fork(requests, suffix, MAX_ANSWER_TOKENS, fmt.box_state))


def anew(requests: Sequence[ForkRequest]) -> list[ForkRequest]:
    """The naive arm: every prefix is a text of its own, which shares nothing with others."""
    return [
        ForkRequest([*one.prompt_ids, *one.trace_ids[:cut]], [], [0])
        for one in requests
        for cut in one.cuts
    ]


def long_traces(reasoner: Reasoner, problems: int, limit: int, seed: int) -> list[ForkRequest]:
    """What the reasoner thinks, laid end to end in lengths and with steps of real traces."""
    asked = timing.reasoner_prompts(reasoner, problems, seed)
    prompts, names = list(asked.values()), [f"{name}/0" for name in asked]
    settings = SamplingSettings(max_new_tokens=MAX_THINKING_TOKENS, seed=seed)
    thought = reasoner.engine.sample(prompts, settings, reasoner.token_format, names)
    tokens = itertools.cycle([i for trace in thought for i in trace.trace_ids])
    shapes = json.loads(SHAPES.read_text("utf-8"))["traces"][:limit]
    return [
        ForkRequest(prompt, list(itertools.islice(tokens, shape["tokens"])), shape["step_ends"])
        for prompt, shape in zip(itertools.cycle(prompts), shapes, strict=False)
    ]


def vllm_ratio(reasoner: Reasoner, requests: Sequence[ForkRequest]) -> float | None:
    """Computed over unique tokens of vLLM on the same forks; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from ospruner.engines.vllm import VLLMEngine

    longest = 64 + max(len(r.prompt_ids) + len(r.trace_ids) for r in requests)
    engine: Engine = VLLMEngine(
        str(reasoner.folder),
        reasoner.tokenizer,
        enforce_eager=True,
        dtype="float32",
        max_model_len=longest,
        hf_overrides={"max_position_embeddings": longest},
    )
    forked(engine, reasoner.token_format, requests)
    return engine.counts.computed / engine.counts.unique


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    parser = timing.options(__doc__, "fewer traces: a minute", before=True)
    parser.add_argument("--limit", type=int, help="traces of real length (default: 9 of 10)")
    parser.add_argument("--problems", type=int, default=12, help="of the reasoner's own label run")
    args = timing.parse(parser)
    reasoner = Reasoner()
    fmt, engine = reasoner.token_format, reasoner.engine
    reasoner.model.config.max_position_embeddings = 32_768  # real traces are longer than its own
    limit = args.limit or (4 if args.quick else 9)
    requests = long_traces(reasoner, args.problems, limit, args.seed)
    engine.counts, sampled = TokenCount(), engine.sample_counts
    shared = engine.counts
    answers, forking = forked(engine, fmt, requests)
    engine.counts = naive = TokenCount()
    theirs, encoding = forked(engine, fmt, anew(requests))
    ours = [fork.ids for forks in answers for fork in forks]
    same = sum(ids == other.ids for ids, [other] in zip(ours, theirs, strict=True))
    result: dict[str, Any] = {
        "computed_over_unique_transformers": shared.computed / shared.unique,
        "sampling_computed_over_unique": sampled.computed / sampled.unique,
        "computed_over_unique_vllm": vllm_ratio(reasoner, requests),
        "reencoded_over_unique": naive.computed / shared.unique,
        "speedup_over_reencode": encoding.wall_seconds / forking.wall_seconds,
        "speedup_over_reencode_cpu": encoding.cpu_seconds / forking.cpu_seconds,
        "same_answers": same / len(ours),
    }
    trace_tokens = sum(len(request.trace_ids) for request in requests)
    print(
        f"{len(requests)} traces of {trace_tokens:,} tokens in all, {len(ours)} forced answers; "
        f"{timing.environment()}\n"
    )
    for name, value in result.items():
        print(f"{name:36}{'not installed' if value is None else f'{value:.3f}'}")
    sizes = {"traces": len(requests), "trace_tokens": trace_tokens, "forks": len(ours)}
    seconds = {"fork_seconds": forking.wall_seconds, "fork_cpu_seconds": forking.cpu_seconds}
    timing.print_last_line({**result, **sizes, **seconds, "seed": args.seed}, args.json)


if __name__ == "__main__":
    main()
