"""D3D: Decoupled Diffusion Drafting for Hugging Face transformers. The same text, in fewer target forwards."""

from .configuration_d3d import D3DConfig
from .generation_hook import install_generation_hook, is_generation_hook_installed, uninstall_generation_hook
from .generation_stats import GenerationStats
from .modeling_d3d import D3DDrafterForCausalLM


__version__ = "0.1.0"

__all__ = [
    "D3DConfig",
    "D3DDrafterForCausalLM",
    "GenerationStats",
    "install_generation_hook",
    "is_generation_hook_installed",
    "uninstall_generation_hook",
]
