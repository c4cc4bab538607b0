"""D3D: Decoupled Diffusion Drafting for Hugging Face transformers. The same text, in fewer target forwards."""

from .decoding import LoopDoor
from .kernels import choose_tokens, register_packed_attention
from .model.configuration_d3d import D3DConfig
from .model.extensions import extensions
from .model.generation_hook import (
    install_generation_hook,
    is_generation_hook_installed,
    open_door,
    uninstall_generation_hook,
)
from .model.generation_stats import GenerationStats
from .model.modeling_d3d import D3DDrafterForCausalLM


__version__ = "0.1.0"

register_packed_attention()
open_door(LoopDoor(), first=True)


def _of_compiled(name: str):
    """A function of the compiled passes, which are imported when they are first needed: they bring in torch.fx."""

    def call(*args):
        from .compiled import drafter

        return getattr(drafter, name)(*args)

    return call


extensions.choose_tokens = choose_tokens
for _name in ("storage_for", "count_eager", "warm_up"):
    setattr(extensions, _name, _of_compiled(_name))

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
