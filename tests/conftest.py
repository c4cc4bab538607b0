import pytest
import torch

from d3d_hf import embedded


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests run side by side in processes of one thread each, from a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def embedded_target():
    """(model, tokenizer) of SmolLM2-135M-Instruct in bfloat16. Shared: whoever changes the model changes a copy."""
    try:
        return embedded.load_target()
    except ImportError as error:
        pytest.skip(str(error))
