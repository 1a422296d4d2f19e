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

import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timing
from bases import reasoner_prompts
from timing import Timed

from ospruner.demo.shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Reasoner
from ospruner.engines.interface import Engine, ForkRequest, SamplingSettings, TokenCount

SHAPES = Path(__file__).with_name("trace_shapes.json")


def forked(
    engine: Engine, reasoner: Reasoner, requests: Sequence[ForkRequest]
) -> tuple[list[list[int]], Timed]:
    """The forced answers' tokens, one answer after the other, and how long they took."""
    fmt, engine.counts = reasoner.token_format, TokenCount()
    how = (fmt.forced_suffix(), MAX_ANSWER_TOKENS, fmt.box_state)
    forks, taken = timing.timed(lambda: engine.fork(requests, *how))
    return [answer.ids for one in forks for answer in one], taken


def anew(requests: Sequence[ForkRequest]) -> list[ForkRequest]:
    """The naive arm: every prefix is a text of its own, which shares nothing with others."""
    cuts = ((one, cut) for one in requests for cut in one.cuts)
    return [ForkRequest([*one.prompt_ids, *one.trace_ids[:cut]], [], [0]) for one, cut in cuts]


def long_traces(reasoner: Reasoner, problems: int, limit: int, seed: int) -> list[ForkRequest]:
    """What the reasoner thinks, laid end to end in lengths and with steps of real traces."""
    asked = reasoner_prompts(reasoner, problems, seed)
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
    own: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": longest}
    own |= {"hf_overrides": {"max_position_embeddings": longest}}
    engine: Engine = VLLMEngine(str(reasoner.folder), reasoner.tokenizer, **own)
    forked(engine, reasoner, requests)
    return engine.counts.computed / engine.counts.unique


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    sizes = {"limit": (9, 4, "traces of real length, of 10")}
    parser = timing.options(__doc__, "fewer traces: a minute", before=True, sizes=sizes)
    parser.add_argument("--problems", type=int, default=12, help="of the reasoner's own label run")
    args = timing.parse(parser)
    reasoner = Reasoner()
    engine = reasoner.engine
    reasoner.model.config.max_position_embeddings = 32_768  # real traces are longer than its own
    requests = long_traces(reasoner, args.problems, args.limit, args.seed)
    sampled = engine.sample_counts
    ours, forking = forked(engine, reasoner, requests)
    shared = engine.counts
    theirs, encoding = forked(engine, reasoner, anew(requests))
    same = sum(ids == others for ids, others in zip(ours, theirs, strict=True))
    result: dict[str, Any] = {
        "computed_over_unique_transformers": shared.computed / shared.unique,
        "sampling_computed_over_unique": sampled.computed / sampled.unique,
        "computed_over_unique_vllm": vllm_ratio(reasoner, requests),
        "reencoded_over_unique": engine.counts.computed / shared.unique,
        "speedup_over_reencode": encoding.wall_seconds / forking.wall_seconds,
        "speedup_over_reencode_cpu": encoding.cpu_seconds / forking.cpu_seconds,
        "same_answers": same / len(ours),
    }
    trace_tokens = sum(len(request.trace_ids) for request in requests)
    said = f"{len(requests)} traces of {trace_tokens:,} tokens in all, {len(ours)} forced answers"
    print(f"{said}; {timing.environment()}\n")
    for name, value in result.items():
        print(f"{name:36}{'not installed' if value is None else f'{value:.3f}'}")
    counts = {"traces": len(requests), "trace_tokens": trace_tokens, "forks": len(ours)}
    seconds = {"fork_seconds": forking.wall_seconds, "fork_cpu_seconds": forking.cpu_seconds}
    timing.print_last_line({**result, **counts, **seconds, "seed": args.seed}, args.json)


if __name__ == "__main__":
    main()
