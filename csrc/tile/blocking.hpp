// Blocks of queries and key tiles: their sizes, their scratch memory, and how rows get into and out of the lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "runtime/buffers.hpp"
#include "runtime/problem.hpp"
#include "simd/storage.hpp"

#ifndef ATTNGRAD_KEYS
#define ATTNGRAD_KEYS 96  // of a key tile, in float32
#endif

namespace attngrad::ATTNGRAD_ISA {

// Queries stand in the SIMD lanes. A panel is as many queries as one register tile is wide, a block several panels.
template <class T>
constexpr int panel = 3 * lanes<T>;
template <class T>
constexpr int block = sizeof(T) == 4 ? 96 : 48;
template <class T>
constexpr int keys = sizeof(T) == 4 ? ATTNGRAD_KEYS : 64;
template <class T>
constexpr int strip = (registers == 32 ? 4 : 3) * lanes<T>;  // columns of a register tile over features

template <class T>
constexpr long padded(long n) {
    return (n + lanes<T> - 1) / lanes<T> * lanes<T>;
}

// One aligned allocation, for the arenas of all threads.
class Scratch {
public:
    explicit Scratch(std::size_t bytes) : buffer_(take_scratch(round(bytes))) {}
    ~Scratch() { give_scratch(buffer_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class X>
    static std::size_t bytes(std::size_t n) {
        return round(n * sizeof(X));
    }
    char* data() const { return static_cast<char*>(buffer_.data); }

private:
    static std::size_t round(std::size_t n) { return (n + 63) / 64 * 64; }
    Buffer buffer_;
};

// Bump allocator: the arrays of one thread, one after the other in a block of scratch memory.
class Arena {
public:
    explicit Arena(char* memory) : memory_(reinterpret_cast<std::uintptr_t>(memory)) {}  // null: only to count
    template <class X>
    X* take(std::size_t n) {
        X* p = reinterpret_cast<X*>(memory_ + used_);
        used_ += Scratch::bytes<X>(n);
        return p;
    }
    template <class X>
    X* fill(std::size_t n, X x) {
        X* p = take<X>(n);
        if (memory_) std::fill_n(p, n, x);
        return p;
    }
    std::size_t used() const { return used_; }

private:
    std::uintptr_t memory_;
    std::size_t used_ = 0;
};

// The rows (query head, query) that share one key head are numbered r = g * T + i. A block is a run of them: of one head
// where the heads are long, across heads where they are short, so that decoding fills the lanes.
struct RowBlocks {
    std::int64_t T, rows, per_head, count, size;
    RowBlocks(const Problem& p, int block_size) : T(p.T), rows(p.group() * p.T), size(block_size) {
        per_head = T >= size ? (T + size - 1) / size : 0;
        count = per_head ? p.group() * per_head : (rows + size - 1) / size;
    }
    std::int64_t first(std::int64_t n) const { return per_head ? n / per_head * T + n % per_head * size : n * size; }
    int length(std::int64_t n) const {
        const std::int64_t end = per_head ? n / per_head * T + T : rows;
        return static_cast<int>(std::min<std::int64_t>(size, end - first(n)));
    }
};

// --- transposition --------------------------------------------------------------------------------------------------

template <class T, int step, int... j>
ATTNGRAD_INLINE void exchange(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, j...>) {
    constexpr int W = lanes<T>;
    const Vec<T> x = __builtin_shufflevector(a, b, ((j & step) ? W + j - step : j)...);
    const Vec<T> y = __builtin_shufflevector(a, b, ((j & step) ? W + j : j + step)...);
    a = x;
    b = y;
}

template <class T, int step = 1>
ATTNGRAD_INLINE void transpose(Vec<T> (&rows)[lanes<T>]) {
    if constexpr (step < lanes<T>) {
#pragma GCC unroll 16
        for (int i = 0; i < lanes<T>; ++i)
            if (!(i & step)) exchange<T, step>(rows[i], rows[i + step], std::make_integer_sequence<int, lanes<T>>{});
        transpose<T, step * 2>(rows);
    }
}

// A vector of rows of whole vectors, of which the last of `count` stands for those past the end.
template <class T>
struct VectorOfRows {
    const T* first;
    long stride;
    int count;
    ATTNGRAD_INLINE const T* operator[](int i) const { return first + std::min(i, count - 1) * stride; }
};

// out[c][i] = in[i][c] * factor, for the W rows i and columns c < columns (a multiple of W).
template <class T>
inline void transpose_in(VectorOfRows<T> in, long columns, T* out, long out_stride, T factor) {
    constexpr int W = lanes<T>;
    for (long c = 0; c < columns; c += W) {
        Vec<T> m[W];
        for (int i = 0; i < W; ++i) m[i] = load<T>(in[i] + c) * factor;
        transpose<T>(m);
        for (int i = 0; i < W; ++i) store<T>(out + (c + i) * out_stride, m[i]);
    }
}

// --- rows in user memory ----------------------------------------------------------------------------------------------
//
// The passes are compiled for a compute type T. In which type numbers are stored is asked here, at run time, a row or more at
// a time: so 16-bit numbers need no passes of their own.

template <class S>
ATTNGRAD_INLINE const S* row_of(const Rows& x, std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<const S*>(x.data) + b * x.b + h * x.h + i * x.row;
}
inline const void* row_of(const Rows& x, Type type, std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<const char*>(x.data) + (b * x.b + h * x.h + i * x.row) * size_of(type);
}

// Rows of n numbers to rows of n_padded, zero past the end.
template <class T>
__attribute__((noinline)) void widen_rows(Type type, const void* in, long stride, long rows, long n, long n_padded, T* out) {
    with_storage<T>(type, [&]<class S>() {
        const S* from = static_cast<const S*>(in);
        for (long k = 0; k < rows; ++k, from += stride, out += n_padded) {
            for (long i = 0; i < n; ++i) out[i] = widen(from[i]);
            for (long i = n; i < n_padded; ++i) out[i] = 0;
        }
    });
}

// Rows of n numbers at a stride, times factor[row] (null: 1), from out[first] on at another (0: one after the other).
template <class T>
__attribute__((noinline)) void narrow_rows(Type type, const T* in, long stride, long rows, long n, const T* factor, void* out,
                                           std::int64_t first, std::int64_t out_stride = 0) {
    if (!out_stride) out_stride = n;
    with_storage<T>(type, [&]<class S>() {
        S* to = static_cast<S*>(out) + first;
        for (long k = 0; k < rows; ++k, in += stride, to += out_stride) {
            const T times = factor ? factor[k] : 1;
            for (long i = 0; i < n; ++i) narrow(in[i] * times, to[i]);
        }
    });
}

// The dot products of the rows of a with those of b, which are contiguous.
template <class T>
inline Vec<T> dots(VectorOfRows<T> a, const T* b, long n) {
    constexpr int W = lanes<T>;
    Vec<T> sums[W] = {}, total{};
    const T* row = a.first;
    for (int i = 0; i < a.count; ++i, row += a.stride, b += n) {
        long c = 0;
        for (; c + W <= n; c += W) sums[i] += load<T>(row + c) * load<T>(b + c);
        if (c < n) {
            Vec<T> x{}, y{};
            std::memcpy(&x, row + c, sizeof(T) * (n - c));
            std::memcpy(&y, b + c, sizeof(T) * (n - c));
            sums[i] += x * y;
        }
    }
    transpose<T>(sums);
    for (int i = 0; i < W; ++i) total += sums[i];
    return total;
}

}  // namespace attngrad::ATTNGRAD_ISA
