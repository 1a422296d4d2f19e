"""What all tests share: no network, a throw-away Hub cache, tiny models made from configs.

The variables are set before anything imports huggingface_hub, which reads them once.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parent.parent

# pytest-xdist's workers inherit the controller's cache and leave its removal to it.
_OWNS_HF_HOME = "PYTEST_XDIST_WORKER" not in os.environ
if _OWNS_HF_HOME:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="ospruner-hf-")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
os.environ |= dict.fromkeys((*OFFLINE, "HF_HUB_DISABLE_TELEMETRY"), "1")
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

    from modeling_ospruner.formats_ospruner import TokenFormat
    from ospruner.demo.shipped import Reasoner


def pytest_unconfigure() -> None:
    """Removes the throw-away Hub cache."""
    if _OWNS_HF_HOME:
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


gc.disable()  # while torch, vLLM and all tests are imported: of these nothing becomes garbage


def pytest_collection_finish() -> None:
    """What was imported stays: no collection goes through it again, a tenth of the tests' time."""
    from ospruner import comparing

    comparing.ROUNDED_TOKENS = 20  # on 200, a comparison says for three seconds how replay rounds
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions in C look at the end for what they hold


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process waits for another one at the end."""
    first = ("train", "vllm", "demo")
    items.sort(key=lambda item: item.path.parent.name not in first)


MadeOnce = Callable[[str, Callable[[Path], None]], Path]
LoadScript = Callable[[str], ModuleType]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Makes a folder of a name, once for all of pytest-xdist's workers, which only read it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


Fuzzed = Callable[..., None]


@pytest.fixture
def fuzzed() -> Fuzzed:
    """Says what a fuzzer did (`pytest -rP`): `fuzzed("label shard", flips=300, refused=300)`."""

    def told(what: str, **counts: int) -> None:
        said = (f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{what}: {', '.join(said)}")

    return told


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """The root of the working tree under test."""
    return REPO


@pytest.fixture(scope="session")
def load_script() -> LoadScript:
    """Imports a script that is in no package, by its path; it may import those beside it."""

    def load(path: str) -> ModuleType:
        file = REPO / path
        name = f"script_{file.stem}"
        spec: Any = importlib.util.spec_from_file_location(name, file)
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for it
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(file.parent))
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of data too big for the repository: $OSPRUNER_SHARED, else `../shared`."""
    given = os.environ.get("OSPRUNER_SHARED")
    path = Path(given) if given else REPO.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no shared data: set OSPRUNER_SHARED to its folder ({path} does not exist)")
    return path


TINY_CORPUS = (
    "Ann has 3 apples and buys 4 more.\n\nSo 3 + 4 = 7.\n\nWait, let me check: 7 - 4 = 3.\n\n"
    "The answer is 7.\n\n**Final answer**\n\\boxed{7}\n",
    "First, x = 12.\nThen 12 * 2 = 24, and\n\n\n24 - 5 = 19.\n\nAlternatively, 19 + 5 = 24.\n\n",
)
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer(load_script: LoadScript) -> PreTrainedTokenizerFast:
    r"""A byte-level BPE with Qwen2's split regex, in which "\n\n" and ".\n\n" are single tokens.

    `<think>` and `</think>` are one id each and, as in R1-Distill, not special (decoding keeps
    them); `<|end|>` ends a text. The chat template opens the thinking as R1's does.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    bpe_tokenizer = load_script("docs/examples/reasoner/recipe.py").bpe_tokenizer
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = bpe_tokenizer(TINY_CORPUS * 2, 340, special, min_frequency=2)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    how = {"eos_token": "<|end|>", "pad_token": "<|end|>", "padding_side": "left"}
    how["chat_template"] = TINY_CHAT_TEMPLATE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **how
    )


def _make_tiny_base(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    tokens = {one: getattr(tokenizer, one) for one in ("eos_token_id", "pad_token_id")}
    tokens |= {"bos_token_id": None, "vocab_size": len(tokenizer)}
    config = Qwen2Config(**sizes, **tokens, initializer_range=0.2, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def tiny_base(tiny_tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A random 4-layer Qwen2 (hidden size 32) for `tiny_tokenizer`: fp32, eval mode, fixed seed.

    Its weights are spread wider than the default, so that its logits differ clearly between
    tokens and greedy decoding does not hang on ties. Made anew for each test.
    """
    return _make_tiny_base(tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_base_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder holding `tiny_base` and its tokenizer, for tests that load by path."""
    path = tmp_path_factory.mktemp("tiny-base")
    _make_tiny_base(tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def _compiled(folder: Path) -> tuple[PreTrainedTokenizerBase, TokenFormat]:
    from transformers import AutoTokenizer

    from modeling_ospruner.formats_ospruner import TokenFormat
    from ospruner.formats import guess

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, TokenFormat.compile(guess(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def real_r1(shared_dir: Path) -> tuple[PreTrainedTokenizerBase, TokenFormat]:
    """R1-Distill-Qwen's tokenizer, and the format guessed from it."""
    return _compiled(shared_dir / "data" / "tokenizers" / "deepseek-r1-distill-qwen")


@pytest.fixture(scope="session")
def real_harmony(shared_dir: Path) -> tuple[PreTrainedTokenizerBase, TokenFormat]:
    """GPT-OSS's tokenizer, and the format guessed from it."""
    return _compiled(shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony")


@pytest.fixture(scope="session")
def reasoner() -> Reasoner:
    """The embedded reasoner, loaded once a process."""
    from ospruner.demo.shipped import Reasoner

    return Reasoner()
