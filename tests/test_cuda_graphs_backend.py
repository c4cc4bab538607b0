"""The calls of CUDA itself: their order, seen through a stand-in for `torch.cuda`, and on a GPU the real ones."""

import contextlib

import pytest
import torch

from d3d_hf import D3DDrafterForCausalLM, compile_target, uncompile_target
from d3d_hf.compiled.drafter import compiled_drafter
from d3d_hf.compiled.graph_backend import CudaGraphs
from d3d_hf.testing import ForwardCounter, tiny_model
from lossless import generate, prompt_of


class _Log(list):
    """A list that carries an attribute."""


class _Stream:
    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch):
    """What `torch.cuda` was called for, as a list of sentences."""
    log = _Log()
    current = [_Stream("caller", log)]

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        try:
            yield
        finally:
            current.pop()

    class Capture:
        """As torch's own: when the capture breaks, the stream that it has made current stays so."""

        def __init__(self, graph, pool, stream, capture_error_mode):
            assert stream is current[-1] and pool == "pool"
            log.append(f"captures on {stream.name}, {capture_error_mode}")

        def __enter__(self):
            pass

        def __exit__(self, kind, *args):
            log.append("capture ends")
            if kind is not None:
                raise RuntimeError("the capture was broken off")

    class Graph:
        def replay(self):
            log.append(f"replays on {current[-1].name}")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    for name, value in {
        "current_stream": lambda device=None: current[-1],
        "stream": stream,
        "graph": Capture,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: _Stream("side", log),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    log.current = lambda: current[-1].name
    return log


def test_order_of_calls(cuda):
    graphs = CudaGraphs("cuda:0")

    def function():
        cuda.append(f"runs on {cuda.current()}")
        return torch.ones(1)

    replay = graphs.capture(function, [], graphs.new_workspace())
    assert cuda == [
        "side waits for caller",
        "runs on side",
        "runs on side",
        "captures on side, thread_local",
        "runs on side",
        "capture ends",
        "caller waits for side",
    ]
    cuda.clear()
    assert replay() is replay() and cuda == ["replays on caller"] * 2


def test_what_is_sent_is_pinned_unless_it_is_there_already(cuda, monkeypatch):
    """A layout that was made on the device is not brought to the host and back."""
    calls, graphs = [], CudaGraphs("cuda:0")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    buffer = torch.zeros(3)
    graphs.send(torch.ones(3), buffer)
    assert calls == ["pinned"] and buffer.sum() == 3

    class OnGpu(torch.Tensor):
        is_cuda = True

    graphs.send(torch.full((3,), 2.0).as_subclass(OnGpu), buffer)
    assert calls == ["pinned"] and buffer.sum() == 6


def test_a_capture_that_breaks_gives_the_stream_back(cuda):
    graphs = CudaGraphs("cuda:0")

    def function():
        if cuda[-1].startswith("captures"):
            raise ValueError("not permitted")

    with pytest.raises(RuntimeError, match="broken off") as raised:
        graphs.capture(function, [], graphs.new_workspace())
    assert "not permitted" in str(raised.value.__context__)
    assert cuda.current() == "caller"
    graphs.capture(lambda: torch.ones(1), [], graphs.new_workspace())  # and the lock


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", ["sdpa", "d3d_packed"])
def test_on_a_gpu(implementation):
    """Graphed drafts and verifications emit what eager ones do, in every mode."""
    target = tiny_model("llama", seed=5, initializer_range=0.2, num_layers=2, hidden_size=256).cuda()
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4, chained_head_size=8)
    drafter.set_attn_implementation({"backbone_config": implementation})
    prompt, options = prompt_of(300).cuda(), drafter.generation_config
    reference = generate(target, prompt, max_new_tokens=250).tolist()
    options.on_draft_error = "raise"
    for is_fast_target in (False, True):
        if is_fast_target:
            compile_target(target, draft_lengths=(4,))
        for mode in ("sync", "async", "auto"):
            options.drafting_mode, accepted = mode, []
            for compile_drafter in (False, True):
                options.compile_drafter = compile_drafter
                assert generate(target, prompt, drafter, max_new_tokens=250).tolist() == reference
                accepted.append(drafter.last_generation_stats.num_accepted)
            assert mode == "auto" or accepted[0] == accepted[1]
    passes = compiled_drafter(drafter)
    assert passes.reason is None and passes.num_static_passes > 50
    assert target.__dict__["_compiled_target"].num_static_passes > 50
    uncompile_target(target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "d3d_packed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_trees_on_a_gpu(architecture, implementation):
    """The first replay is compared with dense masks; every pass but the prefill is a replay, whatever its tree."""
    target = tiny_model(architecture, seed=5, initializer_range=0.2, head_dim=64).cuda()
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama", seed=9), block_size=4).cuda()
    prompt, options = prompt_of(40).cuda(), drafter.generation_config
    reference = generate(target, prompt, max_new_tokens=100).tolist()
    options.drafting_mode, options.on_draft_error = "sync", "raise"
    target.set_attn_implementation(implementation)
    compile_target(target, draft_lengths=(8, 40))
    state = target.__dict__["_compiled_target"]
    for size in (1, 8, 33):
        options.draft_tree_size, before = size, state.num_static_passes
        with ForwardCounter(target) as forwards:
            assert generate(target, prompt, drafter, max_new_tokens=100).tolist() == reference
        assert state.reason is None and state.num_static_passes - before == forwards.count - 1
