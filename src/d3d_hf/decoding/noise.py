"""The noise that the target's next draws will be made of, known before they are made.

`torch.multinomial(probs, 1)` is `(probs / noise).argmax()` with noise drawn by `exponential_` from the same generator.
So the draws of the rounds to come can be foreseen: noise is drawn ahead, and the generator put back to where plain
decoding has it. How many draws are then used decides where the generator is left.
"""

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The global generator that draws on a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class ForeseenNoise:
    """
    The noise of the global generator's next draws.

    Args:
        vocab_size (`int`): Of the laws that are drawn from, one row at a time.
        device (`torch.device`): Where they are drawn.

    Attributes:
        is_foreseeable (`bool`): Whether nobody else was seen to draw from the generator between the draws.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._generator = default_generator(device)
        self._shape, self._device = (1, vocab_size), device
        self.is_foreseeable = True
        self._begin_anew()

    def _begin_anew(self):
        self._rows, self._states = [], [self._generator.get_state()]

    def _is_current(self) -> bool:
        """Whether the generator stands where it is thought to stand."""
        return torch.equal(self._generator.get_state(), self._states[0])

    def row(self, index: int) -> torch.Tensor:
        """The noise of a draw to come, counted from 0: float32, of shape `(1, vocab_size)`. Each is drawn once."""
        if len(self._rows) <= index:
            here = self._generator.get_state()
            self._generator.set_state(self._states[-1])
            try:
                while len(self._rows) <= index:
                    empty = torch.empty(self._shape, dtype=torch.float32, device=self._device)
                    self._rows.append(empty.exponential_(generator=self._generator))
                    self._states.append(self._generator.get_state())
            finally:
                self._generator.set_state(here)
        return self._rows[index]

    def draw(self, probs: torch.Tensor) -> torch.LongTensor:
        """
        `torch.multinomial(probs, 1)`, of noise that may have been foreseen.

        Args:
            probs (`torch.Tensor` of shape `(1, vocab_size)`): A law.

        Returns:
            `torch.LongTensor` of shape `(1, 1)`.
        """
        if not self._is_current():  # a processor has drawn, say
            self.is_foreseeable = False
            self._begin_anew()
        if probs.shape != self._shape or probs.dtype != torch.float32:
            token = torch.multinomial(probs, num_samples=1)
            self._begin_anew()
            return token
        token = (probs / self.row(0)).argmax(dim=-1, keepdim=True)
        self.skip(1)
        return token

    def skip(self, num_draws: int):
        """Leaves the generator where so many draws leave it, and keeps the noise of those after them."""
        self.row(num_draws - 1)
        self._generator.set_state(self._states[num_draws])
        del self._rows[:num_draws], self._states[:num_draws]


__all__ = ["ForeseenNoise", "default_generator"]
