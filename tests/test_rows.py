"""A row does not see its company: row i of a call of n rows has the bits of a call of one row, for every kernel and tensor type,
n = 1 to 17, 32, 64 and 257, 1, 2, 3 and 5 threads, and sizes that no vector, block or tile divides."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from test_kernels import FLOATS, TYPES, Kernels, kern, plain, random_weights, same, type_id, type_shape

__all__ = ["kern", "plain"]  # fixtures
ROWS = [*range(1, 18), 32, 64, 257]
THREADS = [1, 2, 3, 5]


def products(k: Kernels, threads: int, t: int, w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float32 (rows of x, rows of w): as a pass computes it, two matrices in one job for the pool."""
    out = np.full((len(x), len(w)), np.nan, np.float32)
    k("products", threads, t, ctypes.c_int64(x.shape[1]), w, ctypes.c_size_t(w.strides[0]), len(w), x, len(x), out)
    return out


@pytest.mark.parametrize("t", TYPES, ids=type_id)
def test_products(kern: Kernels, plain: Kernels, t: int) -> None:
    rng = np.random.default_rng(t + 700)
    n = 613 if t in FLOATS else 640 + 32 if type_shape(kern.lib, t)[0] == 32 else 768
    w, x = random_weights(kern.lib, rng, t, 107, n), rng.standard_normal((max(ROWS), n)).astype(np.float32)
    alone = np.concatenate([plain.mat(t, w, x[i : i + 1]) for i in range(len(x))])
    for threads in THREADS:
        for rows in ROWS:
            first = (rows * 7) % (len(x) - rows + 1)
            assert same(products(kern, threads, t, w, x[first : first + rows]), alone[first : first + rows]), (threads, rows)


def test_quantised_rows(kern: Kernels, plain: Kernels) -> None:
    """Activations are rounded a row at a time: neighbours of other magnitudes change nothing."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((257, 768)) * np.exp(rng.uniform(-9, 9, (257, 1)))).astype(np.float32)
    for kind in (1, 2):
        for a, b in zip(kern.quantise(kind, x), plain.quantise(kind, x), strict=True):
            assert same(a, b)
        for i in (0, 100, 256):
            for a, b in zip(kern.quantise(kind, x[i : i + 1]), plain.quantise(kind, x), strict=True):
                assert same(a[0], b[i])


@pytest.mark.parametrize("n", [1, 17, 61, 128])
def test_heads_and_rows_of_attention(kern: Kernels, plain: Kernels, n: int) -> None:
    """Weighted sums of kv rows: a head alone, any number of heads, and the rows in two calls give the same bits."""
    rng = np.random.default_rng(n)
    i64 = ctypes.c_int64
    heads, kv = 257, 37
    a = rng.standard_normal((heads, kv)).astype(np.float32)
    x = rng.standard_normal((kv, n + 3)).astype(np.float32)
    start = rng.standard_normal((heads, n)).astype(np.float32)
    alone = start.copy()
    for h in range(heads):
        for i in range(kv):
            plain("axpy", i64(n), ctypes.c_float(a[h, i]), x[i], alone[h])
    for rows in ROWS:
        y = start[:rows].copy()
        kern("mix", i64(n), a, i64(kv), rows, x, i64(n + 3), kv, y)
        assert same(y, alone[:rows]), rows
        y = start[:rows].copy()
        cut = rows % kv
        kern("mix", i64(n), a, i64(kv), rows, x, i64(n + 3), cut, y)
        kern("mix", i64(n), a[:, cut:].copy(), i64(kv - cut), rows, x[cut:].copy(), i64(n + 3), kv - cut, y)
        assert same(y, alone[:rows]), rows


def test_windows_of_the_indexer(kern: Kernels, plain: Kernels) -> None:
    """The score of a compressed row is a sum over heads in turn, whatever stands beside it."""
    rng = np.random.default_rng(9)
    i64, heads = ctypes.c_int64, 13
    w, x = rng.standard_normal(heads).astype(np.float32), rng.standard_normal((heads, 257)).astype(np.float32)
    alone = np.zeros(257, np.float32)
    for i in range(257):
        plain("relu_sum", i64(1), heads, w, np.ascontiguousarray(x[:, i]), alone[i : i + 1])
    for n in ROWS:
        y = np.zeros(n, np.float32)
        kern("relu_sum", i64(n), heads, w, np.ascontiguousarray(x[:, :n]), y)
        assert same(y, alone[:n])
