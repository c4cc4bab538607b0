"""What `import d3d_hf` does and offers: the generation hook and its doors, entries for Auto classes, public names."""

from ..kernels import choose_tokens, register_packed_attention
from ..model.configuration_d3d import D3DConfig
from ..model.extensions import extensions
from ..model.generation_hook import (
    install_generation_hook,
    is_generation_hook_installed,
    open_door,
    uninstall_generation_hook,
)
from ..model.generation_stats import GenerationStats
from ..model.modeling_d3d import D3DDrafterForCausalLM
from .loop import LoopDoor


register_packed_attention()
open_door(LoopDoor(), first=True)


def _of_compiled(name: str):
    """A function of the compiled passes, which are imported when they are first needed: they bring in torch.fx."""

    def call(*args):
        from ..compiled import drafter

        return getattr(drafter, name)(*args)

    return call


extensions.choose_tokens = choose_tokens
for _name in ("storage_for", "count_eager", "warm_up"):
    setattr(extensions, _name, _of_compiled(_name))

__all__ = [
    "D3DConfig",
    "D3DDrafterForCausalLM",
    "GenerationStats",
    "install_generation_hook",
    "is_generation_hook_installed",
    "uninstall_generation_hook",
]
