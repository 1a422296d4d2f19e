"""OS-Pruner's model: a reasoning model that stops thinking at the right paragraph.

Importing this package lets `AutoModel` and `AutoModelForCausalLM` load policies without
`trust_remote_code`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_ospruner import OSPrunerConfig
from .generation_ospruner import StopPolicyConfig, StopRecord, uniform
from .modeling_ospruner import OSPrunerForCausalLM
from .policy_ospruner import StoppingPolicy
from .reasoning_format import DEEPSEEK_R1, HARMONY, QWEN3, ReasoningFormat, TokenFormat, guess

__version__ = "0.1.0"

AutoConfig.register("ospruner", OSPrunerConfig)
AutoModel.register(OSPrunerConfig, OSPrunerForCausalLM)
AutoModelForCausalLM.register(OSPrunerConfig, OSPrunerForCausalLM)

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "QWEN3",
    "OSPrunerConfig",
    "OSPrunerForCausalLM",
    "ReasoningFormat",
    "StopPolicyConfig",
    "StopRecord",
    "StoppingPolicy",
    "TokenFormat",
    "guess",
    "uniform",
]
