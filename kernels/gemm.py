"""Blockwise-scaled FP8 GEMMs in Triton: the general kernels, for every target.

    C[m, n] = sum over kb of dot(A[m, kb], B[kb, n]) * a_s[m, kb] * b_s[kb, n]

where ``kb`` runs over 128-wide blocks of K, and ``b_s`` is constant over 128 columns
(``gemm_1x128_128x128``: fprop, dgrad) or its own for each column (``gemm_1x128_128x1``: wgrad).
The math is torchao's ``blockwise_fp8_training``.

Each 128-wide product is promoted into an fp32 accumulator before the next: Hopper's tensor cores keep
only about 14 bits of a partial fp8 sum, so a longer chain on them would lose what training needs.
The order of accumulation is fixed: the same input gives the same bits every time.
"""

import triton
import triton.language as tl

from fp8_aot.kernels.spec import Config, Dim, KernelSpec, Pointer, Size, Stride, Tensor, Tile, kernel

GROUP = tl.constexpr(128)  # columns of A that share a scale: one product, one promotion

OUT_DTYPES = ("bf16", "fp16", "fp32")
SOURCE = "torchao.prototype.blockwise_fp8_training.kernels (GEMM definition), BSD-3-Clause"


def gemm_args(b_s_dim: int):
    """Arguments of a GEMM; ``b_s_dim`` is the dimension of b_s with a free stride."""
    return (
        Pointer("a_ptr", "a"),
        Pointer("b_ptr", "b"),
        Pointer("a_s_ptr", "a_s"),
        Pointer("b_s_ptr", "b_s"),
        Pointer("c_ptr", "c"),
        Size("M", "M"),
        Size("N", "N", specialize=True),
        Size("K", "K", specialize=True),
        Stride("stride_a", "a", 0, specialize=True),
        Stride("stride_b", "b", 1, specialize=True),
        Stride("stride_a_s", "a_s", 1),
        Stride("stride_b_s", "b_s", b_s_dim),
        Stride("stride_c", "c", 0, specialize=True),
    )


ARGS_128X128 = gemm_args(1)
ARGS_128X1 = gemm_args(0)


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile of a program: GROUP_M tile rows are walked column by column, so that they share B in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    in_band = tl.minimum(GROUP_M, tiles_m) * tiles_n  # at most the number of tiles, so it fits in 32 bits
    first_m = (pid // in_band) * GROUP_M
    band_m = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (pid % in_band) % band_m, (pid % in_band) // band_m


@triton.jit
def group_product(a_ptrs, b_ptrs, m_mask, n_mask, k, k_left, BLOCK_K: tl.constexpr):
    """dot(A, B) over one scaling group, of which ``k_left`` or more columns are left to the right.

    A BLOCK_K below GROUP takes the group in steps that add up in the tensor core: it needs fewer registers
    for loads of single bytes.
    """
    if BLOCK_K == GROUP:
        k_mask = k < k_left
        a = tl.load(a_ptrs, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        product = tl.dot(a, b)
    else:
        product = tl.zeros((m_mask.shape[0], n_mask.shape[0]), tl.float32)
        for step in range(0, GROUP, BLOCK_K):
            k_mask = k < k_left - step
            a = tl.load(a_ptrs + step, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
            b = tl.load(b_ptrs + step, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
            product = tl.dot(a, b, product)
    return product


@triton.jit
def store_c(c_ptr, acc, m, n, M, N, stride_c):
    """Round the accumulator to C's dtype and store the part of the tile that exists."""
    tl.store(
        c_ptr + m.to(tl.int64)[:, None] * stride_c + n[None, :],
        acc.to(c_ptr.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


@kernel(*ARGS_128X128)
def gemm_1x128_128x128_kernel(
    a_ptr, b_ptr, a_s_ptr, b_s_ptr, c_ptr,
    M: tl.int32, N: tl.int32, K: tl.int32,
    stride_a: tl.int64, stride_b: tl.int64, stride_a_s: tl.int64, stride_b_s: tl.int64, stride_c: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """b_s[kb, nb] at kb + nb*stride_b_s, one for BLOCK_N <= 128 columns that divide 128."""
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < M
    n_mask = n < N
    block_n = pid_n * BLOCK_N // GROUP
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * stride_a + k[None, :]
    b_ptrs = b_ptr + n.to(tl.int64)[None, :] * stride_b + k[:, None]
    a_s_ptrs = a_s_ptr + m
    b_s_ptrs = b_s_ptr + block_n.to(tl.int64) * stride_b_s

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for kb in range(tl.cdiv(K, GROUP)):
        product = group_product(a_ptrs, b_ptrs, m_mask, n_mask, k, K - kb * GROUP, BLOCK_K)
        a_s = tl.load(a_s_ptrs, mask=m_mask, other=0.0)
        b_s = tl.load(b_s_ptrs, mask=pid_n * BLOCK_N < N, other=0.0)
        acc += product * (a_s * b_s)[:, None]
        a_ptrs += GROUP
        b_ptrs += GROUP
        a_s_ptrs += stride_a_s
        b_s_ptrs += 1
    store_c(c_ptr, acc, m, n, M, N, stride_c)


@kernel(*ARGS_128X1)
def gemm_1x128_128x1_kernel(
    a_ptr, b_ptr, a_s_ptr, b_s_ptr, c_ptr,
    M: tl.int32, N: tl.int32, K: tl.int32,
    stride_a: tl.int64, stride_b: tl.int64, stride_a_s: tl.int64, stride_b_s: tl.int64, stride_c: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """b_s[kb, n] at kb*stride_b_s + n, one for each column."""
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < M
    n_mask = n < N
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * stride_a + k[None, :]
    b_ptrs = b_ptr + n.to(tl.int64)[None, :] * stride_b + k[:, None]
    a_s_ptrs = a_s_ptr + m
    b_s_ptrs = b_s_ptr + n

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for kb in range(tl.cdiv(K, GROUP)):
        product = group_product(a_ptrs, b_ptrs, m_mask, n_mask, k, K - kb * GROUP, BLOCK_K)
        a_s = tl.load(a_s_ptrs, mask=m_mask, other=0.0)
        b_s = tl.load(b_s_ptrs, mask=n_mask, other=0.0)
        acc += product * a_s[:, None] * b_s[None, :]
        a_ptrs += GROUP
        b_ptrs += GROUP
        a_s_ptrs += stride_a_s
        b_s_ptrs += stride_b_s
    store_c(c_ptr, acc, m, n, M, N, stride_c)


def _gemm(name, fn, args, b_s, block_n_most, promise):
    """A GEMM's spec; ``b_s`` is (shape, unit_dim)."""
    b_s_shape, b_s_unit = b_s
    return KernelSpec(
        name=name,
        fn=fn,
        tensors=(
            Tensor("a", "fp8", (Dim("M"), Dim("K")), unit_dim=1),
            Tensor("b", "fp8", (Dim("K"), Dim("N")), unit_dim=0),
            Tensor("a_s", "fp32", (Dim("M"), Dim("K", 128)), unit_dim=0),
            Tensor("b_s", "fp32", b_s_shape, b_s_unit),
            Tensor("c", "out", (Dim("M"), Dim("N")), unit_dim=1, output=True),
        ),
        args=args,
        tiles=(
            Tile("BLOCK_M", 16, 256),
            Tile("BLOCK_N", 16, block_n_most),
            Tile("BLOCK_K", 32, 128),
            Tile("GROUP_M", 1, 64),
        ),
        dtypes={"out": OUT_DTYPES},
        grid=((("M", "BLOCK_M"), ("N", "BLOCK_N")),),
        default=Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8}, num_warps=4, num_stages=3),
        promise=promise,
        source=SOURCE,
        staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_N", "BLOCK_K")),
    )


gemm_1x128_128x128 = _gemm(
    "gemm_1x128_128x128",
    gemm_1x128_128x128_kernel,
    ARGS_128X128,
    b_s=((Dim("K", 128), Dim("N", 128)), 0),
    block_n_most=128,
    promise="1x128 scales of a, 128x128 scales of b; fp32 accumulation, fixed order",
)

gemm_1x128_128x1 = _gemm(
    "gemm_1x128_128x1",
    gemm_1x128_128x1_kernel,
    ARGS_128X1,
    b_s=((Dim("K", 128), Dim("N")), 1),
    block_n_most=256,
    promise="1x128 scales of a, 128x1 scales of b; fp32 accumulation, fixed order",
)
