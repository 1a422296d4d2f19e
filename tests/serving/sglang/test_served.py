"""A policy inside SGLang's real server, in the environment that `make test-sglang` makes."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.serving.requests import StopRequest
from ospruner.serving.sglang.stopper import RECORD

from ...chats import prompts_of
from ...own_process import output_of
from ...server_process import SGLANG_PYTHON, running_sglang
from ..vllm.plugin_replay import check_record, make_policy

pytestmark = pytest.mark.skipif(
    SGLANG_PYTHON is None, reason="SGLang has an environment of its own: run `make test-sglang`"
)

LONGEST = 120  # tokens of a text
# Too little room for all, so that requests are put back, and prompts in chunks.
TIGHT = [
    *("--max-total-tokens", "2000", "--chunked-prefill-size", "48"),
    *("--schedule-conservativeness", "0.1"),
]
PRICE = 1e-4  # the policy's own
ASKED = (PRICE, 2e-3, 1e-2)

Extra = Mapping[str, Any]


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> OSPrunerForCausalLM:
    """A policy of every price."""
    folder = tmp_path_factory.mktemp("policy")
    return make_policy(reasoner, folder, 2, "queries", PRICE, price_range=(5e-5, 1e-2))


@pytest.fixture(scope="module")
def prompts(reasoner: Reasoner) -> list[list[int]]:
    """36 prompts of different lengths, some of them twice, some with a long common prefix."""
    made = prompts_of(reasoner, 24)
    shared = [token for prompt in made[:3] for token in prompt]
    return [*made, *made[:6], *([*shared, *prompt] for prompt in made[12:18])]


@pytest.fixture(scope="module")
def plain(
    reasoner: Reasoner, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What SGLang gives without us."""
    log = tmp_path_factory.mktemp("plain") / "server.log"
    command = ["-m", "sglang.launch_server", "--model-path", str(reasoner.folder), *TIGHT]
    with running_sglang(command, log) as address:
        return [one["output_ids"] for one in ask(address, prompts, [None] * len(prompts))]


@pytest.fixture(scope="module")
def url(
    plain: list[list[int]], model: OSPrunerForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("served") / "server.log"
    command = ["-m", "ospruner.cli", "serve", model.config._name_or_path, "--engine", "sglang"]
    command += ["--opt-in", *TIGHT]
    with running_sglang(command, log) as address:
        yield address


def body(prompt: Sequence[int], extra: Extra | None, **sampling: Any) -> dict[str, Any]:
    """A request in SGLang's own dialect."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": LONGEST, **sampling}
    if extra is not None:
        params["custom_params"] = dict(extra)
    return {"input_ids": list(prompt), "sampling_params": params}


def send(url: str, asked: Mapping[str, Any]) -> Any:
    """What a server answers; an assertion fails where that is an error."""
    answer = requests.post(f"{url}/generate", json=asked, timeout=900)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(
    url: str, prompts: Sequence[Sequence[int]], extras: Sequence[Extra | None], **sampling: Any
) -> list[dict[str, Any]]:
    """All at once; the answers in order."""
    bodies = [body(*one, **sampling) for one in zip(prompts, extras, strict=True)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: send(url, one), bodies))


def refused(url: str, path: str, asked: Mapping[str, Any]) -> str:
    """The message of a 400."""
    answer = requests.post(f"{url}/{path}", json=asked, timeout=900)
    assert answer.status_code == 400, answer.text
    return answer.text


def test_a_policy_that_never_fires_changes_nothing(
    url: str, plain: list[list[int]], model: OSPrunerForCausalLM, prompts: list[list[int]]
) -> None:
    """Also where there is too little room for all: requests are put back, and prompts found."""
    never = {"stop_mode": "threshold", "stop_threshold": 1.0, "stop_answer": "free"}
    others: list[Extra | None] = [{"stop_policy": False}, None]
    extras = [others[i % 2] if i % 5 == 4 else never for i in range(len(prompts))]
    answers = ask(url, prompts, extras)
    assert [one["output_ids"] for one in answers] == plain
    infos = [one["meta_info"] for one in answers]
    assert sum(info["cached_tokens"] for info in infos) > 100
    retracted = 0
    for prompt, ids, info, extra in zip(prompts, plain, infos, extras, strict=True):
        assert bool(info.get(RECORD)) is (extra is never)
        if extra is never:
            retracted += info["num_retractions"]
            check_record(model, prompt, ids, never, info[RECORD][0])
    assert retracted > 0


def test_stops_where_generate_would(
    url: str, model: OSPrunerForCausalLM, prompts: list[list[int]]
) -> None:
    """Each response against the replay of its own tokens, at its own price."""
    extras = [
        {"stop_policy": True, "stop_seed": 7, "stop_sample_index": i}
        | ({"stop_price": ASKED[i % 3]} if i % 3 else {})
        | ({"stop_answer": "free"} if i % 4 == 3 else {})
        | ({"stop_mode": "threshold", "stop_threshold": 0.3} if i % 4 == 2 else {})
        | ({"max_thinking_tokens": 60, "min_thinking_tokens": 20} if i % 8 == 1 else {})
        for i in range(len(prompts))
    ]
    answers = ask(url, prompts, extras)
    reasons: Counter[str] = Counter()
    for i, (prompt, answer, extra) in enumerate(zip(prompts, answers, extras, strict=True)):
        [told] = answer["meta_info"][RECORD]
        model.config.price = ASKED[i % 3]
        replayed = check_record(model, prompt, answer["output_ids"], extra, told)
        assert len(told["prices"]) == len(told["step_ends"])
        reasons[replayed.reason] += 1
        reasons["decided"] += len(replayed.step_ends)
    model.config.price = PRICE
    print(reasons)
    assert reasons["decided"] > 100
    assert min(reasons["policy"], reasons["budget"]) > 0


def test_streams_give_the_same_and_the_record_at_the_end(
    url: str, prompts: list[list[int]]
) -> None:
    asked = body(prompts[0], {"stop_seed": 5, "stop_sample_index": 1})
    whole = send(url, asked)
    answer = requests.post(f"{url}/generate", json={**asked, "stream": True}, timeout=900)
    lines = [line[len("data: ") :] for line in answer.text.splitlines() if line.strip()]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(chunks) > 3
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"][RECORD] == whole["meta_info"][RECORD]
    assert not any(RECORD in chunk["meta_info"] for chunk in chunks[:-1])


def test_the_tokens_are_those_of_generate(
    url: str, model: OSPrunerForCausalLM, prompts: list[list[int]]
) -> None:
    extras = [{"stop_seed": 11, "stop_sample_index": i} for i in range(4)]
    answers = ask(url, prompts[:4], extras, max_new_tokens=400)
    stopped = 0
    for prompt, extra, answer in zip(prompts, extras, answers, strict=False):
        settings = StopRequest(extra).settings(StopRequest(None))
        wanted = model.generate(
            torch.tensor([prompt]), stop_policy=settings, max_new_tokens=400, do_sample=False
        )[0, len(prompt) :].tolist()
        ids = answer["output_ids"]
        assert ids[: len(wanted)] == wanted
        assert len(ids) <= len(wanted) + 1  # after a box that ends the text there
        stopped += answer["meta_info"][RECORD][0]["reason"] == "policy"
    assert stopped > 0


def test_several_texts_of_one_prompt_stop_on_their_own(
    url: str, model: OSPrunerForCausalLM, prompts: list[list[int]]
) -> None:
    """The same text over and over, so that only the draws differ: they are independent."""
    asked = body(prompts[0], {"stop_policy": True}, n=8, temperature=1e-3)
    lengths = {answer["meta_info"][RECORD][0]["thinking_tokens"] for answer in send(url, asked)}
    assert len(lengths) > 1
    seeded = body(prompts[0], {"stop_seed": 3}, n=2, temperature=1.0)
    assert "stop_seed is 3 and n is 2" in refused(url, "generate", seeded)


def test_requests_that_are_aborted_leave_the_others_alone(
    url: str, prompts: list[list[int]]
) -> None:
    extras = [{"stop_seed": 9, "stop_sample_index": i} for i in range(8)]
    alone = [send(url, body(*one))["output_ids"] for one in zip(prompts, extras, strict=False)]

    def one(i: int) -> list[int] | None:
        asked = body(prompts[i], extras[i])
        if i % 2 == 0:
            ids: list[int] = send(url, asked)["output_ids"]
            return ids
        with requests.post(
            f"{url}/generate", json={**asked, "stream": True}, stream=True, timeout=900
        ) as answer:
            next(answer.iter_lines())
        return None

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    assert together[::2] == alone[::2]


def test_wrong_keys_are_refused(url: str, prompts: list[list[int]]) -> None:
    for key, said in (("stop_treshold", "no ['stop_treshold'];"), ("stop_price", "stop_price is ")):
        answer = refused(url, "generate", body(prompts[0], {key: 0.5}))
        assert said in json.loads(answer)["error"]["message"]
    beside = refused(url, "generate", body(prompts[0], None) | {"stop_threshold": 0.5})
    assert "would do nothing here: send it" in beside


def test_chat(url: str) -> None:
    chat: dict[str, Any] = {
        **{"model": "policy", "max_tokens": LONGEST, "temperature": 0, "return_meta_info": True},
        "messages": [{"role": "user", "content": "Solve 3x+54=102 for x."}],
        # No draw stops it first: which ones a server makes depends on the requests before.
        "custom_params": {"stop_threshold": 1.0, "max_thinking_tokens": 20},
    }
    answer = requests.post(f"{url}/v1/chat/completions", json=chat, timeout=900)
    assert answer.status_code == 200, answer.text
    [told] = answer.json()["choices"][0]["meta_info"][RECORD]
    assert told["reason"] == "budget"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = refused(url, "v1/chat/completions", {**chat, "tools": [tool]})
    assert "whose box no call fits in" in said


CHECKED = """
import sys
from transformers import AutoTokenizer
from ospruner.demo import REASONER
from tests.families import make_base
from tests.serving.sglang.bases_checks import check

tokenizer = AutoTokenizer.from_pretrained(REASONER)
for name in sys.argv[1:]:
    print("found", name, check(make_base(name, tokenizer), tokenizer))
"""


def test_bases_without_a_server(repo_dir: Path) -> None:
    """Experts, other layers, layers that are given more, a window that SGLang has not, no tap."""
    bases = ("qwen3_moe", "phi3", "gemma3_text", "mistral", "granite")
    known = json.loads((repo_dir / "docs/bases.json").read_text("utf-8"))
    path = os.pathsep.join([str(repo_dir / "tests/stand_ins"), str(repo_dir)])
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}
    printed = output_of(SGLANG_PYTHON, "-c", CHECKED, *bases, env=env, cwd=repo_dir)
    found = re.findall(r"^found (\w+) (\w+)", printed, re.MULTILINE)
    assert dict(found) == {name: known[name]["sglang"].split()[0].rstrip(":") for name in bases}
