"""D3D: Decoupled Diffusion Drafting for Hugging Face transformers. The same text, in fewer target forwards."""

from .configuration_d3d import D3DConfig
from .generation_hook import install_generation_hook, is_generation_hook_installed, uninstall_generation_hook
from .generation_stats import GenerationStats
from .modeling_d3d import D3DDrafterForCausalLM


__version__ = "0.1.0"

_TRAINING = ("D3DTrainer", "D3DTrainingArguments")

__all__ = [
    "D3DConfig",
    "D3DDrafterForCausalLM",
    "D3DTrainer",
    "D3DTrainingArguments",
    "GenerationStats",
    "install_generation_hook",
    "is_generation_hook_installed",
    "uninstall_generation_hook",
]


def __getattr__(name: str):
    """Training is imported when it is asked for: it brings in accelerate, peft and transformers' Trainer."""
    if name in _TRAINING:
        from . import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
