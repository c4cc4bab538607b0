"""How a drafter is made, loaded and saved: out of a model, from a checkpoint or an adapter, on a live target."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .adapters import (
    OWN_MODULES,
    attach_adapter,
    check_base,
    load_base,
    save_adapter,
    share_parameters,
    state_with_layers,
)
from .backbones import check_packable, config_with_layers, resolve_kept_layers
from .checkpoints import hub_arguments, load_checked
from .configuration_d3d import D3DConfig


class DrafterLoading:
    """The class methods of [`D3DDrafterForCausalLM`] that make drafters, and how it is saved."""

    @classmethod
    def from_backbone(
        cls,
        model: PreTrainedModel | str,
        block_size: int = 8,
        kept_layers: int | list[int] | None = None,
        mask_token_id: int | None = None,
        block_attention: str = "bidirectional",
        chained_head_size: int | None = None,
        vocab_size: int | None = None,
        target_name_or_path: str | None = None,
        **kwargs,
    ) -> "DrafterLoading":
        r"""
        Makes an untrained drafter out of a causal language model. Untrained, it drafts its first token as the model
        would and the masked ones badly.

        Args:
            model (`PreTrainedModel` or `str`):
                The model to copy, or its name or path. A model that is passed in is not changed and shares nothing.
            block_size (`int`, *optional*, defaults to 8): Draft tokens that one block yields.
            kept_layers (`int` or `list[int]`, *optional*):
                Layers to keep: a number spreads them evenly, first and last included; a list names them. Default: all.
            mask_token_id (`int`, *optional*): Existing token whose embedding stands in mask slots. Default: a new one.
            block_attention (`"bidirectional"` or `"causal"`): What the mask slots of a branch see of each other.
            chained_head_size (`int`, *optional*):
                Size of a head that tells each mask slot which tokens were chosen before it (256 is usual): longer
                accepted drafts for little work. Default: no such head.
            vocab_size (`int`, *optional*): The target's vocabulary size, if it differs from the model's.
            target_name_or_path (`str`, *optional*): The model to draft for. Default: the model that is copied.
            kwargs: Passed to `AutoModelForCausalLM.from_pretrained` if `model` is a name. `dtype` defaults to "auto".

        Returns:
            [`D3DDrafterForCausalLM`] in eval mode, in the model's dtype and on its device.

        Raises:
            ValueError: The model cannot be packed, or an argument is out of range.
        """
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": "auto", **kwargs})
        elif kwargs:
            raise ValueError(f"{sorted(kwargs)} can be given only with a model's name, not with a loaded model.")
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"{type(model).__name__} carries adapters: fold them in first, with model.merge_and_unload()."
            )
        if isinstance(model, DrafterLoading):
            raise ValueError("The model is a D3D drafter already: load or copy it instead.")
        if getattr(model, "is_quantized", False) or any(p.device.type == "meta" for p in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} is quantised or keeps weights elsewhere, so that they cannot be copied: load "
                f"it in full, e.g. from_backbone({model.config.name_or_path!r})."
            )
        source_config = model.config
        check_packable(source_config)
        kept = resolve_kept_layers(kept_layers, source_config.num_hidden_layers)
        backbone_config = copy.deepcopy(source_config) if kept is None else config_with_layers(source_config, kept)
        config = D3DConfig(
            backbone_config,
            block_size=block_size,
            mask_token_id=mask_token_id,
            block_attention=block_attention,
            chained_head_size=chained_head_size,
            vocab_size=vocab_size,
            target_name_or_path=target_name_or_path or source_config.name_or_path or None,
            kept_layers=kept,
        )
        drafter = cls._copy_of(model, config)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(drafter.generation_config, name, getattr(model.generation_config, name, None))
        if drafter.mask_embedding is not None:
            with torch.no_grad():
                drafter.mask_embedding.weight.copy_(drafter.get_input_embeddings().weight.float().mean(dim=0))
        return drafter.eval()

    @classmethod
    def _copy_of(cls, model: PreTrainedModel, config: D3DConfig) -> "DrafterLoading":
        """A drafter with the weights of a model's kept layers; its mask embedding is left to the caller."""
        attn_implementation = _packable_attention(model)
        drafter = cls._from_config(config, dtype=model.dtype, attn_implementation=attn_implementation).to(model.device)
        missing, unexpected = drafter._backbone.load_state_dict(
            state_with_layers(model, config.kept_layers), strict=False
        )
        missing = {name for name in missing if not name.startswith(OWN_MODULES)}
        if unexpected or missing:
            raise ValueError(
                f"The layers {config.kept_layers} of {type(model).__name__} do not make a model of its own "
                f"architecture (missing {sorted(missing)}, unexpected {unexpected}): choose other kept_layers."
            )
        return drafter

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, merge_adapter: bool = True, **kwargs
    ) -> "DrafterLoading":
        r"""
        `PreTrainedModel.from_pretrained`, for drafters that are stored as an adapter too.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub name.
            merge_adapter (`bool`, *optional*, defaults to `True`):
                Whether an adapter is merged into the weights of its base, or kept beside them.
            kwargs:
                As in `PreTrainedModel.from_pretrained`; the base of an adapter is loaded with them. Weights in pickle
                files are loaded with `use_safetensors=False` alone.

        Raises:
            OSError: There are no safetensors weights, or they are damaged.
            ValueError:
                Tensors are missing or too many, an index names a file elsewhere, or the adapter belongs to a model of
                another shape than its base, or its base is to be quantised.
        """
        name, config = pretrained_model_name_or_path, kwargs.get("config")
        where = hub_arguments(kwargs)
        subfolder = kwargs.get("subfolder", "")
        if not isinstance(config, PreTrainedConfig):
            config = cls.config_class.from_pretrained(config or name, subfolder=subfolder, **where)
        if config.adapter_base is None:
            return load_checked(super().from_pretrained, name, *args, stored_config=config, **kwargs)
        if kwargs.get("quantization_config") is not None:
            raise ValueError(
                f"{str(name)!r} is an adapter, which cannot be merged into a quantised base: load it without "
                f"quantization_config, save it, and load what was saved with it."
            )
        base = load_base(config, **kwargs)
        check_base(config, base)
        wrapped = attach_adapter(cls._copy_of(base, config), str(name), subfolder=subfolder, **where)
        if not merge_adapter:
            return wrapped.get_base_model().eval()
        drafter = wrapped.merge_and_unload()
        drafter.config.adapter_base = None
        if hasattr(drafter, "peft_config"):
            del drafter.peft_config
        return drafter.eval()

    @classmethod
    def from_target(cls, target: PreTrainedModel, adapter: str, **kwargs) -> "DrafterLoading":
        r"""
        A drafter that is an adapter on the live target: it shares the memory of the target's parameters and adds the
        adapter's alone. The target itself is not changed. Move or cast the target before, not afterwards: the memory
        is shared as it is.

        Args:
            target (`PreTrainedModel`): The loaded base of the adapter.
            adapter (`str` or `os.PathLike`): Folder or Hub name of an adapter drafter.
            kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, `subfolder`.

        Raises:
            ValueError: What is at `adapter` is no adapter drafter, or of a model of another shape.
        """
        subfolder, where = kwargs.get("subfolder", ""), hub_arguments(kwargs)
        config = cls.config_class.from_pretrained(adapter, subfolder=subfolder, **where)
        if config.adapter_base is None:
            raise ValueError(f"{str(adapter)!r} holds a whole drafter: load it with from_pretrained.")
        check_base(config, target)
        with torch.device("meta"):
            drafter = cls._from_config(config, dtype=target.dtype, attn_implementation=_packable_attention(target))
        share_parameters(drafter, target, config.kept_layers)
        for module in (drafter.mask_embedding, drafter.chained_head):
            if module is not None:
                module.to_empty(device=target.device)
        return attach_adapter(drafter, str(adapter), subfolder=subfolder, **where).get_base_model().eval()

    def save_pretrained(self, save_directory, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`; a drafter that carries an adapter is stored as that adapter."""
        if hasattr(self, "peft_config"):
            if kwargs.get("push_to_hub"):
                raise ValueError("push_to_hub=True is not for adapters: call push_to_hub(repo_id) instead.")
            save_adapter(self, save_directory)
        else:
            super().save_pretrained(save_directory, *args, **kwargs)


def _packable_attention(model: PreTrainedModel) -> str:
    """The model's attention implementation, or SDPA where that one takes no packed masks."""
    implementation = model.config._attn_implementation
    return "sdpa" if "flash" in implementation else implementation


__all__ = ["DrafterLoading"]
