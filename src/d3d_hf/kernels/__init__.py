"""
Kernels for packed passes on GPUs, in Triton, each beside a readable twin in torch.

| Function | What it does |
|---|---|
| `packed_attention(query, key, value, visibility, scaling=None, num_splits=None)` | Attention of a packed pass |
| `choose_tokens(logits, vocab_size=None, never_drafted=())` | Greedy choice and its probability, in one pass |
| `choose_rows(hidden_states, rows, project, vocab_size=None, never_drafted=())` | The same from hidden states |
| `visibility_of(layout, sliding_window=None, num_tokens=None)` | What a packed pass's tokens see, in small integers |

Importing d3d_hf registers the attention with transformers as `attn_implementation="d3d_packed"`. That takes neither a
GPU nor Triton: on other devices, without Triton and where gradients are wanted, the functions run their twins,
`packed_attention_twin` and `choose_tokens_twin`. Triton itself is imported when a kernel first runs.
"""

from .attention import packed_attention, packed_attention_twin
from .attention_interface import ATTENTION_NAME, register_packed_attention
from .token_choice import TokenChoice, choose_rows, choose_tokens, choose_tokens_twin
from .visibility import dense_visibility, visibility_of


__all__ = [
    "ATTENTION_NAME",
    "TokenChoice",
    "choose_rows",
    "choose_tokens",
    "choose_tokens_twin",
    "dense_visibility",
    "packed_attention",
    "packed_attention_twin",
    "register_packed_attention",
    "visibility_of",
]
