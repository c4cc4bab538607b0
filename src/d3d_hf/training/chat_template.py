"""A tokenizer's chat template: conversations to token ids and back, and the token that ends an answer."""

from collections.abc import Mapping, Sequence

from .prompts import Prompt


_TEMPLATE_KEYWORDS = ("conversation", "messages", "add_generation_prompt", "tokenize", "return_dict", "return_tensors")


class Template:
    """
    A tokenizer's chat template with its settings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        settings (`Mapping`, *optional*): Given to the template, e.g. `{"enable_thinking": False}`.
        system (`str`, *optional*): System message of conversations that have none.

    Raises:
        ValueError: There is no template, or it does not use one of the settings.
    """

    def __init__(self, tokenizer, settings: Mapping | None = None, system: str | None = None):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: give an instruction-tuned target, or "
                "a tokenizer with one."
            )
        self.tokenizer, self.settings, self.system = tokenizer, dict(settings or {}), system
        self.text = tokenizer.get_chat_template()
        for name in self.settings:
            if name in _TEMPLATE_KEYWORDS or name not in self.text:
                raise ValueError(
                    f"The chat template of {tokenizer.name_or_path!r} takes no setting {name!r}: leave it out, or "
                    "give the name that the template uses."
                )

    def open(self, prompt: Prompt) -> list[dict[str, str]]:
        """The messages before the first user turn."""
        system = self.system if prompt.system is None else prompt.system
        return [] if system is None else [{"role": "system", "content": system}]

    def encode(self, messages: Sequence[Mapping]) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self.settings
        )
        return list(encoded["input_ids"])

    def decode(self, response_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True)

    def end_of_turn(self) -> int | None:
        """The special token that ends an answer: what the template writes after one, else the tokenizer's EOS."""
        answer = "answer"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.settings)
        tail = self.tokenizer(text[text.rfind(answer) + len(answer) :], add_special_tokens=False)["input_ids"]
        special = set(self.tokenizer.all_special_ids)
        return next((token for token in tail if token in special), self.tokenizer.eos_token_id)


__all__ = ["Template"]
