"""What a generation with a drafter did, round by round, summed up."""

from dataclasses import dataclass, field


@dataclass
class GenerationStats:
    """
    Statistics of one generation, kept up to date while it runs.

    Attributes:
        num_rounds (`int`): Verified rounds: one draft and one target forward each.
        num_tokens (`int`): Tokens emitted in them.
        num_drafted (`int`): Draft tokens handed to the target.
        num_accepted (`dict[int, int]`): Histogram: accepted draft tokens (bonus excluded) to number of rounds.
        draft_ms (`float`): Time in drafting calls, on the caller's thread.
        verify_ms (`float`): Time between a draft and its verdict: the target's forward and transformers' own loop.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: dict[int, int] = field(default_factory=dict)
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean accepted draft tokens per round, bonus excluded; 0.0 before the first round."""
        return max(self.tokens_per_round - 1, 0.0)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per round; papers print it as tau. 0.0 before the first round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def record_draft(self, num_drafted: int, draft_ms: float):
        self.num_drafted += num_drafted
        self.draft_ms += draft_ms

    def record_verdict(self, num_new_tokens: int, verify_ms: float):
        self.num_rounds += 1
        self.num_tokens += num_new_tokens
        self.verify_ms += verify_ms
        accepted = num_new_tokens - 1
        self.num_accepted[accepted] = self.num_accepted.get(accepted, 0) + 1


__all__ = ["GenerationStats"]
