// The one matrix product that every pass is made of: C = A B, C + A B or factor o C + A B, with the columns of B and C in
// the SIMD lanes.
//
// A is read one number at a time and broadcast, so it may lie in either order, at any stride, and is never packed. B and
// C are rows of whole vectors. A register tile is MR rows by NV vectors; MR is as tall as the registers allow.
#pragma once

#include "simd/vec.hpp"

namespace attngrad::ATTNGRAD_ISA {

// Rows of a register tile of NV vectors: accumulators, NV of B and one broadcast must fit.
template <int NV>
constexpr int register_tile_rows = registers == 32 ? (NV == 4   ? 6
                                                      : NV == 3 ? 8
                                                                : 12)
                                                   : (NV == 3   ? 4
                                                      : NV == 2 ? 6
                                                                : 12);

// Rows at a stride; where `fixed` is not 0, at that one, which the compiler then knows.
template <class T, long fixed = 0>
struct Matrix {
    T* data;
    static constexpr long stride = fixed;
    ATTNGRAD_INLINE T* row(long m) const { return data + m * stride; }
};
template <class T>
struct Matrix<T, 0> {
    T* data;
    long stride;
    ATTNGRAD_INLINE T* row(long m) const { return data + m * stride; }
};

// What the product is added to. Accumulators start from zero and C comes last, so that long sums are sums of sums.
struct ToZero {
    template <class T>
    static ATTNGRAD_INLINE Vec<T> finish(Vec<T> acc, const T*, const T*, long) {
        return acc;
    }
};
struct ToC {
    template <class T>
    static ATTNGRAD_INLINE Vec<T> finish(Vec<T> acc, const T* c, const T*, long) {
        return load<T>(c) + acc;
    }
};
// One factor per row, of a sum that is complete: of the product, or of C and the product.
struct ScaledToZero {
    template <class T>
    static ATTNGRAD_INLINE Vec<T> finish(Vec<T> acc, const T*, const T* factor, long row) {
        return acc * broadcast<T>(factor[row]);
    }
};
struct ScaledToC {
    template <class T>
    static ATTNGRAD_INLINE Vec<T> finish(Vec<T> acc, const T* c, const T* factor, long row) {
        return (load<T>(c) + acc) * broadcast<T>(factor[row]);
    }
};
struct ToScaledC {  // the rescaling of the online softmax: one factor per row
    template <class T>
    static ATTNGRAD_INLINE Vec<T> finish(Vec<T> acc, const T* c, const T* factor, long row) {
        return load<T>(c) * broadcast<T>(factor[row]) + acc;
    }
};

// The order of A: RowMajor walks k along a row (a[m * stride + k]), ColMajor along a column (a[k * stride + m]).
enum class Order { RowMajor, ColMajor };

template <class T, int MR, int NV, Order order, class To, class A, class B, class C>
ATTNGRAD_INLINE void register_tile(long first, long depth, A a, B b, C c, const T* factor) {
    constexpr int W = lanes<T>;
    const T* from = order == Order::RowMajor ? a.row(first) : a.data + first;
    Vec<T> acc[MR][NV] = {};
#pragma GCC unroll 2
    for (long k = 0; k < depth; ++k) {
        Vec<T> row[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) row[v] = load<T>(b.row(k) + v * W);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const T x = order == Order::RowMajor ? from[m * a.stride + k] : from[k * a.stride + m];
            const Vec<T> xs = broadcast<T>(x);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[m][v] += xs * row[v];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
            T* to = c.row(first) + m * c.stride + v * W;
            store<T>(to, To::template finish<T>(acc[m][v], to, factor, first + m));
        }
}

// The rows from `first` on that are left of a whole number of register tiles.
template <class T, int MR, int NV, Order order, class To, class A, class B, class C>
ATTNGRAD_INLINE void row_tail(long first, long rows, long depth, A a, B b, C c, const T* factor) {
    if constexpr (MR > 0) {
        if (first + MR <= rows) {
            register_tile<T, MR, NV, order, To>(first, depth, a, b, c, factor);
            first += MR;
        }
        row_tail<T, (MR == 6 ? 4 : MR / 2), NV, order, To>(first, rows, depth, a, b, c, factor);
    }
}

// C (rows x NV vectors), or what of it is kept, + A (rows x depth) B (depth x NV vectors).
template <class T, int NV, Order order, class To, class A, class B, class C>
__attribute__((noinline)) void product(long rows, long depth, A a, B b, C c, const T* factor = nullptr) {
    constexpr int MR = register_tile_rows<NV>;
    long m = 0;
    for (; m + MR <= rows; m += MR) register_tile<T, MR, NV, order, To>(m, depth, a, b, c, factor);
    row_tail<T, (MR == 12 ? 8 : MR == 6 ? 4 : MR / 2), NV, order, To>(m, rows, depth, a, b, c, factor);
}

// The same for a number of vectors known at run time, at most 4.
template <class T, Order order, class To, class A, class B, class C>
ATTNGRAD_INLINE void product(int vectors, long rows, long depth, A a, B b, C c, const T* factor = nullptr) {
    switch (vectors) {
        case 1: return product<T, 1, order, To>(rows, depth, a, b, c, factor);
        case 2: return product<T, 2, order, To>(rows, depth, a, b, c, factor);
        case 3: return product<T, 3, order, To>(rows, depth, a, b, c, factor);
        default:
            if constexpr (registers == 32) return product<T, 4, order, To>(rows, depth, a, b, c, factor);
    }
}

}  // namespace attngrad::ATTNGRAD_ISA
