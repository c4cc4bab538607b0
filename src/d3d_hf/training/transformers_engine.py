"""Answers by transformers' batched `generate` on this machine."""

import copy
import itertools
from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .answer_decoding import Decoding, SamplePerRow
from .conversations import Conversations, Job
from .responses import LENGTH, STOP


_WINDOW_BATCHES = 16


class TransformersEngine:
    """
    Answers with transformers' batched `generate`, padded on the left.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer: Its tokenizer.
        decoding ([`Decoding`]): How to decode.
        batch_size (`int`, *optional*, defaults to 8): Answers at once. They are sorted by length, so that little is
            padded.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, tokenizer, decoding: Decoding, batch_size: int = 8):
        self.model, self.decoding, self.batch_size = model, decoding, batch_size
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = config.vocab_size
        self._max_length = getattr(config, "max_position_embeddings", None)
        eos = model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self._pad = next((token for token in (tokenizer.pad_token_id, *self._eos) if token is not None), 0)

    def describe(self) -> dict:
        return {
            "name": self.name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "repetition_penalty": self.model.generation_config.repetition_penalty or 1.0,
        }

    def answer_all(self, conversations: Conversations):
        while window := conversations.take(_WINDOW_BATCHES * self.batch_size):
            jobs = []
            for job in window:
                if self._room(job) > 0:
                    jobs.append(job)
                else:
                    conversations.skip(job, f"its {len(job.prompt_ids)} tokens fill the {self._max_length} positions")
            # The longest first: if memory does not suffice, that shows at once.
            jobs.sort(key=lambda job: (self._room(job), -len(job.prompt_ids)))
            for _, group in itertools.groupby(jobs, key=self._room):
                group = list(group)
                for start in range(0, len(group), self.batch_size):
                    self._answer(group[start : start + self.batch_size], conversations)

    def _room(self, job: Job) -> int:
        if self._max_length is None:
            return self.decoding.max_new_tokens
        return min(self.decoding.max_new_tokens, self._max_length - len(job.prompt_ids))

    @torch.inference_mode()
    def _answer(self, jobs: Sequence[Job], conversations: Conversations):
        width = max(len(job.prompt_ids) for job in jobs)
        ids = torch.full((len(jobs), width), self._pad)
        mask = torch.zeros_like(ids)
        for i, job in enumerate(jobs):
            ids[i, width - len(job.prompt_ids) :] = torch.tensor(job.prompt_ids)
            mask[i, width - len(job.prompt_ids) :] = 1
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length = self._room(jobs[0]), None
        config.eos_token_id, config.pad_token_id = self._eos or None, self._pad
        # Sampling is the processors' (below). These values count as not given.
        config.do_sample, config.temperature, config.top_k, config.top_p = False, 1.0, 50, 1.0
        output = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=config,
            logits_processor=self._processors(jobs),
        )
        for job, response in zip(jobs, output[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(response) if token in self._eos), None)
            if end is None:
                conversations.finish(job, response, LENGTH)
            else:
                conversations.finish(job, response[: end + 1], STOP)

    def _processors(self, jobs: Sequence[Job]) -> LogitsProcessorList:
        decoding, processors = self.decoding, LogitsProcessorList()
        if decoding.temperature > 0:
            processors.append(TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_k:
                processors.append(TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1:
                processors.append(TopPLogitsWarper(decoding.top_p))
            processors.append(SamplePerRow([decoding.seed_of(job.id) for job in jobs]))
        return processors


__all__ = ["TransformersEngine"]
