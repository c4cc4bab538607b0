"""Adapter drafters: a PEFT adapter, the mask embedding and the kept layers of a named base.

On disk such a drafter is `config.json`, whose `adapter_base` names the base, and a folder `adapter/` in PEFT's own
format. In memory it is either merged, an ordinary drafter with weights of its own, or it shares the memory of the live
target's parameters and adds only the adapter's. It never shares the target's *modules*: an adapter that is switched on
a shared module would race with the target's thread.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .backbones import decoder_layers
from .checkpoints import check_weight_files, find_file, refuse_other_tensors, tensor_names


try:
    from peft import PeftModel, get_peft_model_state_dict
except ImportError:  # code that came with a repository runs without it, as long as no adapter is involved
    PeftModel = None


# What a drafter has beside its backbone, and no base brings.
OWN_MODULES = ("mask_embedding.", "chained_head.")
ADAPTER_FOLDER = "adapter"
# Keyword arguments of `from_pretrained` that are about the drafter's own repository, and none of its base's business.
_OF_THE_DRAFTER = {"adapter_kwargs", "code_revision", "config", "revision", "subfolder"}
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def state_with_layers(model: PreTrainedModel, kept: list[int] | None) -> dict[str, torch.Tensor]:
    """A model's state dict with only the kept layers, renumbered; the parameters themselves, not copies."""
    state = model.state_dict(keep_vars=True)
    if kept is None:
        return state
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers) + "."
    renumbered = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            index, rest = name[len(prefix) :].split(".", 1)
            if int(index) not in kept:
                continue
            name = f"{prefix}{kept.index(int(index))}.{rest}"
        renumbered[name] = tensor
    return renumbered


def load_base(config, /, **kwargs) -> PreTrainedModel:
    """
    The base model that an adapter drafter's config names; the embedded one where the Hub cannot be reached.

    Args:
        kwargs:
            What the drafter's `from_pretrained` was given. An Auto class adds keywords with an underscore for the
            class that it calls (`_from_auto`, `_commit_hash`): they are left out, with what is about the drafter
            alone, since the base's Auto class adds its own.
    """
    kwargs = {
        name: value for name, value in kwargs.items() if not name.startswith("_") and name not in _OF_THE_DRAFTER
    }
    name = config.adapter_base
    try:
        from d3d_hf.embedded import resolve

        name = resolve(name)
    except ImportError:  # code that came with a repository, without the package
        pass
    if kwargs.get("use_safetensors") is None:
        kwargs["use_safetensors"] = True
    check_weight_files(name, **kwargs)
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def check_base(config, base: PreTrainedModel):
    """
    Raises:
        ValueError: The base is of another shape than the model that the adapter was trained on.
    """
    wanted, given = config.backbone_config, base.config
    num_layers = config.num_hidden_layers if config.kept_layers is None else max(config.kept_layers) + 1
    same_shape = wanted.model_type == given.model_type and wanted.hidden_size == given.hidden_size
    if not same_shape or given.num_hidden_layers < num_layers:
        raise ValueError(
            f"The adapter was trained on {config.adapter_base!r} ({wanted.model_type}, hidden size "
            f"{wanted.hidden_size}, at least {num_layers} layers), but the base is {given.model_type}, of hidden size "
            f"{given.hidden_size} and {given.num_hidden_layers} layers: pass the model that it was trained on."
        )


def share_parameters(drafter: PreTrainedModel, base: PreTrainedModel, kept: list[int] | None):
    """
    Puts the base's parameters into a drafter that was built on the meta device: the same memory, other `nn.Parameter`
    objects, so that freezing or adapting the drafter leaves the base alone. Tied parameters stay tied.
    """
    state = state_with_layers(base, kept)
    shared = {}
    for name, _ in list(drafter.named_parameters(remove_duplicate=False)):
        if name not in state:
            continue
        source = state[name]
        parameter = shared.setdefault(id(source), nn.Parameter(source.detach(), requires_grad=False))
        module_name, _, leaf = name.rpartition(".")
        drafter.get_submodule(module_name)._parameters[leaf] = parameter
    # Buffers that no state dict holds (RoPE frequencies) are the base's own, from modules above the layers.
    buffers = dict(base.named_buffers())
    for name, _ in list(drafter.named_buffers()):
        module_name, _, leaf = name.rpartition(".")
        drafter.get_submodule(module_name)._buffers[leaf] = state.get(name, buffers.get(name))


def attach_adapter(drafter: PreTrainedModel, name_or_path: str, subfolder: str = "", **kwargs) -> "PeftModel":
    """
    Wraps a drafter in the adapter of an adapter drafter's folder or repository.

    Args:
        drafter (`PreTrainedModel`): Without adapters.
        name_or_path (`str`): The folder or repository.
        subfolder (`str`, *optional*): Where in it the drafter lies.
        kwargs: Where and how to look on the Hub.

    Raises:
        OSError: The adapter is missing, damaged, or stored as a pickle file.
        ValueError: Tensors are missing or too many.
    """
    if PeftModel is None:
        raise ImportError(f"{name_or_path!r} holds an adapter, which needs the peft package: pip install peft")
    subfolder = "/".join(part for part in (subfolder, ADAPTER_FOLDER) if part)
    path = find_file(name_or_path, _ADAPTER_WEIGHTS, subfolder, **kwargs)
    if path is None:
        raise OSError(
            f"{name_or_path!r} has no {subfolder}/{_ADAPTER_WEIGHTS}: save the adapter again. Adapters in pickle "
            f"files, which can run code when they are read, are not loaded."
        )
    found = tensor_names(path)
    own = {f"base_model.model.{name}" for name, _ in drafter.named_parameters() if name.startswith(OWN_MODULES)}
    refuse_other_tensors(name_or_path, own - found, set())
    # This brings it into the same folder of the Hub's cache as the weights.
    _refuse_imports(name_or_path, find_file(name_or_path, "adapter_config.json", subfolder, **kwargs))
    wrapped = PeftModel.from_pretrained(drafter, str(Path(path).parent))
    wanted = _adapter_state(drafter).keys()
    refuse_other_tensors(name_or_path, wanted - found, found - wanted)
    return wrapped


def _refuse_imports(name_or_path: str, config_path: str | None):
    """PEFT imports the module that `megatron_core` names, which may lie in the working folder."""
    if config_path is None:
        raise OSError(f"{name_or_path!r} has an adapter without its adapter_config.json: save it again.")
    with open(config_path, encoding="utf-8") as file:
        if json.load(file).get("megatron_config"):
            raise ValueError(
                f"adapter_config.json of {name_or_path!r} sets megatron_config, which makes PEFT import modules by "
                f"name: do not trust this adapter, or take that line out."
            )


def _adapter_state(drafter: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter that a drafter carries, by PEFT's names."""
    return {
        name if name.startswith("base_model.") else f"base_model.model.{name}": tensor.contiguous()
        for name, tensor in get_peft_model_state_dict(drafter, save_embedding_layers=False).items()
    }


def save_adapter(drafter: PreTrainedModel, folder: str):
    """
    Writes `config.json`, `generation_config.json` and `adapter/` of a drafter that carries one adapter.

    Raises:
        ValueError: The config names no base.
    """
    config = drafter.config
    base_name = config.adapter_base or config.backbone_config.name_or_path or config.target_name_or_path
    if not base_name:
        raise ValueError(
            "The drafter's config names no base for its adapter: set drafter.config.adapter_base to the name or path "
            "of the model that it was made from."
        )
    path = Path(folder) / ADAPTER_FOLDER
    path.mkdir(parents=True, exist_ok=True)
    config.adapter_base = base_name
    custom_object_save(drafter, folder, config=config)
    config.save_pretrained(folder)
    drafter.generation_config.save_pretrained(folder)
    (peft_config,) = drafter.peft_config.values()
    peft_config.base_model_name_or_path, peft_config.inference_mode = base_name, True
    peft_config.save_pretrained(path)
    save_file(_adapter_state(drafter), path / _ADAPTER_WEIGHTS, metadata={"format": "pt"})


__all__ = [
    "ADAPTER_FOLDER",
    "OWN_MODULES",
    "attach_adapter",
    "check_base",
    "load_base",
    "save_adapter",
    "share_parameters",
    "state_with_layers",
]
