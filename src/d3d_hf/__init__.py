"""
D3D: Decoupled Diffusion Drafting for Hugging Face transformers. The same text, in fewer target forwards.

`import d3d_hf` imports torch and transformers, hooks into `generate` and registers with the Auto classes, so that
`AutoModelForCausalLM.from_pretrained` knows a drafter from then on: see decoding/seam.py. In one process it waits: in
the command line's own, whose --help and whose complaints about options should not take the seconds that torch takes.
Python imports a package before any of its modules, d3d_hf.cli too, so it is this file that has to tell. The wait ends
when the options are parsed, before the command does anything, or with the first use of a public name.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING


__version__ = "0.1.0"

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


def _is_command_line() -> bool:
    """Whether the process is `d3d-hf ...` or `python -m d3d_hf.cli ...`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # as long as the package of the module is being imported
        return f"{__name__}.cli" in sys.orig_argv
    return os.path.basename(program) == "d3d-hf"


if TYPE_CHECKING or not _is_command_line():
    from .decoding.seam import (
        D3DConfig,
        D3DDrafterForCausalLM,
        GenerationStats,
        install_generation_hook,
        is_generation_hook_installed,
        uninstall_generation_hook,
    )

# Imported when they are asked for: they bring in accelerate, peft and torch.fx.
_LATER = {
    "D3DTrainer": "training",
    "D3DTrainingArguments": "training",
    "compile_target": "compiled",
    "compiled_target": "compiled",
    "uncompile_target": "compiled",
}


def __getattr__(name: str):
    if name in __all__:
        from .decoding import seam

        home = importlib.import_module(f".{_LATER[name]}", __name__) if name in _LATER else seam
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
