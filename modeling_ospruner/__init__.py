"""OS-Pruner's model: a reasoning model that stops thinking at the right paragraph.

Importing this package lets `AutoModel` and `AutoModelForCausalLM` load policies without
`trust_remote_code`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_ospruner import VERSION, OSPrunerConfig
from .formats_ospruner import DEEPSEEK_R1, HARMONY, QWEN3, ReasoningFormat, TokenFormat, guess
from .generation_ospruner import generate_pruned, generate_with_rule
from .modeling_ospruner import OSPrunerForCausalLM
from .policy_ospruner import StoppingPolicy
from .rules_ospruner import (
    Agreement,
    AnswerEntropy,
    Budget,
    LearnedPolicy,
    StopRule,
    TrialConfidence,
    uniform,
)
from .stopping_ospruner import StopPolicyConfig, StopRecord

__version__ = VERSION

AutoConfig.register("ospruner", OSPrunerConfig)
AutoModel.register(OSPrunerConfig, OSPrunerForCausalLM)
AutoModelForCausalLM.register(OSPrunerConfig, OSPrunerForCausalLM)

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "QWEN3",
    "Agreement",
    "AnswerEntropy",
    "Budget",
    "LearnedPolicy",
    "OSPrunerConfig",
    "OSPrunerForCausalLM",
    "ReasoningFormat",
    "StopPolicyConfig",
    "StopRecord",
    "StopRule",
    "StoppingPolicy",
    "TokenFormat",
    "TrialConfidence",
    "generate_pruned",
    "generate_with_rule",
    "guess",
    "uniform",
]
