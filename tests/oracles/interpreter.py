"""Triton's interpreter, made to compute what a GPU computes where it would otherwise be wrong or too kind.

* Constants of bfloat16 exist, and its products are products of numbers; unpatched they are products of bit patterns.
* Products add up K in ascending order, one matrix instruction's depth after the other, whatever the tile's shape: that
  is what was measured on an H200. Unpatched, bits depend on what the BLAS library does with that shape.
* Sums, functions and fused multiply-adds of float32 are rounded once; unpatched, the bits of the first two depend on
  numpy's vector loops, and the third is rounded twice.
* The byte of e4m3 that is no number becomes NaN; unpatched it is 480. Rounding to e4m3 goes to the nearest.
* Rounding to bfloat16 goes to the nearest, and keeps NaN; unpatched it cuts off.
* What a masked load leaves undefined is NaN or a large number; unpatched it is zero.
* Scalars can be bounds of a loop with numpy 2.4 as well, which no longer turns arrays of one number into a number.
* The language is patched once per launch; unpatched, for every call of a function of the kernel, which takes longer
  than the function.
* Arguments are not copied onto themselves afterwards, which would touch all of a cache that is only reserved.
* Numbers overflow, and become infinite or NaN, without a word; unpatched, numpy warns of it.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, TensorHandle

from oracles.fp8 import NOT_A_NUMBER, POSITIVE, decode

HALF, FLOAT = tl.bfloat16, tl.float32
E4M3 = np.array([decode(code) for code in range(256)], dtype=np.float16)
E4M3_MIDDLES = (np.array(POSITIVE[1:]) + POSITIVE[:-1]) / 2  # between a byte and the next, exact in float32
UNDEFINED = 0x5BAD
DEPTH = 16  # of a matrix instruction of bfloat16


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16, held as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, held as uint16; of two equally near ones the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def narrowed_to_e4m3(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest byte; of two equally near ones the even one, beyond the largest one the largest."""
    size = np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(E4M3_MIDDLES, size, side=side) for side in ("left", "right"))
    code = np.where((below != above) & (below % 2 == 1), above, below)  # they differ where a value is a middle
    code = np.where(np.isnan(values), NOT_A_NUMBER, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def harden() -> None:
    """Patch the interpreter; once is enough."""
    if getattr(InterpreterBuilder, "hardened", False):
        return
    convert, restore = interpreter._convert_float, GridExecutor._restore_args_dev
    dot, load = InterpreterBuilder.create_dot, InterpreterBuilder.create_masked_load
    unary = InterpreterBuilder.unary_op
    patch_tensor, run = interpreter._patch_lang_tensor, GridExecutor.__call__
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (HALF, FLOAT):
            return widened(data).view(np.uint32).reshape(data.shape)
        if (source, target) == (FLOAT, HALF):
            return narrowed(data)
        if (source, target) == (tl.float8e4nv, tl.float16):
            return E4M3[data].view(np.uint16)
        if (source, target) == (FLOAT, tl.float8e4nv):
            return narrowed_to_e4m3(data)
        return convert(data, source, target, rounding)

    def numbers(x: Any) -> np.ndarray:
        kind = x.dtype.scalar
        return widened(x.data) if kind == HALF else E4M3[x.data] if kind == tl.float8e4nv else x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, precision, imprecise)
        left, right = (numbers(x) for x in (a, b))
        total, depth = d.data, left.shape[-1]
        for k in range(0, depth, DEPTH):
            part = np.matmul(left[..., k : k + DEPTH], right[..., k : k + DEPTH, :], dtype=np.float64)
            total = (total + part).astype(np.float32)
        return TensorHandle(total, d.dtype.scalar)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        # Of a single number's load, other=0 does not arrive here: Triton's front end asks for its truth value.
        if other is None and ptrs.data.size > 1:
            kind = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            value = 0x7FC0 if kind == HALF else np.nan if np.issubdtype(dtype, np.floating) else UNDEFINED % 127
            value = UNDEFINED if np.issubdtype(dtype, np.integer) and dtype.itemsize > 2 else value
            other = TensorHandle(np.full(ptrs.data.shape, value, dtype=dtype), kind)
        return load(self, ptrs, mask, other, *rest, **named)

    def restore_args_dev(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        on_device = [x for x in (*args_dev, *kwargs.values()) if getattr(x, "is_cuda", False)]
        if on_device:
            restore(self, args_dev, args_hst, kwargs, kwargs_hst)

    def run_quietly(self: Any, *args: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            return run(self, *args, **named)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.data.dtype != np.float32:
            return unary(self, arg, op)
        return TensorHandle(op(arg.data.astype(np.float64)).astype(np.float32), arg.dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(narrowed(np.array([value], dtype=np.float32)), HALF)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    def add_up(self: Any, values: Any) -> Any:
        data = values.handle.data
        wide = np.float64 if data.dtype == np.float32 else data.dtype
        return self.to_tensor(np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=wide), values.dtype)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [item for item in inspect.getmembers(package) if tl.core.is_builtin(item[1])]
        for name, member in builtins[package]:
            if getattr(package, name) is member:  # else an outer call has patched it
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._convert_float = convert_float
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang_tensor = patch_lang_tensor
    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.get_bf16 = get_bf16
    InterpreterBuilder.create_fma = create_fma
    ReduceOps.sum = add_up
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_masked_load = create_masked_load
    GridExecutor._restore_args_dev = restore_args_dev
    GridExecutor.__call__ = run_quietly
    InterpreterBuilder.hardened = True
