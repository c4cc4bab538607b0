"""What the benchmarks share: prompts as inputs of `generate`."""

import json
from pathlib import Path


def chat_inputs(path: Path, tokenizer, first: int = 0, max_samples: int | None = None) -> list:
    """
    The first turns of a JSONL file of `turns`, as a chat's opening.

    Args:
        path (`Path`): The file.
        tokenizer: The target's, with a chat template.
        first (`int`, *optional*, defaults to 0): Prompt to begin with.
        max_samples (`int`, *optional*): Prompts at most.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()[first:][:max_samples]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["turns"][0]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        for line in lines
    ]
