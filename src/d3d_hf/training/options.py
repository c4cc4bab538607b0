"""What is particular to the training of drafters, without what transformers' own arguments take to import."""

from dataclasses import dataclass, field


@dataclass
class DrafterTrainingOptions:
    r"""
    The part of [`D3DTrainingArguments`] that transformers' trainer does not know.

    Args:
        blocks_per_sequence (`int`, *optional*, defaults to 16):
            Branches that hang on sampled positions of each sequence in a packed pass.
        block_loss_decay (`float`, *optional*, defaults to 0.8):
            Weight of each mask slot's loss relative to the slot before it: a slot counts only if all before it are
            accepted. 1.0 weighs all alike.
        ar_loss_weight (`float`, *optional*, defaults to 0.5):
            Weight of the auxiliary next-token loss on the response's own tokens; 0 turns it off.
        visible_token_share (`float`, *optional*, defaults to 0.5):
            Share of branches whose first slot shows the true token: these learn what synchronous drafts and guess
            branches need, the others what masked branches need.
        denoising_mask_ratio (`float`, *optional*, defaults to 1.0):
            Least share of a branch's slots that stays masked. 1.0 masks all of them (but the visible token above);
            below, each branch shows a random number of its first slots, for several denoising steps at inference.
        chain_dropout (`float`, *optional*, defaults to 0.25):
            Share of branches whose chained head stays out of it, if the drafter has one: so that the slots' own laws,
            which the head chooses among, stay good.
        distillation_weight (`float`, *optional*, defaults to 0.0):
            Share of the loss on a teacher's logits, which needs `D3DTrainer(teacher_model=)`; the rest is on tokens.
        distillation_temperature (`float`, *optional*, defaults to 1.0):
            Softens teacher and drafter in that share.
        eval_blocks_per_sequence (`int`, *optional*, defaults to 16):
            Positions of each sequence that an evaluation drafts from, evenly spread.
    """

    blocks_per_sequence: int = field(default=16, metadata={"help": "Branches per sequence in a packed pass."})
    block_loss_decay: float = field(
        default=0.8, metadata={"help": "Weight of a mask slot relative to the one before."}
    )
    ar_loss_weight: float = field(default=0.5, metadata={"help": "Weight of the next-token loss; 0 turns it off."})
    visible_token_share: float = field(
        default=0.5, metadata={"help": "Share of branches that show their first token."}
    )
    denoising_mask_ratio: float = field(default=1.0, metadata={"help": "Least share of a branch's slots left masked."})
    chain_dropout: float = field(default=0.25, metadata={"help": "Share of branches without the chained head."})
    distillation_weight: float = field(default=0.0, metadata={"help": "Share of the loss on a teacher's logits."})
    distillation_temperature: float = field(default=1.0, metadata={"help": "Softens teacher and drafter."})
    eval_blocks_per_sequence: int = field(default=16, metadata={"help": "Positions an evaluation drafts from."})

    def check(self):
        """
        Raises:
            ValueError: A value is out of range.
        """
        for name in ("blocks_per_sequence", "eval_blocks_per_sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")
        for name in ("visible_token_share", "chain_dropout", "distillation_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share from 0 to 1.")
        for name in ("block_loss_decay", "denoising_mask_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a value above 0 and at most 1.")
        if self.ar_loss_weight < 0:
            raise ValueError(f"ar_loss_weight is {self.ar_loss_weight}: give 0 to turn it off, or a positive weight.")
        if self.distillation_temperature <= 0:
            raise ValueError(f"distillation_temperature is {self.distillation_temperature}: give a positive value.")


__all__ = ["DrafterTrainingOptions"]
