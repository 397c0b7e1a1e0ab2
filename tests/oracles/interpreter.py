"""Triton's interpreter, made to compute what a GPU computes where it would otherwise be wrong or too kind.

* Products of bfloat16 are products of numbers; unpatched they are products of bit patterns.
* Rounding to bfloat16 goes to the nearest, and keeps NaN; unpatched it cuts off.
* What a masked load leaves undefined is NaN or a large number; unpatched it is zero.
* Scalars can be bounds of a loop with numpy 2.4 as well, which no longer turns arrays of one number into a number.
* Arguments are not copied onto themselves afterwards, which would touch all of a cache that is only reserved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

HALF, FLOAT = tl.bfloat16, tl.float32
UNDEFINED = 0x5BAD


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16, held as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, held as uint16; of two equally near ones the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def harden() -> None:
    """Patch the interpreter; once is enough."""
    if getattr(InterpreterBuilder, "hardened", False):
        return
    convert, restore = interpreter._convert_float, GridExecutor._restore_args_dev
    dot, load = InterpreterBuilder.create_dot, InterpreterBuilder.create_masked_load
    patch_tensor = interpreter._patch_lang_tensor

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (HALF, FLOAT):
            return widened(data).view(np.uint32).reshape(data.shape)
        if (source, target) == (FLOAT, HALF):
            return narrowed(data)
        return convert(data, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        a, b = (TensorHandle(widened(x.data), FLOAT) if x.dtype.scalar == HALF else x for x in (a, b))
        return dot(self, a, b, d, precision, imprecise)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        # Of a single number's load, other=0 does not arrive here: Triton's front end asks for its truth value.
        if other is None and ptrs.data.size > 1:
            kind = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            value = 0x7FC0 if kind == HALF else np.nan if np.issubdtype(dtype, np.floating) else UNDEFINED % 127
            value = UNDEFINED if np.issubdtype(dtype, np.integer) and dtype.itemsize > 2 else value
            other = TensorHandle(np.full(ptrs.data.shape, value, dtype=dtype), kind)
        return load(self, ptrs, mask, other, *rest)

    def restore_args_dev(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        on_device = [x for x in (*args_dev, *kwargs.values()) if getattr(x, "is_cuda", False)]
        if on_device:
            restore(self, args_dev, args_hst, kwargs, kwargs_hst)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_lang_tensor
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_masked_load = create_masked_load
    GridExecutor._restore_args_dev = restore_args_dev
    InterpreterBuilder.hardened = True
