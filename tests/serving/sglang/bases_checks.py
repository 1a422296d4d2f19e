"""The policy beside a base that SGLang can run on a CPU, without its server.

For the Python of SGLang's environment; `tests/bases_table.py` calls it. Tokens are compared with
plain SGLang's, and at each of them what the head says with what it says in transformers. Each model
runs in a process of its own, made by fork, for SGLang keeps one alone.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.policy_ospruner import Reader
from ospruner.serving.sglang.tapped import class_of_base, why_not

from ...families import random_policy

STEPS = 24
PROMPTS = [[*range(5 + i, 5 + i + length)] for i, length in enumerate((9, 14, 30))]

Told = tuple[list[list[int]], list[list[list[float]]]]


def run(folder: str, policy: bool) -> Told:
    """Greedy continuations, and behind each token what a policy's head says, (B, outputs)."""
    load_plugins()
    how: dict[str, Any] = {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
    how |= {"mem_fraction_static": 0.95, "max_total_tokens": 1000, "max_running_requests": 4}
    how |= {"disable_cuda_graph": True, "skip_tokenizer_init": False}
    arguments = ServerArgs(model_path=folder, device="cpu", dtype="float32", **how)
    arguments.resolve_once()
    one_batch._set_envs_and_config(arguments)
    place = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=place, gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)[0].torch_runner
    rows, said = list[Req](), list[list[list[float]]]()
    for i, prompt in enumerate(PROMPTS):
        row = Req(str(i), "", array("q", prompt), SamplingParams(temperature=0, max_new_tokens=99))
        row.full_untruncated_fill_ids, row.extend_end = row.origin_input_ids, len(prompt)
        row.logprob_start_len = -1
        rows.append(row)
    texts = [list(prompt) for prompt in PROMPTS]
    tokens, _, batch = one_batch.extend(rows, runner)
    for step in range(STEPS):
        if step:
            tokens, _ = one_batch.decode(tokens, batch, runner)
        if policy:
            slots = [row.kv.req_pool_idx for row in rows]
            lengths = [len(one) for one in texts]
            said.append(runner.model.ask(runner.attn_backend, slots, lengths).tolist())
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
    return texts, said


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """What it gives in a child; its error's words where it fails."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def inside() -> None:
        try:
            there.send(work(*args))
        except BaseException as error:  # noqa: BLE001 - it is told
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            there.send(kind + str(error).partition("\n")[0])

    child = context.Process(target=inside)
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return f"its process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


@torch.no_grad()
def wanted(model: OSPrunerForCausalLM, text: list[int]) -> torch.Tensor:
    """What the head says in transformers behind each token, (S, outputs)."""
    with Reader(model.base, model.policy) as reader:
        model.base(torch.tensor([text]))
        return model.policy.outputs(reader.hidden, keys=reader.keys)[0]


def check(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """How a policy of queries fares beside a random base."""
    model = random_policy(base, tokenizer, tuning="queries")
    if (why := why_not(model.config, class_of_base(base.config))) is not None:
        return f"refused: {why}"
    with torch.no_grad():
        for own in model.policy.layers.parameters():
            own.add_(0.05 * torch.randn_like(own))
    with tempfile.TemporaryDirectory() as folder:
        model.config.base_model_name_or_path = f"{folder}/base"
        base.save_pretrained(f"{folder}/base")
        tokenizer.save_pretrained(f"{folder}/base")
        model.save_pretrained(f"{folder}/policy")
        for name, one in model.named_parameters():
            if ".act_fn." in name:  # Apertus's: SGLang holds them in bfloat16
                one.data = one.data.bfloat16()
        plain = apart(run, f"{folder}/base", False)
        if isinstance(plain, str):
            return f"not compared: plain SGLang does not run it here ({plain})"
        served = apart(run, f"{folder}/policy", True)
    if isinstance(served, str):
        return f"refused: {served}"
    texts, said = served
    if texts != plain[0]:
        return "WRONG: other tokens than plain SGLang's"
    far = 0.0
    for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        told = torch.tensor([one[i] for one in said])
        far = max(far, float((told - wanted(model, text)[len(prompt) - 1 : -1]).abs().max()))
    return f"right ({far:.0e})" if far < 1e-3 else f"WRONG: logits are {far:.0e} apart"
