"""Kernels for test_compile.py: one that is fine, one with a matrix product, one that spills, one
that does not compile."""

import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + ids, tl.load(x_ptr + ids) + 1)


@triton.jit
def _product_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + ids)
    tl.store(y_ptr + ids, tl.dot(x, x))


@triton.jit
def _spill_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + ids)
    b = tl.load(x_ptr + ids + BLOCK)
    c = tl.load(x_ptr + ids + 2 * BLOCK)
    total = tl.sum(a) + tl.sum(b) + tl.sum(c)
    tl.store(y_ptr + ids, total + a * b - c)


@triton.jit
def _wrong_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr + tl.arange(0, 3)))


def compile_cases():
    pair = {"x_ptr": "*bf16", "y_ptr": "*bf16"}
    return [
        ("copy", _copy_kernel, pair, {"BLOCK": 2048}, 4),
        ("copy-narrow", _copy_kernel, pair, {"BLOCK": 128}, 4),
        ("product", _product_kernel, {"x_ptr": "*bf16", "y_ptr": "*fp32"}, {"BLOCK": 64}, 4),
        ("spill", _spill_kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 4096}, 1),
        ("wrong", _wrong_kernel, pair, {"BLOCK": 4}, 4),
    ]
