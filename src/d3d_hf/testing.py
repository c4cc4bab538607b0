"""For tests, here and of users: tiny models and drafters whose drafts are known.

Every model is random, made from a config, float32, on the CPU, and needs no network. A scripted drafter runs its real
packed passes and then overrides their logits, so that all bookkeeping is the real one and only the tokens are planned.
"""

import functools
import string
from collections.abc import Callable, Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model.modeling_d3d import D3DDrafterForCausalLM
from .model.packing import PackedLayout


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.5,  # far from ties, so that greedy choices do not hang on rounding
}
_MOE_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING_WINDOW = 8

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gemma3")


def tiny_config(architecture: str, vocab_size: int = 67, num_layers: int = 2, **overrides):
    """
    A tiny config of one of `ARCHITECTURES`. `"gemma3"` alternates sliding layers of window 8 and full ones.

    Raises:
        ValueError: Another architecture.
    """
    sizes = {**_SIZES, "vocab_size": vocab_size, "num_hidden_layers": num_layers, **overrides}
    if architecture == "llama":
        return LlamaConfig(**sizes)
    if architecture == "qwen3":
        return Qwen3Config(head_dim=8, **sizes)
    if architecture == "qwen3_moe":
        return Qwen3MoeConfig(head_dim=8, **_MOE_SIZES, **sizes)
    if architecture == "gemma3":
        layer_types = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
        return Gemma3TextConfig(head_dim=8, sliding_window=SLIDING_WINDOW, layer_types=layer_types, **sizes)
    raise ValueError(f"architecture is {architecture!r}: choose one of {ARCHITECTURES}.")


_CLASSES = {
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "gemma3": Gemma3ForCausalLM,
}


def tiny_model(
    architecture: str = "llama", seed: int = 0, attn_implementation: str = "sdpa", **config_overrides
) -> PreTrainedModel:
    """A tiny random causal language model; the same seed gives the same weights, the global seed is left alone."""
    config = tiny_config(architecture, **config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _CLASSES[architecture]._from_config(config, attn_implementation=attn_implementation)
    return model.float().eval()


def tiny_tokenizer(vocab_size: int = 67) -> PreTrainedTokenizerFast:
    """
    A tokenizer for the tiny models: every token but `<pad>` (0) and `<s>` (1) is one character, so that stop strings
    of `n` characters are `n` tokens long. Its chat template writes one letter per role.

    Raises:
        ValueError: More tokens than it has characters for, or fewer than stop strings need (`a` to `f`).
    """
    characters = string.ascii_letters + string.digits + " .\n"
    if not 8 <= vocab_size <= len(characters) + 2:
        raise ValueError(f"vocab_size is {vocab_size}: give 8 to {len(characters) + 2}.")
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", *characters[: vocab_size - 2]])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<s>"])
    template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] + '.' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", unk_token="<pad>", chat_template=template
    )


def memoryless_model(vocab_size: int = 11, seed: int = 0, spread: float = 2.0) -> PreTrainedModel:
    """
    A model whose next-token law depends on the last token alone, so that it is known exactly: `law = softmax(table)`
    with `table = transition_logits(model)`. Attention and MLP of its one layer put out zeros.
    """
    model = tiny_model("llama", seed=seed, vocab_size=vocab_size, num_layers=1)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        scale = transition_logits(model).std()
        model.lm_head.weight.mul_(spread / scale)
    return model


@torch.no_grad()
def transition_logits(model: PreTrainedModel) -> torch.Tensor:
    """The table of a memoryless model: row `i` holds the logits after token `i`. Shape `(vocab, vocab)`."""
    vocab_size = model.config.vocab_size
    return model(torch.arange(vocab_size)[:, None]).logits[:, 0].float()


class ForwardCounter:
    """
    Counts a model's forwards, or calls of another of its methods, while it is used as a context manager.

    ```python
    with ForwardCounter(target) as forwards:
        target.generate(...)
    assert forwards.count < 10
    ```
    """

    def __init__(self, model: PreTrainedModel, method: str = "forward"):
        self._model, self._method = model, method
        self.count = 0

    def __enter__(self):
        original = getattr(self._model, self._method)

        @functools.wraps(original)
        def counted(*args, **kwargs):
            self.count += 1
            return original(*args, **kwargs)

        setattr(self._model, self._method, counted)
        return self

    def __exit__(self, *exc_info):
        delattr(self._model, self._method)


class ScriptedDrafter(D3DDrafterForCausalLM):
    """
    A drafter whose drafts are planned: the output that predicts the token at position `p` says `script(p, slot)`,
    where `slot` counts the draft tokens of a block from 0. Made by the functions below.
    """

    script: Callable[[int, int], int] | None = None

    def packed_forward(self, input_ids, layout: PackedLayout, cache=None, logits_to_keep=0, **kwargs):
        outputs = super().packed_forward(input_ids, layout, cache=cache, logits_to_keep=None, **kwargs)
        positions = layout.position_ids[0]
        slots = positions - layout.context_limits[0]
        if logits_to_keep is None:
            slots = slots - 1  # a packed pass drafts what follows the bonus, where a branch's first slot stands
        planned = [self.script(p + 1, max(s, 0)) for p, s in zip(positions.tolist(), slots.tolist(), strict=True)]
        (hidden_states,) = outputs.hidden_states
        hidden_states = torch.zeros_like(hidden_states)
        hidden_states[..., 0] = torch.tensor(planned)
        if logits_to_keep is None:
            return CausalLMOutputWithPast(hidden_states=(hidden_states,))
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = hidden_states[:, rows]
        return CausalLMOutputWithPast(logits=self.project(hidden_states), hidden_states=(hidden_states,))

    def project(self, hidden_states: torch.Tensor, backbone=None) -> torch.Tensor:
        """Reads the planned token out of the first channel."""
        logits = torch.zeros(*hidden_states.shape[:-1], self.config.vocab_size)
        return logits.scatter(-1, hidden_states[..., :1].round().long(), 30.0)


def scripted_drafter(
    script: Callable[[int, int], int], architecture: str = "llama", block_size: int = 5, vocab_size: int = 67, **kwargs
) -> ScriptedDrafter:
    """A tiny drafter that drafts `script(position, slot)`: see [`ScriptedDrafter`]."""
    model = tiny_model(architecture, seed=1234, vocab_size=vocab_size, num_layers=2)
    drafter = ScriptedDrafter.from_backbone(model, block_size=block_size, **kwargs)
    drafter.script = script
    return drafter


def _tokens_of(reference) -> list[int]:
    return torch.as_tensor(reference).reshape(-1).tolist()


def oracle_drafter(reference: torch.LongTensor, **kwargs) -> ScriptedDrafter:
    """
    A drafter that proposes the target's own continuation.

    Args:
        reference (`torch.LongTensor` of shape `(1, length)`): Prompt and continuation, as plain `generate` gives them.
        kwargs: Passed to [`scripted_drafter`].
    """
    return noisy_oracle_drafter(reference, wrong_slots=(), **kwargs)


def noisy_oracle_drafter(reference: torch.LongTensor, wrong_slots: Sequence[int], **kwargs) -> ScriptedDrafter:
    """An oracle that is wrong at the given slots (from 0) of every block."""
    wrong = frozenset(wrong_slots)
    return acceptance_profile_drafter(reference, lambda slot: 0.0 if slot in wrong else 1.0, **kwargs)


def anti_oracle_drafter(reference: torch.LongTensor, **kwargs) -> ScriptedDrafter:
    """A drafter that never proposes the target's own token."""
    return acceptance_profile_drafter(reference, lambda slot: 0.0, **kwargs)


def acceptance_profile_drafter(
    reference: torch.LongTensor,
    profile: Sequence[float] | Callable[[int], float],
    seed: int = 0,
    vocab_size: int = 67,
    **kwargs,
) -> ScriptedDrafter:
    """
    An oracle that is right at slot `j` of a block with probability `profile[j]`, drawn once per position and slot from
    `seed`, so that the same text gives the same drafts. Beyond the reference's end it drafts token 0.

    Args:
        reference (`torch.LongTensor` of shape `(1, length)`): Prompt and continuation.
        profile (sequence of `float` or `Callable`): Probability per slot; slots beyond its end take its last value.
        seed (`int`, *optional*, defaults to 0): Of the draws.
        vocab_size (`int`, *optional*, defaults to 67): The target's.
        kwargs: Passed to [`scripted_drafter`].
    """
    tokens = _tokens_of(reference)
    chance = profile if callable(profile) else lambda slot: profile[min(slot, len(profile) - 1)]

    @functools.cache
    def is_right(position: int, slot: int) -> bool:
        if chance(slot) in (0, 1):
            return bool(chance(slot))
        generator = torch.Generator().manual_seed(hash((seed, position, slot)) % 2**63)
        return float(torch.rand((), generator=generator)) < chance(slot)

    def script(position: int, slot: int) -> int:
        token = tokens[position] if position < len(tokens) else 0
        return token if is_right(position, slot) else (token + 1) % vocab_size

    return scripted_drafter(script, vocab_size=vocab_size, **kwargs)


__all__ = [
    "ARCHITECTURES",
    "ForwardCounter",
    "ScriptedDrafter",
    "acceptance_profile_drafter",
    "anti_oracle_drafter",
    "memoryless_model",
    "noisy_oracle_drafter",
    "oracle_drafter",
    "scripted_drafter",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "transition_logits",
]
