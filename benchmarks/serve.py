"""Speed of vLLM with the policy in it, against plain vLLM on the same prompts.

    python benchmarks/serve.py [--quick] [--tuning layers] [--layers N] [--json FILE] [--seed N]
        [--before DIR --before-python FILE]
    python benchmarks/serve.py --policy DIR --labels DIR [--price 1e-3] [--dtype bfloat16]
    python benchmarks/serve.py --host-time

Two bases: the embedded reasoner, and random weights in 28 layers, of which a logits processor, in
all arms alike, ends a paragraph about every 40 tokens. Both engines run in this process, in turn,
with 64 streams. The policy is on and never stops (the tokens are checked to be the same), or it
stops early, by a budget. Ratios above 1 would be faster than plain vLLM.

With `--policy`, its own base takes the place of both, greedily on the labels' prompts, and it stops
early by itself, as at a price.

With `--host-time` no engine runs: it prints what the plug-in itself takes on the host of a step, at
1 to 256 streams, without the arithmetic of the base and of the tail.

Both engines take their steps in turn, each timed; of each step the least time of all rounds counts
(`timing.paired_ratio`). What happens outside of the engines' steps is not counted.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from generate import GAPS, Shape, breaks_of, random_base
from timing import VLLM_NEVER as NEVER
from timing import Ratio, Timed, clock_ratios, show
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import VISIBLE
from ospruner.demo import POLICY
from ospruner.demo.shipped import Reasoner
from ospruner.serving.core import RowCore, ServedRow
from ospruner.serving.requests import StopRequest
from ospruner.train.labels.loading import load_labels
from ospruner.train.untrained import untrained

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
timing.vllm_on_a_cpu()

STREAMS = 64
WARM_UP_STEPS = 4
HOST_STREAMS, HOST_STEPS, HOST_ROUNDS = (1, 16, 64, 256), 500, 8


class Paragraphs(LogitsProcessor):
    """Ends paragraphs where `extra_args["paragraphs"]` says, after so many tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[frozenset[int], list[int]]] = {}  # places, tokens so far
        self._break_id = 0
        self._banned = torch.empty(0, dtype=torch.int64)

    def is_argmax_invariant(self) -> bool:
        """No."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests in vLLM's batch."""
        process_dict_updates(self._rows, batch_update, self._enter)

    def _enter(
        self, params: SamplingParams, _: list[int] | None, output_ids: list[int]
    ) -> tuple[frozenset[int], list[int]] | None:
        extra = params.extra_args or {}
        if "paragraphs" not in extra:
            return None
        self._break_id, self._banned = extra["break_id"], torch.tensor(extra["banned"])
        return frozenset(extra["paragraphs"]), output_ids

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Lets the break token alone be written at its places, and nowhere else."""
        if not self._rows:
            return logits
        rows = [i for i, (places, ids) in self._rows.items() if len(ids) + 1 in places]
        if len(self._rows) < len(logits):
            raise RuntimeError("a batch of requests with and without paragraphs")
        logits.index_fill_(1, self._banned, -torch.inf)
        if rows:
            logits[rows] = -torch.inf
            logits[rows, self._break_id] = 0.0
        return logits


@dataclass(frozen=True)
class Case:
    """A base with its policy in folders, and the requests that both engines are given.

    `early` are the policy's settings in arm "early", `extra` further keys of each request, for
    `Paragraphs`; with `ignore_eos` requests go on to `max_tokens`.
    """

    name: str
    base: Path
    policy: Path
    prompts: list[list[int]]
    max_tokens: int
    early: dict[str, Any]
    extra: Sequence[dict[str, Any]] = ()
    ignore_eos: bool = False


class Arms:
    """Plain vLLM and vLLM with the policy, on one case."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case = case
        longest = max(map(len, case.prompts)) + case.max_tokens
        arguments: dict[str, Any] = {  # no prefix caching: each run computes its prompts
            "dtype": dtype,
            "enforce_eager": True,
            "block_size": 32,
            "max_num_seqs": STREAMS,
            "max_model_len": -(-longest // 32) * 32,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        own: list[Any] = [Paragraphs]
        self.plain = LLM(model=str(case.base), logits_processors=own, **arguments)
        asked = {"ospruner": {"stop_policy": False}}  # each arm says what it wants
        arguments |= {"logits_processors": own, "additional_config": asked}
        self.pruned = LLM(model=str(case.policy), **arguments)
        self.tokens: dict[str, list[list[int]]] = {}

    def run(self, arm: str, turn: int = 0, limit: int | None = None) -> list[list[Timed]]:
        """All requests in plain vLLM and in an arm, step by step in turn; the tokens are kept.

        Returns the times of plain vLLM's steps, and of the arm's. Who takes the first step, the
        prompts', changes with the turn; `limit` stands in place of the case's tokens.
        """
        outputs: dict[str, dict[str, list[int]]] = {"plain": {}, arm: {}}

        def stepper(name: str) -> Callable[[], bool]:
            engine = self._begun(name, limit)

            def step() -> bool:
                for done in engine.step():
                    outputs[name][done.request_id] = list(done.outputs[0].token_ids)
                return bool(engine.has_unfinished_requests())

            return step

        times = timing.in_turn({name: stepper(name) for name in outputs}, turn)
        for name, found in outputs.items():
            self.tokens[name] = [found[str(i)] for i in range(len(self.case.prompts))]
        return list(times.values())

    def _begun(self, arm: str, limit: int | None) -> Any:
        """An arm's engine, with all requests waiting in it."""
        case = self.case
        engine = (self.plain if arm == "plain" else self.pruned).llm_engine
        ours = {"plain": {}, "never": NEVER, "early": case.early}[arm]
        for i, prompt in enumerate(case.prompts):
            theirs = case.extra[i] if case.extra else {}
            params = SamplingParams(
                temperature=0.0,
                max_tokens=limit or case.max_tokens,
                detokenize=False,
                ignore_eos=case.ignore_eos and arm != "early",
                extra_args={**theirs, **ours},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        return engine


def budget(tokens: int) -> dict[str, Any]:
    """Settings that stop each request after so many thinking tokens."""
    own = {"max_thinking_tokens": tokens, "max_answer_tokens": 8, "stop_answer": "forced"}
    return {**NEVER, **own}


def policy_case(policy: Path, labels: Path, requests: int, max_tokens: int, price: float) -> Case:
    """A policy on its own base and the first prompts of labels; it stops as at a price."""
    config = OSPrunerConfig.from_pretrained(policy)
    prompts = [list(ids) for ids in load_labels(labels).traces["prompt_ids"][:requests]]
    base, early = config.base_model_name_or_path, {"stop_mode": "threshold", "stop_price": price}
    return Case(Path(base).name, Path(base), policy, prompts, max_tokens, early)


def saved(base: PreTrainedModel, place: Path, folder: Path, tail: dict[str, Any]) -> Path:
    """Where an untrained policy on a base that lies in `place` is saved."""
    tokenizer, policy = Reasoner().tokenizer, folder / "policy"
    untrained(base, tokenizer, **tail, base_model_name_or_path=str(place)).save_pretrained(policy)
    return policy


def reasoner_case(folder: Path, requests: int, max_tokens: int, **tail: Any) -> Case:
    """The embedded reasoner on its own problems, to their natural ends."""
    reasoner = Reasoner()
    prompts = list(timing.reasoner_prompts(reasoner, requests, 0).values())
    policy = saved(reasoner.model, reasoner.folder, folder, tail)
    return Case("reasoner", reasoner.folder, policy, prompts, max_tokens, budget(60))


def random_case(
    folder: Path, requests: int, hidden: int, tokens: int, seed: int, **tail: Any
) -> Case:
    """Random weights in 28 layers, of R1-Distill-Qwen-7B's proportions; `tail` of `untrained`."""
    reasoner = Reasoner()
    shape = Shape(28, hidden, 4 * hidden, max(4, hidden // 64), 2, 24 * hidden)
    base = random_base(shape, reasoner.tokenizer, 4096, seed)
    base.save_pretrained(folder / "base")
    reasoner.tokenizer.save_pretrained(folder / "base")
    policy = saved(base, folder / "base", folder, tail)
    draw = random.Random(seed)
    # As short beside the text as a problem is beside a reasoning model's thinking.
    length = max(1, tokens // 50)
    prompts = [[draw.randrange(5, 600) for _ in range(length)] for _ in range(requests)]
    break_id, banned = breaks_of(reasoner.token_format, shape.vocab_size)
    extra = []
    for _ in prompts:
        places, at = [], -draw.randrange(GAPS[-1])  # the first tokens stand within paragraphs
        while (at := at + draw.choice(GAPS)) < tokens:
            if at > 0:
                places.append(at)
        extra.append({"paragraphs": places, "break_id": break_id, "banned": banned})
    name, early = f"28 layers of {hidden}", budget(tokens // 4)
    return Case(name, folder / "base", policy, prompts, tokens, early, extra, ignore_eos=True)


def measure(case: Case, rounds: int, dtype: str = "float32", key: str = "") -> dict[str, Any]:
    """Times both arms of a case against plain vLLM; `key` is added to the names of the numbers.

    Returns:
        `never_stop_ratio`, tokens/s with a policy that never stops over plain vLLM's, and
        `time_saved_over_tokens_saved`, the share of time saved in arm "early" over that of tokens
        (where any were), by both clocks, with intervals; and `tokens_saved`.

    Raises:
        RuntimeError: an arm does not write what it is said to write.
    """
    arms = Arms(case, dtype)
    for arm in ("never", "early"):
        arms.run(arm, limit=WARM_UP_STEPS)
    times: dict[str, list[list[list[Timed]]]] = {"never": [], "early": []}
    for turn in range(rounds):
        for arm, of_arm in times.items():
            of_arm.append(arms.run(arm, turn))
            if [*map(len, of_arm[-1])] != [*map(len, of_arm[0])]:
                raise RuntimeError(f"{case.name}: two passes of arm {arm!r} differ in their steps")
            if arm == "never" and arms.tokens["plain"] != arms.tokens["never"]:
                raise RuntimeError(f"{case.name}: the policy that never stops changed tokens")
    tokens, early = (sum(map(len, arms.tokens[arm])) for arm in ("plain", "early"))
    saved = 1 - early / tokens
    seconds = min(sum(step.wall_seconds for step in plain) for plain, _ in times["never"])
    print(f"{case.name}: {tokens} tokens, plain vLLM {tokens / seconds:.0f} tokens/s")
    plain, never = zip(*times["never"], strict=True)
    ratios = clock_ratios(never, plain)  # of time, the other way round
    found = show(f"never_stop_ratio{key}", "tokens/s, never stopping", *ratios)
    if saved:
        plain, early_times = zip(*times["early"], strict=True)
        over = [
            Ratio(*((1 - time) / saved for time in (one.median, one.high, one.low)))
            for one in clock_ratios(plain, early_times)
        ]
        said = "time saved over tokens saved"
        found |= show(f"time_saved_over_tokens_saved{key}", said, *over)
    return {f"tokens_saved{key}": round(saved, 4), **found}


class HostSteps:
    """A server's streams as the plug-in follows them on the host, by a policy of every price.

    A paragraph ends about every 40 tokens. Streams stop at budgets around 400 tokens, and others
    come in their place once they have answered.
    """

    def __init__(self, streams: int, seed: int) -> None:
        reasoner, self._draw = Reasoner(), random.Random(seed)
        fmt, config = reasoner.token_format, OSPrunerConfig.from_pretrained(POLICY)
        self._core = RowCore(config, fmt, StopRequest(budget(400), server=True), seed)
        [self._prompt] = timing.reasoner_prompts(reasoner, 1, seed).values()
        self._end_id, _ = breaks_of(fmt, len(fmt.texts))
        self._word_id = next(i for i, kind in enumerate(fmt.kinds) if kind == VISIBLE)
        outputs = 1 if config.prices is None else 6
        self._outputs = torch.randn(streams, outputs, generator=torch.Generator().manual_seed(seed))
        self._logits = torch.zeros(streams, len(fmt.texts))
        self._rows = [self._admitted() for _ in range(streams)]

    def _admitted(self) -> ServedRow:
        most = {"max_thinking_tokens": self._draw.randrange(200, 600)}
        row = self._core.admit(most, self._prompt, ())
        assert row is not None
        return row

    def __call__(self) -> float:
        """The next step; its seconds."""
        tokens = []
        for row in self._rows:
            chosen = self._end_id if self._draw.random() < 1 / 40 else self._word_id
            tokens.append(row.row.forced[0] if row.row.forced else chosen)
        began = time.perf_counter()
        self._rows = [self._admitted() if one.complete else one for one in self._rows]
        for row, token in zip(self._rows, tokens, strict=True):
            row.take(token)
        if ended := [row for row in self._rows if row.row.at_boundary]:
            self._core.decide(ended, self._outputs[: len(ended)])
        self._core.shape(self._logits, enumerate(self._rows))
        return time.perf_counter() - began


def host_times(seed: int, rounds: int) -> dict[str, float]:
    """Prints and returns the milliseconds of a step: its mean, in the fastest of some rounds."""
    found = {}
    for streams in HOST_STREAMS:
        step = HostSteps(streams, seed)
        means = [sum(step() for _ in range(HOST_STEPS)) / HOST_STEPS for _ in range(rounds)]
        found[f"host_ms_{streams}"] = ms = round(1e3 * min(means), 4)
        print(
            f"{streams:>4} streams: {ms:.3f} ms of a step, {1e3 * ms / streams:.1f} us of a stream"
        )
    return found


def main() -> None:
    """Runs the benchmark; the last line is JSON."""
    quick = "the random base alone, half as long, one round: three minutes"
    parser = timing.options(__doc__, quick, before=True)
    parser.add_argument("--rounds", type=int, help="timed runs of each arm")
    parser.add_argument("--hidden", type=int, default=512, help="of the random base")
    parser.add_argument("--tokens", type=int, help="a request, of the random base")
    # More than the streams, so that what has stopped makes room for what waits, as in a server.
    parser.add_argument("--requests", type=int, help="of each pass; twice the streams")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--layers", type=int, default=2, help="that the policy copies")
    parser.add_argument("--policy", type=Path, help="a policy of every price, in place of both")
    parser.add_argument("--labels", type=Path, help="with --policy: labels, for their prompts")
    parser.add_argument("--price", type=float, default=1e-3, help="with --policy: of a token")
    parser.add_argument("--dtype", default="float32", help="with --policy: of its base")
    parser.add_argument("--host-time", action="store_true", help="the plug-in's own, no engine")
    args = timing.parse(parser)
    if args.host_time:
        rounds = args.rounds or (1 if args.quick else HOST_ROUNDS)
        timing.print_last_line(host_times(args.seed, rounds), args.json)
        return
    if args.policy and args.labels is None:
        parser.error("--policy needs --labels, whose prompts both engines are given")
    requests = args.requests or (STREAMS if args.policy else 2 * STREAMS)
    tokens = args.tokens or (1024 if args.policy else 96 if args.quick else 192)
    rounds = args.rounds or (1 if args.quick or args.policy else 2)
    sizes = {"requests": requests, "tokens": tokens}
    with tempfile.TemporaryDirectory() as name:
        folder, tail = Path(name), {"tuning": args.tuning, "num_policy_layers": args.layers}
        if args.policy:
            case = policy_case(args.policy, args.labels, requests, tokens, args.price)
            result = measure(case, rounds, args.dtype) | {"price": args.price}
        else:
            case = random_case(folder, requests, args.hidden, tokens, args.seed, **tail)
            result = measure(case, rounds) | {"hidden": args.hidden, **tail}
            if not args.quick:
                case = reasoner_case(folder / "reasoner", requests, 600, **tail)
                result |= measure(case, rounds, key="_reasoner")
    timing.print_last_line({**result, "streams": STREAMS, **sizes}, args.json)


if __name__ == "__main__":
    main()
