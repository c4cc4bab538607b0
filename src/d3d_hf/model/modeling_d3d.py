"""The drafter: a decoder-only language model turned into a blockwise denoiser."""

import copy
import logging

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .backbones import cache_argument, refuse_unpackable
from .candidate_generator import CandidateGeneratorDoor
from .chained_head import ChainedHead
from .configuration_d3d import D3DConfig
from .extensions import extensions
from .generation_hook import install_generation_hook, open_door
from .loading import DrafterLoading
from .packing import PackedLayout, attention_masks


logger = logging.getLogger(__name__)


class D3DDrafterForCausalLM(DrafterLoading, PreTrainedModel, GenerationMixin):
    r"""
    A D3D drafter over any decoder-only backbone whose attention can be packed.

    Its parameters bear the backbone's own names (`model.*`, `lm_head.*`), so that a checkpoint is one of the
    backbone's architecture with one vector more, the mask embedding. `forward` is the backbone's own causal language
    model; drafting and training go through `packed_forward`.

    ```python
    drafter = D3DDrafterForCausalLM.from_pretrained("org/d3d-qwen3-8b", dtype="auto")
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
    drafter.last_generation_stats.tokens_per_round
    ```
    """

    config_class = D3DConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _supports_flash_attn = False  # packed masks are 4D
    last_generation_stats = None

    def __init__(self, config: D3DConfig):
        refuse_unpackable(config.backbone_config)
        backbone_class = AutoModelForCausalLM._model_mapping[type(config.backbone_config)]
        self._supports_sdpa = backbone_class._supports_sdpa
        self._supports_flex_attn = backbone_class._supports_flex_attn
        super().__init__(config)
        backbone = AutoModelForCausalLM.from_config(config.backbone_config)
        # The backbone lends its modules and its forward: both objects hold the same dictionaries of modules, so that
        # names carry no prefix and a module that is replaced here (by PEFT, by quantisation) is replaced there.
        for store in ("_modules", "_parameters", "_buffers"):
            getattr(self, store).update(getattr(backbone, store))
            object.__setattr__(backbone, store, getattr(self, store))
        object.__setattr__(self, "_backbone", backbone)
        self.base_model_prefix = backbone.base_model_prefix
        self._tied_weights_keys = backbone._tied_weights_keys
        self._no_split_modules = backbone._no_split_modules
        self._told = set()
        self._is_head_plain = None
        self._cache_argument = cache_argument(backbone)
        self._takes_logits_to_keep = backbone._supports_logits_to_keep()
        self.mask_embedding = None
        if config.mask_token_id is None:
            self.mask_embedding = nn.Embedding(1, self.get_input_embeddings().embedding_dim)
        self.chained_head = None
        if config.chained_head_size is not None:
            self.chained_head = ChainedHead(config.hidden_size, config.chained_head_size)
        # Derived from a model's config, it would lose the drafting options when it is loaded again.
        self.generation_config._from_model_config = False
        self.post_init()

    def _init_weights(self, module):
        if self.chained_head is not None and any(module is part for part in self.chained_head.children()):
            self.chained_head.init_weights_of(module)
        else:
            self._backbone._init_weights(module)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """The name that PEFT asks for, which newer releases of transformers answer with a FutureWarning."""
        if hasattr(PreTrainedModel, "is_activation_checkpointing"):
            return self.is_activation_checkpointing
        return super().is_gradient_checkpointing

    def get_input_embeddings(self) -> nn.Module:
        return self._backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self._backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self._backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module):
        self._backbone.set_output_embeddings(value)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        layout: PackedLayout | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        r"""
        The backbone's ordinary causal language model, or a packed pass if a layout is given.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Token ids.
            labels (`torch.LongTensor` of shape `(batch, length)`, *optional*): For the next-token loss, -100 ignored.
            layout ([`PackedLayout`], *optional*):
                Makes this `packed_forward(input_ids, layout, ...)`, for wrappers like DDP that know `forward` alone.
            kwargs: Whatever else the backbone's forward takes, its KV cache included.
        """
        if layout is not None:
            return self.packed_forward(input_ids, layout, logits_to_keep=logits_to_keep, **kwargs)
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = logits_to_keep
        return self._backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            **kwargs,
        )

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return self._backbone.prepare_inputs_for_generation(*args, **kwargs)

    def packed_forward(
        self,
        input_ids: torch.LongTensor,
        layout: PackedLayout,
        cache=None,
        logits_to_keep: int | torch.Tensor | None = 0,
        slot_tokens: torch.LongTensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        r"""
        One packed pass: context tokens and branches of slots, see packing.py.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tokens)`):
                Token ids in the layout's order; those at mask slots are ignored.
            layout ([`PackedLayout`]): Positions and visibility, on the device of `input_ids`.
            cache (`Cache`, *optional*):
                Holds `layout.num_cached` context tokens and is extended by every token of the pass, slots included.
            logits_to_keep (`int`, `torch.LongTensor` or `torch.BoolTensor`, *optional*, defaults to 0):
                Tokens to compute logits for: the last so many (0: all); those at the indices of a `(rows,)` tensor; or
                those where a `(batch, tokens)` mask is true. `None` leaves the projection out.
            slot_tokens (`torch.LongTensor` of shape `(batch, tokens)`, *optional*):
                For a drafter with a chained head: the tokens that stand at the mask slots, by which each is corrected;
                -1 where nothing is. By default nothing is corrected: drafting does so token by token.

        Returns:
            `CausalLMOutputWithPast` with `hidden_states`, a tuple of the last ones of the rows kept, and, unless
            `logits_to_keep` is `None`, their `logits`: `(batch, rows, hidden)` and `(batch, rows, embedding_rows)`,
            or without the batch dimension where a mask chose the rows. As in any causal language model the output at
            position `p` predicts the token at `p + 1`, for context, visible tokens and mask slots alike.
        """
        hidden_states = None
        if hasattr(cache, "run_static") and not kwargs:  # on a GPU: the whole pass, embedding included, is one graph
            hidden_states = cache.run_static(input_ids, layout)
            if hidden_states is None:
                device = self.get_input_embeddings().weight.device
                input_ids, layout = input_ids.to(device), layout.to(device)
        if hidden_states is None:
            if layout.is_plain_causal:
                embeds = self.get_input_embeddings()(input_ids)
            else:
                embeds = self.embed_slots(input_ids, layout.is_mask_slot)
            hidden_states = self._run_backbone(embeds, layout, cache, **kwargs)  # (batch, tokens, hidden)
        if slot_tokens is not None and self.chained_head is not None:
            token_embeds = self.get_input_embeddings()(slot_tokens.clamp(min=0))
            is_chained = layout.is_mask_slot & (slot_tokens >= 0)
            hidden_states = self.chained_head(hidden_states, token_embeds, layout, is_chained)
        if logits_to_keep is None:
            return CausalLMOutputWithPast(hidden_states=(hidden_states,))
        if isinstance(logits_to_keep, int):
            hidden_states = hidden_states[:, -logits_to_keep or None :]
        elif logits_to_keep.dtype == torch.bool:
            hidden_states = hidden_states[logits_to_keep]
        else:
            hidden_states = hidden_states[:, logits_to_keep.to(hidden_states.device, non_blocking=True)]
        logits = self.project(hidden_states, getattr(cache, "backbone", None))
        return CausalLMOutputWithPast(logits=logits, hidden_states=(hidden_states,))

    def embed_slots(self, input_ids: torch.LongTensor, is_mask_slot: torch.BoolTensor) -> torch.Tensor:
        """
        Embeddings of tokens and mask slots, as the backbone's layers get them.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tokens)`): Token ids; those at mask slots are ignored.
            is_mask_slot (`torch.BoolTensor` of shape `(batch, tokens)`): Where the mask embedding stands.

        Returns:
            `torch.Tensor` of shape `(batch, tokens, hidden)`.
        """
        embeds = self.get_input_embeddings()(input_ids)
        return torch.where(is_mask_slot[..., None], self._mask_vector(embeds), embeds)

    def _run_backbone(self, embeds: torch.Tensor, layout: PackedLayout, cache, **kwargs) -> torch.Tensor:
        """The last hidden states of a pass, from a compiled graph if the cache brings one that serves it."""
        run_pass = getattr(cache, "run_pass", None)
        if run_pass is not None and not kwargs:
            hidden_states = run_pass(embeds, layout)
            if hidden_states is not None:
                return hidden_states
        if cache is not None:
            kwargs[self._cache_argument] = cache
        outputs = self._backbone.base_model(
            inputs_embeds=embeds,
            position_ids=layout.position_ids,
            attention_mask=attention_masks(layout, self._backbone.config, embeds.dtype),
            use_cache=cache is not None,
            **kwargs,
        )
        return outputs.last_hidden_state

    def warmup(self, max_context: int = 1024):
        """
        Compiles ahead what drafting needs for texts of up to `max_context` tokens, so that no generation has to wait
        for it; from then on drafting runs compiled by default. On a CPU in the dtype and on the CPU threads of now,
        some seconds per size of the KV storage; on a GPU passes are captured as CUDA graphs, which later generations
        would do in their first rounds. A drafter that cannot be compiled drafts as before, and one line in the log
        says why.

        Args:
            max_context (`int`, *optional*, defaults to 1024): Tokens of prompt and output.

        Raises:
            ValueError: `max_context` is no number of tokens.
        """
        if not isinstance(max_context, int) or isinstance(max_context, bool) or max_context < 1:
            raise ValueError(f"max_context is {max_context!r}: give a number of tokens, at least 1.")
        if extensions.warm_up is None:  # it comes with the package, not with code loaded from a repository
            raise ImportError("Compiling needs the d3d_hf package: pip install d3d_hf")
        extensions.warm_up(self, max_context)

    def project(self, hidden_states: torch.Tensor, backbone: nn.Module | None = None) -> torch.Tensor:
        """
        The backbone's own way from last hidden states to logits, its scales and soft caps included.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden)`): As the base model returns them.
            backbone (`nn.Module`, *optional*): A stand-in for the backbone that gives the same, compiled.

        Returns:
            `torch.Tensor` of shape `(..., embedding_rows)`.
        """
        head = copy.copy(self._backbone if backbone is None else backbone)
        object.__setattr__(head, "_modules", {**head._modules, self.base_model_prefix: _GivenHiddenStates()})
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        return head(inputs_embeds=rows, use_cache=False).logits.unflatten(1, hidden_states.shape[:-1])[0]

    def shortlist(
        self, logits: torch.Tensor, num_candidates: int
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.Tensor] | None:
        """
        The likeliest tokens of each row, with what it takes to correct their logits when a row's hidden state is
        corrected: a candidate's logit changes by its row of the head times the correction.

        Args:
            logits (`torch.Tensor` of shape `(rows, vocab)`): Before the correction.
            num_candidates (`int`): Tokens per row.

        Returns:
            Tokens and their logits, both of shape `(rows, num_candidates)`, and their rows of the head, `(rows,
            num_candidates, hidden)`; `None` where that is no way to correct, since the head is not a plain matrix, or
            the vocabulary is no larger.
        """
        if num_candidates >= logits.shape[1] or not self.has_plain_head():
            return None
        values, tokens = logits.topk(num_candidates)
        return tokens, values, self.get_output_embeddings().weight[tokens]

    def has_plain_head(self) -> bool:
        """Whether logits are linear in the hidden state with the head's matrix: no scale, no soft cap, not packed."""
        head = self.get_output_embeddings()
        if type(head) is not nn.Linear or not head.weight.is_floating_point():
            return False
        if self._is_head_plain is None:
            probe = torch.linspace(-1, 1, head.in_features, device=head.weight.device, dtype=head.weight.dtype)[None]
            self._is_head_plain = torch.equal(self.project(probe), head(probe))
        return self._is_head_plain

    def _mask_vector(self, embeds: torch.Tensor) -> torch.Tensor:
        """The mask embedding, shape `(hidden,)`: it stands where scaled embeddings stand."""
        if self.mask_embedding is None:
            return self.get_input_embeddings()(torch.full((), self.config.mask_token_id, device=embeds.device))
        # Made on the device: a copy from the CPU could not be captured in a graph.
        return self.mask_embedding(torch.zeros((), dtype=torch.long, device=embeds.device)).to(embeds.dtype)


class _GivenHiddenStates(nn.Module):
    """Stands in for the base model of a causal language model and returns the hidden states that it is given."""

    class Output:
        def __init__(self, last_hidden_state: torch.Tensor):
            self.last_hidden_state = last_hidden_state

        def __getitem__(self, index):
            return (self.last_hidden_state,)[index]

        def __getattr__(self, name):
            return None  # caches, attentions, router logits: there are none

    def forward(self, *args, inputs_embeds: torch.Tensor, **kwargs) -> Output:
        return self.Output(inputs_embeds)


AutoConfig.register("d3d", D3DConfig, exist_ok=True)
AutoModelForCausalLM.register(D3DConfig, D3DDrafterForCausalLM, exist_ok=True)
D3DConfig.register_for_auto_class()
D3DDrafterForCausalLM.register_for_auto_class("AutoModelForCausalLM")
install_generation_hook()
open_door(CandidateGeneratorDoor())

__all__ = ["D3DDrafterForCausalLM"]
