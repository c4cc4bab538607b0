"""D3D: Decoupled Diffusion Drafting for Hugging Face transformers. The same text, in fewer target forwards."""

from .kernels import register_packed_attention
from .model.configuration_d3d import D3DConfig
from .model.generation_hook import install_generation_hook, is_generation_hook_installed, uninstall_generation_hook
from .model.generation_stats import GenerationStats
from .model.modeling_d3d import D3DDrafterForCausalLM


__version__ = "0.1.0"

register_packed_attention()

_TRAINING = ("D3DTrainer", "D3DTrainingArguments")
_COMPILED = ("compile_target", "compiled_target", "uncompile_target")

__all__ = [
    "D3DConfig",
    "D3DDrafterForCausalLM",
    "D3DTrainer",
    "D3DTrainingArguments",
    "GenerationStats",
    "compile_target",
    "compiled_target",
    "install_generation_hook",
    "is_generation_hook_installed",
    "uncompile_target",
    "uninstall_generation_hook",
]


def __getattr__(name: str):
    """Training and compiling are imported when they are asked for: they bring in accelerate, peft and torch.fx."""
    if name in _TRAINING:
        from . import training

        return getattr(training, name)
    if name in _COMPILED:
        from . import compiled

        return getattr(compiled, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
