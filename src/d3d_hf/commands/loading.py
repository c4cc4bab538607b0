"""What the commands load, and the one-line errors where it cannot be loaded."""

import os
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from .. import embedded
from ..model.configuration_d3d import D3DConfig
from ..model.modeling_d3d import D3DDrafterForCausalLM
from .arguments import UsageError, one_line


@dataclass
class Loaded:
    """
    Attributes:
        target (`PreTrainedModel`): The model that answers.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        is_untrained (`bool`): Whether the drafter is a plain copy of the target's layers.
    """

    target: torch.nn.Module
    tokenizer: object
    drafter: D3DDrafterForCausalLM
    is_untrained: bool


def load(
    target: str | None,
    drafter: str | None,
    dtype: str = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """
    Loads target, tokenizer and drafter. Configs are read, and mistakes found, before any weights are.

    Args:
        target (`str`, *optional*): Folder or Hub name; the embedded target by default.
        drafter (`str`, *optional*): Folder or Hub name; by default a copy of the target's own layers.
        dtype (`str`, *optional*, defaults to `"auto"`): Of both.
        device (`str`, *optional*): Of both; by default a CUDA device if there is one.
        attn_implementation (`str`, *optional*): Of both; the drafter keeps its own where flash attention is asked for.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether the target may bring code of its own.

    Raises:
        UsageError: Something cannot be found or loaded, or the two do not fit together.
    """
    device = usable_device(device)
    target = target or embedded.TARGET_NAME
    drafter_config = None if drafter is None else read_drafter_config(drafter, "--drafter")

    def check(target_config):
        if drafter_config is not None:
            _refuse_other_vocabulary(drafter, drafter_config, target, target_config)

    target_model, tokenizer = load_target(target, dtype, device, attn_implementation, trust_remote_code, check)
    if drafter is not None:
        drafter_model = load_drafter(drafter, dtype, device, attn_implementation)
        return Loaded(target_model, tokenizer, drafter_model, False)
    try:
        return Loaded(target_model, tokenizer, D3DDrafterForCausalLM.from_backbone(target_model), True)
    except ValueError as error:
        raise UsageError(
            f"--target {target!r} cannot draft for itself: give a --drafter. {one_line(error)}"
        ) from error


def load_drafter(
    drafter: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    attn_implementation: str | None = None,
    merge_adapter: bool = True,
) -> D3DDrafterForCausalLM:
    """
    Loads a drafter, in eval mode.

    Args:
        drafter (`str`): Folder or Hub name.
        dtype, attn_implementation: As in `load`.
        device (`torch.device`, *optional*): Where it goes.
        merge_adapter (`bool`, *optional*, defaults to `True`): Whether an adapter is merged or kept beside its base.

    Raises:
        UsageError: It cannot be loaded.
    """
    # Packed masks are 4D, which no flash implementation takes.
    is_packable = attn_implementation is not None and "flash" not in attn_implementation
    attention = {"attn_implementation": attn_implementation} if is_packable else {}
    try:
        model = D3DDrafterForCausalLM.from_pretrained(drafter, dtype=dtype, merge_adapter=merge_adapter, **attention)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"--drafter {drafter!r} cannot be loaded: fetch it or save it again. {one_line(error)}"
        ) from error
    return model.to(usable_device(None) if device is None else device).eval()


def load_target(
    target: str,
    dtype: str = "auto",
    device: torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    check=lambda config: None,
) -> tuple[torch.nn.Module, object]:
    """
    Loads a target, in eval mode, and its tokenizer.

    Args:
        target (`str`): Folder or Hub name.
        dtype, attn_implementation, trust_remote_code: As in `load`.
        device (`torch.device`, *optional*): Where the model goes.
        check (`Callable(PreTrainedConfig)`, *optional*): Called with the target's config before any weights are read.

    Raises:
        UsageError: It cannot be found or loaded.
    """
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    mend = "give the folder or the Hub name of a causal language model with its tokenizer"
    _refuse_other_folders(target, "--target", mend)
    try:
        source = embedded.resolve(target)
        check(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, **attention
        )
    except OSError as error:
        raise UsageError(f"--target {target!r} cannot be found or read: {mend}. {one_line(error)}") from error
    except (ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"--target {target!r} cannot be loaded as asked: {one_line(error)}") from error
    return model.to(usable_device(None) if device is None else device).eval(), tokenizer


def load_tokenizer(name_or_path: str, argument: str, trust_remote_code: bool = False):
    """
    A tokenizer alone.

    Args:
        name_or_path (`str`): Folder or Hub name.
        argument (`str`): What the user calls it, for the messages.

    Raises:
        UsageError: There is none.
    """
    try:
        return AutoTokenizer.from_pretrained(embedded.resolve(name_or_path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UsageError(
            f"{argument} {name_or_path!r} gives no tokenizer: give the folder or the Hub name of a model with its "
            f"tokenizer. {one_line(error)}"
        ) from error


def own_tokenizer(*names: str | None):
    """The tokenizer of the first of several models that brings one; `None` if none does."""
    for name in filter(None, names):
        # A folder of weights alone is no mistake here, and transformers warns of some.
        if not os.path.isdir(name) or os.path.isfile(os.path.join(name, "tokenizer_config.json")):
            try:
                return load_tokenizer(name, "")
            except UsageError:
                continue
    return None


def read_drafter_config(name_or_path: str, argument: str) -> D3DConfig:
    """
    A drafter's config, without its weights.

    Args:
        name_or_path (`str`): Folder or Hub name.
        argument (`str`): What the user calls it, for the messages.

    Raises:
        UsageError: There is no config, or it is not a drafter's.
    """
    mend = "give the folder or the Hub name of a drafter that D3DDrafterForCausalLM.save_pretrained wrote"
    _refuse_other_folders(name_or_path, argument, mend)
    try:
        content, _ = PreTrainedConfig.get_config_dict(name_or_path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{argument} {name_or_path!r} cannot be found or read: {mend}. {one_line(error)}") from error
    model_type = content.get("model_type")
    if model_type != D3DConfig.model_type:
        raise UsageError(
            f"{argument} {name_or_path!r} is no D3D drafter: its model_type is {model_type!r}, not "
            f"{D3DConfig.model_type!r}; {mend}."
        )
    try:
        return D3DConfig.from_dict(content)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{argument} {name_or_path!r} has an unusable config.json. {one_line(error)}") from error


def _refuse_other_folders(name_or_path: str, argument: str, mend: str):
    if os.path.isdir(name_or_path):
        if not os.path.isfile(os.path.join(name_or_path, "config.json")):
            raise UsageError(f"{argument} {name_or_path!r} is a folder without a config.json: {mend}.")
    elif os.path.exists(name_or_path) or name_or_path.startswith((".", "~", os.sep)):
        raise UsageError(f"{argument} {name_or_path!r} is no folder: {mend}.")


def _refuse_other_vocabulary(drafter: str, drafter_config: D3DConfig, target: str, target_config: PreTrainedConfig):
    target_size = target_config.get_text_config(decoder=True).vocab_size
    if drafter_config.vocab_size != target_size:
        trained_for = drafter_config.target_name_or_path
        raise UsageError(
            f"--drafter {drafter!r} drafts in a vocabulary of {drafter_config.vocab_size} tokens and --target "
            f"{target!r} has {target_size}: give a drafter of this target"
            + (f", or the target {trained_for!r}, which it was made for." if trained_for else ".")
        )


def usable_device(name: str | None, argument: str = "--device") -> torch.device:
    """The device of that name, by default a CUDA device if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"{argument} {name!r} is not usable here: give cpu, cuda or cuda:N. {one_line(error)}"
        ) from error
    return device


__all__ = [
    "Loaded",
    "load",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "own_tokenizer",
    "read_drafter_config",
    "usable_device",
]
