"""Regeneration: the target's own answers to a prompt set, as token ids, for drafters to learn its words from.

A conversation is played through turn by turn, every assistant's turn being the target's own. An engine answers what is
ready: transformers' batched `generate`, or any OpenAI-compatible server for scale.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from .chat_template import Template
from .conversations import Conversations
from .prompts import Prompt, prompts_digest
from .provenance import versions
from .responses import FORMAT_VERSION, ResponseFolder, text_digest, tokenizer_fingerprint
from .server_engine import ServerEngine
from .transformers_engine import TransformersEngine


@dataclass
class Summary:
    """
    What a run did, on this process.

    Attributes:
        num_rows, num_skipped, num_tokens (`int`): Written; of those, left out as too long; response tokens.
        num_present (`int`): Rows that were there already.
        seconds (`float`): Time in the engine.
    """

    num_rows: int
    num_skipped: int
    num_tokens: int
    num_present: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def regenerate(
    engine: TransformersEngine | ServerEngine,
    template: Template,
    prompts: Sequence[Prompt],
    output: str,
    target: str,
    prompt_source: str,
    process_index: int = 0,
    num_processes: int = 1,
    wait_for_everyone=lambda: None,
    shows_progress: bool = False,
) -> Summary:
    """
    Writes the target's answers to `output`, or goes on with what an interrupted run has left there.

    Args:
        engine ([`TransformersEngine`] or [`ServerEngine`]): What answers.
        template ([`Template`]): The target's.
        prompts (sequence of [`Prompt`]): All of them, on every process.
        output (`str`): A folder, see responses.py.
        target (`str`): The target's name, which drafters will be checked against.
        prompt_source (`str`): What the prompts are called in the metadata.
        process_index, num_processes (`int`, *optional*): This process answers every `num_processes`th prompt.
        wait_for_everyone (`Callable()`, *optional*): A barrier over the processes.
        shows_progress (`bool`, *optional*, defaults to `False`): A progress bar on stderr.

    Raises:
        ValueError: `output` was begun with other settings, or a conversation cannot be written by the template.
        ServerError: Answers of a server failed for good.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "target": target,
        "vocab_size": engine.vocab_size,
        "tokenizer_fingerprint": tokenizer_fingerprint(template.tokenizer),
        "chat_template": {
            "sha256": text_digest(template.text),
            "settings": template.settings,
            "system": template.system,
        },
        "generation": asdict(engine.decoding),
        "engine": engine.describe(),
        "prompts": {
            "source": prompt_source,
            "num_prompts": len(prompts),
            "num_rows": sum(len(prompt.turns) for prompt in prompts),
            "sha256": prompts_digest(prompts),
        },
        "versions": versions(),
    }
    folder = ResponseFolder(output, process_index, num_processes)
    folder.check(metadata, lambda count: prompts_digest(prompts[:count]))
    mine = prompts[process_index::num_processes]
    try:
        stored = {row["id"]: row for row in folder.open(metadata, template.text, wait_for_everyone)}
        num_present = sum(f"{prompt.index}-{turn}" in stored for prompt, turn in _turns(mine))
        conversations = Conversations(mine, template, folder, stored)
        start = time.perf_counter()
        with _progress(conversations, sum(1 for _ in _turns(mine)), num_present, shows_progress):
            engine.answer_all(conversations)
    finally:
        folder.close()
    return Summary(
        conversations.num_rows,
        conversations.num_skipped,
        conversations.num_tokens,
        num_present,
        time.perf_counter() - start,
    )


def _turns(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, int]]:
    return ((prompt, turn) for prompt in prompts for turn in range(len(prompt.turns)))


def _progress(conversations: Conversations, total: int, num_present: int, is_shown: bool):
    from tqdm import tqdm

    bar = tqdm(total=total, initial=num_present, unit="row", disable=not is_shown, file=sys.stderr, smoothing=0)
    start = time.perf_counter()

    def on_row():
        speed = conversations.num_tokens / max(time.perf_counter() - start, 1e-9)
        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        bar.update()

    conversations.on_row = on_row
    return bar


__all__ = ["Summary", "regenerate"]
