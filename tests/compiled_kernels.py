"""
Compiles the Triton kernels for GPUs that need not be there, and prints what each kernel takes, as JSON:

    python tests/compiled_kernels.py sm_90 gfx942
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from d3d_hf.kernels.attention_triton import attend_part, merge_parts, tile_of
from d3d_hf.kernels.token_choice_triton import choose_part, merge_choices


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Head size, dtype, rows (tokens x query heads per head of keys): a synchronous draft or a packed pass.
EVERYWHERE = [(128, torch.bfloat16, 324), (256, torch.bfloat16, 324)]
MORE = {
    "sm_80": [(64, torch.bfloat16, 48)],
    "sm_90": [
        (64, torch.bfloat16, 48),
        (64, torch.float16, 324),
        (80, torch.bfloat16, 324),
        (128, torch.bfloat16, 16),
        (128, torch.bfloat16, 64),
        (128, torch.float32, 64),
    ],
}


def target_of(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


def compile_kernel(kernel, target: GPUTarget, pointers: dict, floats: tuple, constants: dict, options: dict):
    """A kernel whose pointers and strides are multiples of 16, as those of PyTorch's tensors of whole tiles are."""
    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | {name: f"*{kind}" for name, kind in pointers.items()}
    kinds |= dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name in pointers or name.endswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=target, options=options)


def compile_attention(
    target: GPUTarget, head_dim: int, dtype: torch.dtype, num_rows: int, is_whole: bool = False, has_tree: bool = False
):
    constants = tile_of(head_dim, dtype, num_rows, target.backend == "hip")
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants |= {"KV_HEADS": 8, "SHARED": 4, "HEAD_DIM": head_dim, "IS_WHOLE": is_whole}
    constants["HAS_TREE"] = has_tree
    constants["BLOCK_D"] = triton.next_power_of_2(head_dim)
    constants["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
    pointers = dict.fromkeys(("query", "key", "value"), _NAMES[dtype])
    pointers |= {"visibility": "i32", "outputs": _NAMES[dtype] if is_whole else "fp32", "log_totals": "fp32"}
    return compile_kernel(attend_part, target, pointers, ("scale",), constants, options)


def usage_of(kernel) -> dict:
    """Registers of a thread, what it spills (bytes of stack on NVIDIA, registers on AMD), shared memory in bytes."""
    usage = {"shared_bytes": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        counts = {name: int(count) for name, count in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text)}
        matrix = "v_mfma" if "v_mfma" in text else None
        return usage | {"registers": counts["vgpr_count"], "spills": counts["vgpr_spill_count"], "matrix": matrix}
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    matrix = next((name for name in ("wgmma.mma_async", "mma.sync") if name in kernel.asm["ptx"]), None)
    return usage | {"registers": counts["REG"], "spills": counts["STACK"] + counts["LOCAL"], "matrix": matrix}


def compile_all(name: str) -> dict[str, dict]:
    """What each kernel takes on a target; attention goes by head size, dtype and rows."""
    target = target_of(name)
    kernels = {
        f"attention {head_dim} {_NAMES[dtype]} {rows}": compile_attention(target, head_dim, dtype, rows)
        for head_dim, dtype, rows in EVERYWHERE + MORE.get(name, [])
    }
    for head_dim in (128, 256):
        kernels[f"attention tree {head_dim}"] = compile_attention(target, head_dim, torch.bfloat16, 324, has_tree=True)
    if name == "sm_90":
        kernels["attention whole"] = compile_attention(target, 128, torch.bfloat16, 324, is_whole=True)
    parts = {"parts": "fp32", "log_totals": "fp32", "outputs": "bf16"}
    constants = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 8}
    kernels["merge"] = compile_kernel(merge_parts, target, parts, (), constants, {})
    found = {"tokens": "i32", "peaks": "fp32", "totals": "fp32"}
    pointers = {"logits": "bf16", "never_drafted": "i32", **found}
    kernels["choice"] = compile_kernel(choose_part, target, pointers, (), {"BLOCK": 2048, "NUM_BLOCKS": 2}, {})
    pointers = {**found, "chosen": "i64", "chosen_logits": "fp32", "log_normalizers": "fp32"}
    kernels["merge of choices"] = compile_kernel(merge_choices, target, pointers, (), {"BLOCK": 64}, {})
    return {name: usage_of(kernel) for name, kernel in kernels.items()}


if __name__ == "__main__":
    print(json.dumps({name: compile_all(name) for name in sys.argv[1:]}, indent=1))
