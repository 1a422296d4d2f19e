"""What the checks inside vLLM share; fixtures import vLLM, for `on_runner_v2` comes before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner

from ...chats import prompts_of
from .plugin_replay import make_policy

if TYPE_CHECKING:
    from vllm import LLM

    from .plugin_checks import Prompts, Texts


@pytest.fixture(scope="session")
def environment() -> Iterator[None]:
    """Of an engine in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def mixed(reasoner: Reasoner) -> Prompts:
    """36 prompts of different lengths, some of them twice, some with a long common prefix."""
    prompts = prompts_of(reasoner, 24)
    shared = [token for prompt in prompts[:3] for token in prompt]
    return [*prompts, *prompts[:6], *([*shared, *prompt] for prompt in prompts[12:18])]


@pytest.fixture(scope="session")
def plain(environment: None, reasoner: Reasoner, mixed: Prompts) -> Texts:
    """What vLLM gives without us."""
    from .plugin_checks import TIGHT, greedy, run, start

    llm = start(reasoner.folder, **TIGHT)
    texts = run(llm, mixed, [greedy(ignore_eos=i % 5 == 0) for i in range(len(mixed))])
    del llm  # what goes last closes vLLM's process groups, the next one's too
    gc.collect()
    return texts


@pytest.fixture(scope="module")
def served(plain: Texts, model: Policy) -> LLM:
    from .plugin_checks import TIGHT, start_policy

    return start_policy(model.config._name_or_path, reasoning_parser="ospruner", **TIGHT)
