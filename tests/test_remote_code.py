"""A saved drafter brings its code: it loads and drafts where the package is not installed."""

import subprocess
import sys
import textwrap

import torch

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.testing import tiny_model


def test_trust_remote_code_without_the_package(tmp_path):
    target = tiny_model("llama", seed=11)
    target.save_pretrained(tmp_path / "target")
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    drafter.save_pretrained(tmp_path / "drafter")
    code = """
        import sys
        sys.modules["d3d_hf"] = None  # as if it were not installed
        import torch
        from transformers import AutoModelForCausalLM
        target = AutoModelForCausalLM.from_pretrained("target")
        drafter = AutoModelForCausalLM.from_pretrained("drafter", trust_remote_code=True)
        prompt = torch.randint(2, 67, (1, 9))
        kwargs = dict(max_new_tokens=20, do_sample=False)
        reference = target.generate(prompt, **kwargs)
        for mode in ("sync", "async"):
            drafter.generation_config.drafting_mode = mode
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **kwargs), reference)
            stats = drafter.last_generation_stats
            assert stats.door == "candidate generator" and stats.num_rounds <= 15, stats
    """
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("it needs the d3d_hf package") == 1
