"""The folder that a run keeps its results in as they come, so that the same run can go on after it was ended."""

import json
import os
import shutil
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file, save_file


_SETTINGS = "settings.json"


class ResumableRun:
    """
    Results by name. A run that asks for them in the same order again gets what is there and computes the rest.

    Args:
        folder (`str`): Made if it is not there.
        settings (`Mapping`): What the results hang on; JSON can hold it.

    Raises:
        ValueError: The folder was begun with other settings.
    """

    def __init__(self, folder: str, settings: Mapping):
        self.folder = folder
        settings = json.loads(json.dumps(settings))
        stored = self._read(_SETTINGS)
        if stored is None:
            os.makedirs(folder, exist_ok=True)
            self._write(_SETTINGS, settings)
        elif stored != settings:
            names = sorted(name for name in {**stored, **settings} if stored.get(name) != settings.get(name))
            differences = (f"{name} ({stored.get(name)!r} there, {settings.get(name)!r} here)" for name in names)
            raise ValueError(
                f"{folder!r} holds a run that was begun with other settings: {'; '.join(differences)}. Give the same "
                f"ones to go on with it, or another output folder."
            )

    def has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.folder, f"{name}.json"))

    def recall(self, name: str, compute: Callable[[], object]):
        """The result of that name, computed and stored if it is not there; as JSON gives it back."""
        if not self.has(name):
            self._write(f"{name}.json", compute())
        return self._read(f"{name}.json")

    def recall_weights(self, name: str, model: torch.nn.Module, train: Callable[[], None]):
        """Puts the trained parameters of that name into a model; trains it and stores them if they are not there."""
        path = os.path.join(self.folder, f"{name}.safetensors")
        if os.path.exists(path):
            stored = load_file(path)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name in stored:
                        parameter.copy_(stored[parameter_name])
            return
        train()
        trained = {
            name: parameter.detach().cpu().contiguous()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        save_file(trained, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def close(self):
        """Removes the folder, all at once for whoever looks."""
        done = f"{self.folder}.done"
        os.replace(self.folder, done)
        shutil.rmtree(done, ignore_errors=True)

    def _read(self, name: str):
        try:
            with open(os.path.join(self.folder, name), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def _write(self, name: str, content):
        write_json(os.path.join(self.folder, name), content)


def write_json(path: str, content, indent: int | None = None):
    """Readers see the old file or the whole new one."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.write("\n")
    os.replace(f"{path}.tmp", path)


__all__ = ["ResumableRun", "write_json"]
