"""The configuration of a D3D drafter: a nested backbone config and what turns the backbone into a denoiser."""

import copy
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig


BLOCK_ATTENTIONS = ("bidirectional", "causal")
_BACKBONE_SIZES = (
    "head_dim",
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "sliding_window",
)


class D3DConfig(PreTrainedConfig):
    r"""
    Configuration of a [`D3DDrafterForCausalLM`].

    Args:
        backbone_config (`PreTrainedConfig` or `dict`):
            Configuration of the decoder-only backbone, of any architecture whose attention can be packed.
        block_size (`int`, *optional*, defaults to 8):
            Draft tokens that one block yields: one from the anchor's own output and `block_size - 1` from mask slots.
        mask_token_id (`int`, *optional*):
            Token id whose embedding stands in the mask slots. `None` gives the drafter a mask embedding of its own and
            adds nothing to the vocabulary.
        block_attention (`"bidirectional"` or `"causal"`, *optional*, defaults to `"bidirectional"`):
            Whether a mask slot sees every mask slot of its branch or only the earlier ones.
        chained_head_size (`int`, *optional*):
            Size of the recurrent state of a head that tells each mask slot which tokens were chosen before it; see
            chained_head.py. `None` for no such head.
        vocab_size (`int`, *optional*):
            Width of the drafting vocabulary, which is the target's. The backbone may hold more embedding rows (they
            are never drafted) or fewer. Defaults to the backbone's.
        target_name_or_path (`str`, *optional*):
            The model that the drafter drafts for.
        kept_layers (`list[int]`, *optional*):
            Indices, in the model that the backbone was copied from, of the layers that were kept; `None` for all.
        adapter_base (`str`, *optional*):
            Name or path of the model that the drafter's adapter belongs to, if it is stored as one.
        training_recipe (`dict`, *optional*):
            How the drafter was trained (data, chat template and its settings, losses), for the model card.
    """

    model_type = "d3d"
    sub_configs = {"backbone_config": AutoConfig}

    def __init__(
        self,
        backbone_config: PreTrainedConfig | dict[str, Any] | None = None,
        block_size: int = 8,
        mask_token_id: int | None = None,
        block_attention: str = "bidirectional",
        chained_head_size: int | None = None,
        vocab_size: int | None = None,
        target_name_or_path: str | None = None,
        kept_layers: list[int] | None = None,
        adapter_base: str | None = None,
        training_recipe: dict[str, Any] | None = None,
        **kwargs,
    ):
        if backbone_config is None:
            backbone_config = {"model_type": "llama"}  # transformers makes configs without arguments, to compare with
        backbone_config = _as_config(backbone_config)
        self.backbone_config = backbone_config
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.block_attention = block_attention
        self.chained_head_size = chained_head_size
        self.vocab_size = getattr(backbone_config, "vocab_size", None) if vocab_size is None else vocab_size
        self.target_name_or_path = target_name_or_path
        self.kept_layers = kept_layers
        self.adapter_base = adapter_base
        self.training_recipe = training_recipe
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, getattr(backbone_config, name, None))
        kwargs.setdefault("tie_word_embeddings", getattr(backbone_config, "tie_word_embeddings", False))
        super().__init__(**kwargs)
        self._validate()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        if not config_dict.get("backbone_config"):
            raise ValueError("The config has no 'backbone_config': it is not that of a D3D drafter, or it is damaged.")
        return super().from_dict(config_dict, **kwargs)

    def __getattr__(self, name: str):
        """The sizes of the backbone, which generate, PEFT and accelerate look for on a model's own config."""
        if name not in _BACKBONE_SIZES or "backbone_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.backbone_config, name)

    def _validate(self):
        if not _is_whole(self.block_size) or self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size!r}: give a whole number of at least 1 (8 is usual).")
        if self.block_attention not in BLOCK_ATTENTIONS:
            raise ValueError(f"block_attention is {self.block_attention!r}: choose one of {BLOCK_ATTENTIONS}.")
        rows = getattr(self.backbone_config, "vocab_size", 0)
        mask = self.mask_token_id
        if mask is not None and not (_is_whole(mask) and 0 <= mask < rows):
            raise ValueError(
                f"mask_token_id is {mask!r}, but the backbone has {rows} embedding rows: give an id "
                f"from 0 to {rows - 1}, or None for a mask embedding of its own."
            )
        size = self.chained_head_size
        if size is not None and not (_is_whole(size) and size >= 1):
            raise ValueError(
                f"chained_head_size is {size!r}: give a whole number (256 is usual), or None for no head."
            )
        if not _is_whole(self.vocab_size) or self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size!r}: give the target's vocabulary size.")
        kept = self.kept_layers
        if kept is not None and not (isinstance(kept, (list, tuple)) and all(_is_whole(index) for index in kept)):
            raise ValueError(f"kept_layers is {kept!r}: give a list of layer indices, or None for all layers.")


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_config(backbone_config: PreTrainedConfig | dict[str, Any]) -> PreTrainedConfig:
    """A config of the drafter's own: what is passed in stays as it is."""
    if isinstance(backbone_config, PreTrainedConfig):
        return copy.deepcopy(backbone_config)
    if not isinstance(backbone_config, dict):
        raise ValueError(f"backbone_config is {backbone_config!r}: give a config, or the dictionary of one.")
    fields = dict(backbone_config)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"backbone_config has the model_type {model_type!r}, which this transformers does not know: name the "
            f"backbone's architecture, e.g. 'qwen3'."
        )
    return AutoConfig.for_model(model_type, **fields)


__all__ = ["D3DConfig"]
