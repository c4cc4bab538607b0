"""
Mends two faults of Triton's interpreter, which runs kernels on the CPU where `TRITON_INTERPRET=1` is set before Triton
is imported: products of bfloat16 tiles multiply the bits as if they were integers (3.6 and 3.9), and loop bounds that
are tensors fail under NumPy 2.4 and later (3.6).
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


_create_dot = interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor


def _in_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def create_dot(self, a, b, *args):
    return _create_dot(self, _in_float32(a), _in_float32(b), *args)


def patch_tensor(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def mend():
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_tensor
