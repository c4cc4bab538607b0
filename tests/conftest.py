import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Tests run side by side in processes of one thread each, from a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
