"""What one GPU shows in ten minutes: the policy at R1-Distill-Qwen-7B's sizes, random weights.

    make gpu [ARGS="--only generate train"]
    python benchmarks/gpu.py [--tiny] [--tuning layers] [--json FILE]

Nothing is downloaded. Each check runs in a process of its own, in order of worth, and says "held",
"NOT HELD", or only what was seen; the numbers are written after each, so that what is cut off
loses one check. `--tiny` takes a width of 64, on a CPU too: the test of this file.

generate   transformers in bfloat16, sdpa and FlashAttention 2: a policy that never stops changes no
           token, one that stops changes none before its stop
train      one optimiser step on 32 traces of 15,000 tokens: peak memory, share of a matrix
           product's speed
vllm       plain vLLM at its own defaults, then the policy with CUDA graphs: tokens a second at 1,
           16 and 64 streams, time saved over tokens saved, and the probabilities of stopping
           against transformers', also where requests are preempted
mxfp4      a policy beside a base in GPT-OSS's layout: its probabilities in vLLM and transformers
labels     benchmarks/labels.py here: computed over unique tokens, occupancy of the engine
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from generate import SHAPES, Bench, Shape, random_base
from safetensors.torch import load_file, save_file
from timing import environment, print_last_line, random_traces, timed
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, GptOssForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_logits
from ospruner.train.config import StopConfig
from ospruner.train.label_sets import Labels
from ospruner.train.trainer import StopTrainer
from ospruner.train.untrained import untrained

Found = dict[str, Any]
NEVER = {"stop_mode": "threshold", "stop_threshold": 1.0, "stop_answer": "free"}


@dataclass(frozen=True)
class Sizes:
    """How large the checks are.

    Attributes:
        shape: the base's, for transformers and training.
        served: the base's inside vLLM.
        tokens: a request or trace writes so many.
        pairs: timed pairs of each arm of `generate`.
        traces, trace_tokens: of the training step.
        streams: requests at a time inside vLLM.
        blocks: pages of vLLM that are too few for all streams.
        tolerance: how far two engines' probabilities of stopping may lie apart.
        peak_gib: what a training step may take.
    """

    shape: Shape
    served: Shape
    dtype: str
    tokens: int
    pairs: int
    traces: int
    trace_tokens: int
    streams: tuple[int, ...]
    blocks: int
    tolerance: float
    peak_gib: float


FULL = Sizes(
    shape=SHAPES["7b"],
    served=SHAPES["7b"],
    dtype="bfloat16",
    tokens=256,
    pairs=2,
    traces=32,
    trace_tokens=15_000,
    streams=(1, 16, 64),
    blocks=400,
    tolerance=0.02,
    peak_gib=60.0,
)
TINY = Sizes(
    shape=SHAPES["tiny"],
    served=Shape(4, 128, 256, 4, 2, 1024),  # vLLM on a CPU wants heads of at least 32
    dtype="float32",
    tokens=64,
    pairs=1,
    traces=8,
    trace_tokens=200,
    streams=(1, 4),
    blocks=9,
    tolerance=1e-4,
    peak_gib=60.0,
)


@dataclass(frozen=True)
class Job:
    """What a check is given.

    Attributes:
        folder: shared by all checks of one run.
        device: "cuda" or "cpu".
        tuning: of the policies.
    """

    sizes: Sizes
    folder: Path
    device: str
    seed: int
    tuning: Literal["queries", "layers"]


def check_generate(job: Job) -> Found:
    """Parity and speed in transformers, for each implementation of attention that is there."""
    kinds = ["sdpa"]
    if job.device == "cuda":
        kinds.append("flash_attention_2")
    found: Found = {}
    for kind in kinds:
        try:
            found[kind] = _generate(job, kind)
        except ImportError as error:  # flash-attn is a package of its own
            found[kind] = {"not_run": str(error).splitlines()[0]}
        gc.collect()
    ran = [one for one in found.values() if "not_run" not in one]
    return {"held": all(one["tokens_equal"] for one in ran), **found}


def _generate(job: Job, attention: str) -> Found:
    args = argparse.Namespace(
        prompt_tokens=64,
        trace_tokens=job.sizes.tokens,
        seed=job.seed,
        device=job.device,
        dtype=job.sizes.dtype,
        policy_layers=2,
        tunings=[job.tuning],
        attention=attention,
    )
    bench = Bench(job.sizes.shape, args)
    found: Found = {"tokens_equal": True}
    never = {"mode": "threshold", "threshold": 1.0, "answer": "free"}
    for batch in (1, 8):
        try:
            bench.check(batch)
        except RuntimeError as error:
            found |= {"tokens_equal": False, f"batch{batch}": str(error)}
            continue
        pairs = [
            (
                timed(functools.partial(bench.run, batch, pair, False)).wall_seconds,
                timed(functools.partial(bench.run, batch, pair, never)).wall_seconds,
            )
            for pair in range(job.sizes.pairs)
        ]
        found[f"never_stop_ratio_batch{batch}"] = [plain / ours for plain, ours in pairs]
    return found


def check_train(job: Job) -> Found:
    """One optimiser step as `ospruner train` takes it: trunk, validation and saving included."""
    sizes, reasoner = job.sizes, Reasoner()
    base = random_base(
        sizes.shape,
        reasoner.tokenizer,
        2 * sizes.trace_tokens,
        job.seed,
        job.device,
        sizes.dtype,
    )
    vocabulary = len(reasoner.tokenizer)
    steps = sizes.trace_tokens // 40
    batch = random_traces(sizes.traces, steps, sizes.trace_tokens, vocabulary, job.seed, spread=0.0)
    few = random_traces(2, 5, 60, vocabulary, job.seed + 1)
    few = few.add_column("new_id", ["v0", "v1"]).remove_columns("problem_id")  # other problems
    few = few.rename_column("new_id", "problem_id")
    made = reasoner.label_settings(job.seed)
    config = StopConfig(
        str(job.folder / "run"), head="fixed", prices=[1e-4], batch_size=sizes.traces,
        num_train_epochs=1, seed=job.seed, tuning=job.tuning, use_cpu=job.device == "cpu",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = StopTrainer(
        config, Labels(batch, made, ""), Labels(few, made, ""), model=base,
        processing_class=reasoner.tokenizer,
    )  # fmt: skip
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with FlopCounterMode(display=False) as counter:
        taken = timed(trainer.train)
    found: Found = {"seconds_a_step": taken.wall_seconds, "operations": counter.get_total_flops()}
    found["share_of_matrix_product"] = found["operations"] / taken.wall_seconds / matrix_limit(job)
    if job.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return {"held": found["peak_gib"] <= sizes.peak_gib, "allowed_gib": sizes.peak_gib, **found}
    return {"held": None, **found}


def matrix_limit(job: Job) -> float:
    """Operations a second of one large matrix product in the base's precision."""
    size = 8192 if job.device == "cuda" else 512
    a = torch.randn(size, size, device=job.device, dtype=getattr(torch, job.sizes.dtype))
    a @ a
    best = min(timed(lambda: a @ a).wall_seconds for _ in range(5))
    return 2 * size**3 / best


def check_vllm_base(job: Job) -> Found:
    """Writes the base and its policy, for the checks of vLLM."""
    tokenizer, shape = Reasoner().tokenizer, job.sizes.served
    base = random_base(shape, tokenizer, 2048, job.seed, job.device, job.sizes.dtype)
    base.save_pretrained(job.folder / "base")
    tokenizer.save_pretrained(job.folder / "base")
    model = untrained(
        base, tokenizer, base_model_name_or_path=str(job.folder / "base"), tuning=job.tuning
    )
    with torch.no_grad():  # a head of zeros would hide the states
        model.policy.head.weight.normal_(0.0, 2.0 / shape.hidden**0.5)
        model.policy.head.bias.fill_(-4.0)
    model.save_pretrained(job.folder / "policy")
    return {"held": None, "parameters": base.num_parameters()}


class Served:
    """vLLM, plain or with the policy, and requests that write among few tokens, breaks included."""

    def __init__(self, job: Job, policy: bool, **further: Any) -> None:
        from vllm import LLM

        from ospruner.serving.vllm.plugin import PROCESSOR, WORKER_EXTENSION

        self.job = job
        longest = 32 + job.sizes.tokens + 64
        arguments: dict[str, Any] = {"dtype": job.sizes.dtype, "max_model_len": longest}
        if job.device == "cuda":
            arguments["gpu_memory_utilization"] = 0.8
        else:
            arguments["block_size"] = 32
        if policy:
            arguments["logits_processors"] = [PROCESSOR]
            arguments["worker_extension_cls"] = WORKER_EXTENSION
        name = "policy" if policy else "base"
        self.llm = LLM(model=str(job.folder / name), seed=job.seed, **{**arguments, **further})
        fmt = Reasoner().token_format
        draw = random.Random(job.seed)
        breaks = [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]
        break_id = next(i for i in breaks if fmt.kinds[i] & VISIBLE)
        closed = {*breaks, *fmt.eos_ids, *fmt.added_ids, *fmt.brace_texts, fmt.think_end_id}
        visible = [i for i, kind in enumerate(fmt.kinds) if kind & VISIBLE and i not in closed]
        self.allowed = [break_id, *draw.sample(visible, 31)]
        self.prompts = [draw.choices(visible, k=32) for _ in range(3 * max(job.sizes.streams))]

    def run(self, requests: int, extra: Callable[[int], Found] = lambda i: {}) -> Found:
        """One pass: seconds, and each request's tokens."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=1.0,
                seed=self.job.seed + i,
                max_tokens=self.job.sizes.tokens,
                ignore_eos="max_thinking_tokens" not in extra(i),
                allowed_token_ids=self.allowed,  # what the policy forces comes after this mask
                extra_args=extra(i) or None,
                detokenize=False,
            )
            for i in range(requests)
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in self.prompts[:requests]]
        outputs: list[Any] = []
        seconds = timed(
            lambda: outputs.extend(self.llm.generate(asked, params, use_tqdm=False))
        ).wall_seconds
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "tokens": tokens, "written": sum(map(len, tokens))}

    def speeds(self, extra: Found) -> Found:
        """Tokens a second at each number of streams, the better of two passes after a first."""
        found: Found = {}
        for streams in self.job.sizes.streams:
            passes = [self.run(streams, lambda i: extra) for _ in range(3)][1:]
            found[str(streams)] = max(one["written"] / one["seconds"] for one in passes)
        return found

    def queued(self, extra: Found) -> Found:
        """Three times as many requests as streams: seconds and tokens of the better pass."""
        passes = [self.run(len(self.prompts), lambda i: extra) for _ in range(2)]
        best = min(passes, key=lambda one: one["seconds"])
        return {"seconds": best["seconds"], "written": best["written"]}

    def records(self) -> list[Found]:
        """What the policy saw in one pass: prompt, tokens, step ends and their probabilities."""
        requests = max(self.job.sizes.streams)
        done = self.run(requests, lambda i: {**NEVER, "stop_id": f"r{i}"})
        seen = []
        for i, tokens in enumerate(done["tokens"]):
            told = self.llm.collective_rpc("ospruner_record", args=(f"r{i}",))[0]
            seen.append({"prompt": self.prompts[i], "tokens": tokens, **told})
        return seen


def check_vllm_plain(job: Job) -> Found:
    """Plain vLLM at its own defaults."""
    served = Served(job, policy=False)
    return {"held": None, "tokens_per_second": served.speeds({}), "queued": served.queued({})}


def check_vllm_policy(job: Job) -> Found:
    """The policy inside vLLM, with the graphs that vLLM captures by default."""
    served = Served(job, policy=True)
    ours = {"tokens_per_second": served.speeds(NEVER), "queued": served.queued(_early(job))}
    (job.folder / "records.json").write_text(json.dumps(served.records()))
    plain = _earlier(job, "vllm_plain")
    if plain is None:
        return {"held": None, **ours}
    ratios = {
        streams: speed / plain["tokens_per_second"][streams]
        for streams, speed in ours["tokens_per_second"].items()
    }
    saved = 1 - ours["queued"]["written"] / plain["queued"]["written"]
    time_saved = 1 - ours["queued"]["seconds"] / plain["queued"]["seconds"]
    return {
        "held": None,
        **ours,
        "never_stop_ratio": ratios,
        "tokens_saved": saved,
        "time_saved_over_tokens_saved": time_saved / saved,
    }


def _early(job: Job) -> Found:
    return {
        **NEVER,
        "stop_answer": "forced",
        "max_thinking_tokens": job.sizes.tokens // 4,
        "max_answer_tokens": 8,
    }


def check_vllm_preempted(job: Job) -> Found:
    """The policy where the pages are too few for all: requests are preempted and taken up again."""
    served = Served(
        job, policy=True, num_gpu_blocks_override=job.sizes.blocks, disable_log_stats=False
    )
    (job.folder / "preempted.json").write_text(json.dumps(served.records()))
    counts = {metric.name: metric for metric in served.llm.get_metrics()}
    preemptions = getattr(counts["vllm:num_preemptions"], "value", 0)
    return {"held": preemptions > 0, "preemptions": preemptions}


def check_vllm_parity(job: Job) -> Found:
    """Probabilities of stopping on vLLM's own tokens: vLLM's against transformers'."""
    model = OSPrunerForCausalLM.from_pretrained(
        job.folder / "policy", dtype=getattr(torch, job.sizes.dtype)
    )
    torch.nn.Module.to(model, job.device)
    found: Found = {}
    for name in ("records", "preempted"):
        file = job.folder / f"{name}.json"
        if not file.exists():
            continue
        gaps: list[float] = []
        for one in json.loads(file.read_text()):
            ids = torch.tensor([[*one["prompt"], *one["tokens"]]], device=job.device)
            with torch.inference_mode():
                exact = torch.sigmoid(stop_logits(model, ids)[0].float()).cpu()
            at = [len(one["prompt"]) + end - 1 for end in one["step_ends"]]
            told = zip(at, one["probabilities"], strict=True)
            gaps += [abs(float(exact[place]) - value) for place, value in told]
        found[name] = {"steps": len(gaps), "largest_difference": max(gaps)}
    held = bool(found) and all(
        one["largest_difference"] <= job.sizes.tolerance for one in found.values()
    )
    return {"held": held, "tolerance": job.sizes.tolerance, **found}


def check_mxfp4(job: Job) -> Found:
    """A policy on a tiny GPT-OSS whose experts are packed: transformers, and vLLM on a GPU."""
    folder = job.folder / "mxfp4"
    packed_policy(job, folder)
    model = OSPrunerForCausalLM.from_pretrained(folder / "policy", dtype=torch.bfloat16)
    torch.nn.Module.to(model, job.device)
    draws = torch.Generator().manual_seed(job.seed)
    ids = torch.randint(5, 600, (1, 64), generator=draws).to(job.device)
    with torch.inference_mode():
        transformers = torch.sigmoid(stop_logits(model, ids)[0].float())
        written = model.generate(ids, stop_policy=True, max_new_tokens=32, do_sample=False)
    found: Found = {
        "experts": str(type(model.base.model.layers[0].mlp.experts).__name__),
        "finite": bool(transformers.isfinite().all()),
        "written": written.shape[1] - 64,
    }
    if job.device == "cpu":
        return {"held": found["finite"], "vllm": "not run: no kernel for MXFP4 on CPUs", **found}
    del model
    served = Served(dataclasses.replace(job, folder=folder), policy=True)
    seen = served.records()
    (job.folder / "mxfp4" / "records.json").write_text(json.dumps(seen))
    parity = check_vllm_parity(dataclasses.replace(job, folder=folder))
    return {**parity, "held": parity["held"] and found["finite"], **found}


def packed_policy(job: Job, folder: Path) -> None:
    """A random GPT-OSS in `base`, its experts in MXFP4, and an untrained policy in `policy`."""
    reasoner, experts = Reasoner(), 4
    torch.manual_seed(job.seed)
    config = GptOssConfig(
        vocab_size=640,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=2,
        sliding_window=32,
        max_position_embeddings=2048,
        eos_token_id=2,
        pad_token_id=0,
    )
    base = GptOssForCausalLM(config).bfloat16().eval()
    (folder / "base").mkdir(parents=True)
    base.save_pretrained(folder / "base")
    reasoner.tokenizer.save_pretrained(folder / "base")
    model = untrained(
        base, reasoner.tokenizer, base_model_name_or_path=str(folder / "base"), tuning=job.tuning
    )
    with torch.no_grad():
        model.policy.head.weight.normal_(0.0, 0.25)
    model.save_pretrained(folder / "policy")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "base" / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        _, width, out = tensor.shape  # transformers keeps them transposed
        groups = (experts, out, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(groups, 122, dtype=torch.uint8)  # 2^-5
    save_file(tensors, folder / "base" / "model.safetensors", {"format": "pt"})
    file = folder / "base" / "config.json"
    literals = json.loads(file.read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    literals["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*kept, "lm_head"],
    }
    file.write_text(json.dumps(literals))


def check_labels(job: Job) -> Found:
    """What `benchmarks/labels.py` finds here; vLLM forks on the GPU."""
    file = job.folder / "labels_numbers.json"
    script = Path(__file__).with_name("labels.py")
    quick = ["--quick"] if job.device == "cpu" else []
    command = [sys.executable, str(script), *quick, "--json", str(file), "--seed", str(job.seed)]
    subprocess.run(command, check=True)
    return {"held": None, **json.loads(file.read_text())}


CHECKS: dict[str, Callable[[Job], Found]] = {
    "generate": check_generate,
    "train": check_train,
    "vllm_base": check_vllm_base,
    "vllm_plain": check_vllm_plain,
    "vllm_policy": check_vllm_policy,
    "vllm_preempted": check_vllm_preempted,
    "vllm_parity": check_vllm_parity,
    "mxfp4": check_mxfp4,
    "labels": check_labels,
}


def _earlier(job: Job, name: str) -> Found | None:
    """What an earlier check of this run found."""
    file = job.folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def run_child(name: str, job: Job, tiny: bool, seconds: float) -> Found:
    """One check in a process of its own; its output goes to a log in the folder."""
    started = time.monotonic()
    log = job.folder / f"{name}.log"
    command = [sys.executable, __file__, "--check", name, "--folder", str(job.folder)]
    command += ["--seed", str(job.seed), "--tuning", job.tuning, *(["--tiny"] if tiny else [])]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            error = None if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done within {seconds:.0f} s"
    found = _earlier(job, name) or {"held": False, "error": error or "no result"}
    if error is not None:
        found["last_words"] = log.read_text(errors="replace").splitlines()[-12:]
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Runs the checks in turn; the last line is JSON."""
    args = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if args.tiny else FULL
    if args.check:
        job = Job(sizes, Path(args.folder), device, args.seed, args.tuning)
        found = CHECKS[args.check](job)
        (job.folder / f"{args.check}.json").write_text(json.dumps(found))
        return
    if device == "cpu" and not args.tiny:
        raise SystemExit("no GPU is here; --tiny runs the same checks on a CPU, at tiny sizes")
    result: Found = {
        "tiny": args.tiny,
        "seed": args.seed,
        "tuning": args.tuning,
        **environment(),
        "checks": {},
    }
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        job = Job(sizes, Path(name), device, args.seed, args.tuning)
        for check in args.only or CHECKS:
            if (left := end - time.monotonic()) < 1:
                result["checks"][check] = found = {"held": None, "not_run": "no time left"}
            else:
                found = result["checks"][check] = run_child(check, job, args.tiny, left)
            word = {True: "held", False: "NOT HELD", None: "seen"}[found.pop("held")]
            result["checks"][check] = {"verdict": word, **found}
            print(f"{check}: {word}")
            for key, value in found.items():
                print(f"  {key}: {value if not isinstance(value, list) else json.dumps(value)}")
            sys.stdout.flush()
            if args.json:
                args.json.write_text(json.dumps(result) + "\n")
    print_last_line(result, args.json)
    if any(found["verdict"] == "NOT HELD" for found in result["checks"].values()):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: minutes on a CPU")
    parser.add_argument("--tuning", choices=("queries", "layers"), default="queries")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all checks (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    main()
