"""What one GPU shows in ten minutes: the policy at R1-Distill-Qwen-7B's sizes, random weights.

    make gpu [ARGS="--only generate train"]
    python benchmarks/gpu.py [--tiny] [--tuning layers] [--json FILE]

Nothing is downloaded. Each check runs in a process of its own, in order of worth, and says "held",
"NOT HELD", or only what was seen; the numbers are written after each, so that what is cut off
loses one check. `--tiny` takes a width of 128, on a CPU too: the test of this file.

generate   transformers in bfloat16, sdpa and FlashAttention 2: a policy that never stops changes no
           token, one that stops changes none before its stop
train      one optimiser step on 32 traces of 15,000 tokens: peak memory, share of a matrix
           product's speed
vllm       plain vLLM at its own defaults, then the policy with CUDA graphs: tokens a second at 1,
           16 and 64 streams, time saved over tokens saved, and the probabilities of stopping
           against transformers', also where requests are preempted
labels     benchmarks/labels.py here: computed over unique tokens
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timing
import torch
from generate import SHAPES, Bench, Shape, breaks_of, random_base
from timing import VLLM_NEVER, random_traces, timed
from torch.utils.flop_counter import FlopCounterMode

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import VISIBLE
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import Labels
from ospruner.train.trainer import StopTrainer
from ospruner.train.untrained import untrained

Found = dict[str, Any]
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
"""How far two engines' probabilities of stopping may lie apart."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PEAK_GIB = 60.0  # what a training step may take


@dataclass(frozen=True)
class Check:
    """What a check is given.

    A request writes `tokens`, `streams` of them at a time; a training step takes `traces` of
    `trace_tokens`; `blocks` are pages of vLLM that are too few for all streams. The folder is
    shared by all checks of one run.
    """

    folder: Path
    tuning: Literal["queries", "layers"]
    seed: int
    shape: Shape = SHAPES["7b"]
    dtype: str = "bfloat16"
    tokens: int = 256
    traces: int = 32
    trace_tokens: int = 15_000
    streams: tuple[int, ...] = (1, 16, 64)
    blocks: int = 400

    def earlier(self, name: str) -> Any:
        """What an earlier check of this run wrote; None where it did not."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None


TINY: Found = {
    "shape": SHAPES["tiny"],
    "dtype": "float32",
    "tokens": 64,
    "traces": 8,
    "trace_tokens": 200,
    "streams": (1, 4),
    "blocks": 9,
}


def check_generate(job: Check) -> Found:
    """Parity and speed in transformers, for each implementation of attention that is there."""
    found: Found = {}
    for kind in ("sdpa", "flash_attention_2") if DEVICE == "cuda" else ("sdpa",):
        built = {"device": DEVICE, "dtype": job.dtype, "attention": kind}
        found[kind] = {"tokens_equal": True}
        try:
            bench = Bench(job.shape, job.tokens, job.seed, [job.tuning], **built)
            for batch in (1, 8):
                ratio, _ = bench.ratios(batch, "never", job.tuning, 2)
                bench.ratios(batch, "half", job.tuning, 1)
                found[kind][f"never_stop_ratio_batch{batch}"] = ratio
        except ImportError as error:  # flash-attn is a package of its own
            found[kind] = {"not_run": str(error).splitlines()[0]}
        except RuntimeError as error:
            found[kind] |= {"tokens_equal": False, "error": str(error)}
        gc.collect()
    return {"held": all(one.get("tokens_equal", True) for one in found.values()), **found}


def check_train(job: Check) -> Found:
    """One optimiser step as `ospruner train` takes it: trunk, validation and saving included."""
    reasoner = Reasoner()
    tokenizer, vocabulary = reasoner.tokenizer, len(reasoner.tokenizer)
    base = random_base(job.shape, tokenizer, 2 * job.trace_tokens, job.seed, DEVICE, job.dtype)
    steps = job.trace_tokens // 40
    batch = random_traces(job.traces, steps, job.trace_tokens, vocabulary, job.seed, spread=0.0)
    few = random_traces(2, 5, 60, vocabulary, job.seed + 1)
    made = reasoner.label_settings(job.seed)
    config = StopConfig(
        str(job.folder / "run"),
        head="fixed",
        prices=[1e-4],
        batch_size=job.traces,
        num_train_epochs=1,
        seed=job.seed,
        tuning=job.tuning,
        use_cpu=DEVICE == "cpu",
        disable_tqdm=True,
    )
    trainer = StopTrainer(
        config,
        Labels(batch, made, ""),
        Labels(few, made, ""),
        model=base,
        processing_class=tokenizer,
    )
    with FlopCounterMode(display=False) as counter:
        _, taken = timed(trainer.train)
    seconds, operations = taken.wall_seconds, counter.get_total_flops()
    limit = timing.matrix_limit(DEVICE, job.dtype, 8192 if DEVICE == "cuda" else 512)
    found: Found = {"seconds_a_step": seconds, "operations": operations}
    found["share_of_matrix_product"] = operations / seconds / limit
    if DEVICE == "cpu":
        return {"held": None, **found}
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"held": peak <= PEAK_GIB, "allowed_gib": PEAK_GIB, "peak_gib": peak, **found}


def check_vllm_base(job: Check) -> Found:
    """Writes the base and its policy, for the checks of vLLM."""
    tokenizer, folder = Reasoner().tokenizer, job.folder / "base"
    base = random_base(job.shape, tokenizer, 2048, job.seed, DEVICE, job.dtype)
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = untrained(base, tokenizer, base_model_name_or_path=str(folder), tuning=job.tuning)
    with torch.no_grad():  # a head of zeros would hide the states
        model.policy.head.weight.normal_(0.0, 2.0 / job.shape.hidden_size**0.5)
        model.policy.head.bias.fill_(-4.0)
    model.save_pretrained(job.folder / "policy")
    return {"held": None, "parameters": base.num_parameters()}


class Served:
    """vLLM, plain or with the policy, and requests that write among few tokens, breaks included."""

    def __init__(self, job: Check, policy: bool, **further: Any) -> None:
        from vllm import LLM

        self.job = job
        further |= {"dtype": job.dtype, "max_model_len": 32 + job.tokens + 64, "seed": job.seed}
        further |= {"gpu_memory_utilization": 0.8} if DEVICE == "cuda" else {"block_size": 32}
        further |= {"additional_config": {"ospruner": {"stop_policy": False}}} if policy else {}
        self.llm = LLM(model=str(job.folder / ("policy" if policy else "base")), **further)
        fmt, draw = Reasoner().token_format, random.Random(job.seed)
        break_id, banned = breaks_of(fmt, len(fmt.kinds))
        closed = {break_id, *banned}
        visible = [i for i, kind in enumerate(fmt.kinds) if kind & VISIBLE and i not in closed]
        self.allowed = [break_id, *draw.sample(visible, 31)]
        self.prompts = [draw.choices(visible, k=32) for _ in range(3 * max(job.streams))]

    def run(self, requests: int, extra: Callable[[int], Found]) -> tuple[float, list[list[int]]]:
        """One pass: seconds, and each request's tokens."""
        from vllm import SamplingParams

        # What the policy forces comes after the mask of allowed tokens.
        common: Found = {"temperature": 1.0, "allowed_token_ids": self.allowed, "detokenize": False}
        common["max_tokens"] = self.job.tokens
        params = [
            SamplingParams(
                **common,
                seed=self.job.seed + i,
                ignore_eos="max_thinking_tokens" not in extra(i),
                extra_args=extra(i) or None,
            )
            for i in range(requests)
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in self.prompts[:requests]]
        outputs, taken = timed(lambda: self.llm.generate(asked, params, use_tqdm=False))
        return taken.wall_seconds, [list(output.outputs[0].token_ids) for output in outputs]

    def speeds(self, never: Found, early: Found) -> Found:
        """Tokens a second at each number of streams, the better of two passes after a first.

        "queued" are seconds and tokens of three times as many requests, the better of two passes.
        """
        found: Found = {"tokens_per_second": {}}
        for streams in self.job.streams:
            passes = [self.run(streams, lambda i: never) for _ in range(3)][1:]
            best = max(sum(map(len, tokens)) / seconds for seconds, tokens in passes)
            found["tokens_per_second"][str(streams)] = best
        seconds, tokens = min(self.run(len(self.prompts), lambda i: early) for _ in range(2))
        return {**found, "queued": {"seconds": seconds, "written": sum(map(len, tokens))}}

    def keep_records(self, name: str) -> None:
        """Writes what the policy saw in one pass: prompt, tokens, step ends, probabilities."""
        requests = max(self.job.streams)
        _, written = self.run(requests, lambda i: {**VLLM_NEVER, "stop_id": f"r{i}"})
        seen = []
        for i, tokens in enumerate(written):
            [told] = self.llm.collective_rpc("ospruner_told", args=("stop_id", f"r{i}"))[0]
            seen.append({"prompt": self.prompts[i], "tokens": tokens, **told})
        (self.job.folder / f"{name}.json").write_text(json.dumps(seen))


def check_vllm_plain(job: Check) -> Found:
    """Plain vLLM at its own defaults."""
    return {"held": None, **Served(job, policy=False).speeds({}, {})}


def check_vllm_policy(job: Check) -> Found:
    """The policy inside vLLM, with the graphs that vLLM captures by default."""
    early = {**VLLM_NEVER, "stop_answer": "forced", "max_answer_tokens": 8}
    served = Served(job, policy=True)
    ours = served.speeds(VLLM_NEVER, {**early, "max_thinking_tokens": job.tokens // 4})
    served.keep_records("records")
    plain = job.earlier("vllm_plain")
    if plain is None:
        return {"held": None, **ours}
    speeds = ours["tokens_per_second"].items()
    saved, time_saved = (
        1 - ours["queued"][name] / plain["queued"][name] for name in ("written", "seconds")
    )
    return {
        "held": None,
        **ours,
        "never_stop_ratio": {n: one / plain["tokens_per_second"][n] for n, one in speeds},
        "tokens_saved": saved,
        "time_saved_over_tokens_saved": time_saved / saved,
    }


def check_vllm_preempted(job: Check) -> Found:
    """The policy where the pages are too few for all: requests are preempted and taken up again."""
    few = {"num_gpu_blocks_override": job.blocks, "disable_log_stats": False}
    served = Served(job, policy=True, **few)
    served.keep_records("preempted")
    counts: Found = {metric.name: metric for metric in served.llm.get_metrics()}
    preemptions = counts["vllm:num_preemptions"].value
    return {"held": preemptions > 0, "preemptions": preemptions}


def check_vllm_parity(job: Check) -> Found:
    """Probabilities of stopping on vLLM's own tokens: vLLM's against transformers'."""
    dtype = getattr(torch, job.dtype)
    model = OSPrunerForCausalLM.from_pretrained(job.folder / "policy", dtype=dtype)
    torch.nn.Module.to(model, DEVICE)
    found: Found = {}
    for name in ("records", "preempted"):
        gaps: list[float] = []
        for one in job.earlier(name) or ():
            ids = torch.tensor([[*one["prompt"], *one["tokens"]]], device=DEVICE)
            with torch.inference_mode():
                exact = torch.sigmoid(stop_logits(model, ids)[0].float()).cpu()
            at = [len(one["prompt"]) + end - 1 for end in one["step_ends"]]
            told = zip(at, one["probabilities"], strict=True)
            gaps += [abs(float(exact[place]) - value) for place, value in told]
        if gaps:
            found[name] = {"steps": len(gaps), "largest_difference": max(gaps)}
    tolerance = TOLERANCE[job.dtype]
    held = bool(found) and all(one["largest_difference"] <= tolerance for one in found.values())
    return {"held": held, "tolerance": tolerance, **found}


def check_labels(job: Check) -> Found:
    """What `benchmarks/labels.py` finds here; vLLM forks on the GPU."""
    file = job.folder / "labels_numbers.json"
    quick = ["--quick"] if DEVICE == "cpu" else []
    command = [sys.executable, str(Path(__file__).with_name("labels.py")), *quick]
    subprocess.run([*command, "--json", str(file), "--seed", str(job.seed)], check=True)
    return {"held": None, **json.loads(file.read_text())}


CHECKS: dict[str, Callable[[Check], Found]] = {  # in order of worth
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def run_child(name: str, job: Check, tiny: bool, seconds: float) -> Found:
    """One check in a process of its own; its output goes to a log in the folder."""
    log = job.folder / f"{name}.log"
    command = [sys.executable, __file__, "--check", name, "--folder", str(job.folder)]
    command += ["--seed", str(job.seed), "--tuning", job.tuning, *(["--tiny"] if tiny else [])]
    started, error = time.monotonic(), None
    with log.open("w") as output:
        try:
            subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=True
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failed:
            error = str(failed)
    found: Found = job.earlier(name) or {"held": False, "error": error or "no result"}
    if error is not None:
        found["last_words"] = log.read_text(errors="replace").splitlines()[-12:]
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Runs the checks in turn; the last line is JSON."""
    parser = timing.options(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: minutes on a CPU")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all checks (default: 10)")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = timing.parse(parser)
    if DEVICE == "cpu" and not args.tiny:
        raise SystemExit("no GPU is here; --tiny runs the same checks on a CPU, at tiny sizes")
    sizes = TINY if args.tiny else {}
    if args.check:
        job = Check(args.folder, args.tuning, args.seed, **sizes)
        (args.folder / f"{args.check}.json").write_text(json.dumps(CHECKS[args.check](job)))
        return
    told = {"tiny": args.tiny, "seed": args.seed, "tuning": args.tuning}
    result: Found = {**told, **timing.environment(), "checks": {}}
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        job = Check(Path(name), args.tuning, args.seed, **sizes)
        for check in args.only or CHECKS:
            found: Found = {"held": None, "not_run": "no time left"}
            if (left := end - time.monotonic()) >= 1:
                found = run_child(check, job, args.tiny, left)
            word = {True: "held", False: "NOT HELD", None: "seen"}[found.pop("held")]
            result["checks"][check] = {"verdict": word, **found}
            print(f"{check}: {word}")
            for key, value in found.items():
                print(f"  {key}: {json.dumps(value)}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(result) + "\n")
    timing.print_json(result, args.json)
    if any(found["verdict"] == "NOT HELD" for found in result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    timing.vllm_on_a_cpu()
    main()
