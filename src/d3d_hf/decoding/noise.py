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
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._generator = default_generator(device)
        self._shape, self._device = (1, vocab_size), device
        self._forget()

    def _forget(self):
        self._rows, self._states = [], [self._generator.get_state()]

    def row(self, index: int) -> torch.Tensor:
        """The noise of a draw to come, counted from 0: float32, of shape `(1, vocab_size)`. Each is drawn once."""
        if not self.is_current():
            self._forget()
        if len(self._rows) <= index:
            self._generator.set_state(self._states[-1])
            try:
                while len(self._rows) <= index:
                    empty = torch.empty(self._shape, dtype=torch.float32, device=self._device)
                    self._rows.append(empty.exponential_(generator=self._generator))
                    self._states.append(self._generator.get_state())
            finally:
                self._generator.set_state(self._states[0])
        return self._rows[index]

    def is_current(self) -> bool:
        """Whether the generator stands where it is thought to stand: nobody else has drawn from it."""
        return torch.equal(self._generator.get_state(), self._states[0])

    def leave_generator(self, num_draws: int):
        """Leaves the generator where so many draws would have left it. The noise of the draws after them is kept."""
        self.row(num_draws - 1)
        self._generator.set_state(self._states[num_draws])
        self.forget_drawn(num_draws)

    def forget_drawn(self, num_draws: int):
        """So many draws were made by PyTorch itself."""
        del self._rows[:num_draws], self._states[:num_draws]
        if not self._states:
            self._forget()


__all__ = ["ForeseenNoise", "default_generator"]
