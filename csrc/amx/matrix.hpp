// Products of 16-bit numbers by AMX tiles: float32 sums of products of bfloat16 numbers, 16 x 16 at a time,
// at sixteen times the rate of multiply-adds.
//
// A float32 number is the sum of bfloat16 numbers, and so a product is a sum of products of such parts. What is stored as
// bfloat16 is one part; IEEE half is two, exactly; weights and their gradients are two, which keeps 16 bits of 24. So
// results are as good as those in float32, which are rounded to 8 or 11 bits in the end.
//
// Of a product C = A B AMX wants A by rows, 32 numbers of the depth in each; and B by pairs of the depth: row i of an
// AMX tile has, for each column, the numbers 2i and 2i + 1. Depths are padded to 32, rows and columns to 16, with zeros.
#pragma once

#ifdef __AMX_BF16__
#include <immintrin.h>
#endif

#include "passes/chunk.hpp"

namespace attngrad::ATTNGRAD_ISA {

typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));
using Number16 = std::uint16_t;  // a bfloat16, as bits

template <class X>
ATTNGRAD_INLINE Words words_of(const X& x) {
    Words y;
    static_assert(sizeof x == sizeof y);
    std::memcpy(&y, &x, sizeof y);
    return y;
}
ATTNGRAD_INLINE Vec<float> floats_of(Words x) {
    Vec<float> y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
ATTNGRAD_INLINE Words load_words(const void* p) {
    Words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
ATTNGRAD_INLINE void store_words(void* p, Words x) { std::memcpy(p, &x, sizeof x); }

constexpr long up(long n, long step) { return (n + step - 1) / step * step; }

// A matrix in one part or two: the number is their sum.
struct Parts {
    Number16* part[2] = {};
    long stride = 0;  // between rows, in numbers
    int count = 1;
    static Parts take(int count, long rows, long stride, Arena& arena) {
        Parts x;
        for (int i = 0; i < count; ++i) x.part[i] = arena.take<Number16>(rows * stride);
        x.stride = stride;
        x.count = count;
        return x;
    }
    Parts at(long row, long column) const {
        Parts x = *this;
        for (int i = 0; i < count; ++i) x.part[i] += row * stride + column;
        return x;
    }
};

template <class S>
constexpr int parts_of = std::is_same_v<S, BFloat16> ? 1 : 2;

// --- two float32 numbers in one word of two parts ------------------------------------------------------------------------

// The upper halves of a and b, side by side; and what they leave, such that its upper half is nearest to it. Cut off, weights
// would all be too small: where values have a mean, so is out, and delta with it, from which small differences are taken.
ATTNGRAD_INLINE Words side_by_side(Words a, Words b) { return (a >> 16u) | (b & 0xffff0000u); }
ATTNGRAD_INLINE Vec<float> remainder_of(Vec<float> x) {
    return floats_of(words_of(x - floats_of(words_of(x) & 0xffff0000u)) + 0x8000u);
}

// --- rows of user memory -------------------------------------------------------------------------------------------------

// Row `row` of `out`: `n` numbers, and zeros up to the stride.
ATTNGRAD_INLINE void split_row(const BFloat16* in, long n, const Parts& out, long row) {
    Number16* to = out.part[0] + row * out.stride;
    std::memcpy(to, in, sizeof(Number16) * n);
    std::memset(to + n, 0, sizeof(Number16) * (out.stride - n));
}
ATTNGRAD_INLINE void split_row(const Half* in, long n, const Parts& out, long row) {
    Number16 *high = out.part[0] + row * out.stride, *low = out.part[1] + row * out.stride;
    for (long i = 0; i < n; ++i) {
        const std::uint32_t bits = float_to_bits(widen(in[i])), upper = bits & 0xffff0000u;
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        high[i] = static_cast<Number16>(upper >> 16);
        low[i] = finite ? static_cast<Number16>(float_to_bits(bits_to_float(bits) - bits_to_float(upper)) >> 16) : 0;
    }
    for (long i = n; i < out.stride; ++i) high[i] = low[i] = 0;
}
inline void zero_row(const Parts& out, long row) {
    for (int i = 0; i < out.count; ++i) std::memset(out.part[i] + row * out.stride, 0, sizeof(Number16) * out.stride);
}

ATTNGRAD_INLINE Words pair_of_rows(const Number16* a, const Number16* b) {
    Halves x, y;
    std::memcpy(&x, a, sizeof x);
    std::memcpy(&y, b, sizeof y);
    return __builtin_convertvector(x, Words) | __builtin_convertvector(y, Words) << 16u;
}

// Rows as the B of a product whose depth is the features: out[feature / 2][row], `rows` a multiple of 16.
inline void pairs_of_features(const Parts& in, long rows, long length, const Parts& out) {
    for (int i = 0; i < in.count; ++i)
        for (long r = 0; r < rows; r += 16)
            for (long c = 0; c < length; c += 32) {
                Vec<float> m[16];
                for (int j = 0; j < 16; ++j) m[j] = floats_of(load_words(in.part[i] + (r + j) * in.stride + c));
                transpose<float>(m);
                for (int j = 0; j < 16; ++j) store_words(out.part[i] + (c / 2 + j) * out.stride + 2 * r, words_of(m[j]));
            }
}
// Rows as the B of a product whose depth is the rows, in the order of pack_weights(): rows j and j + 16 of each 32 are a pair.
inline void pairs_of_rows(const Parts& in, long rows, const Parts& out) {
    for (int i = 0; i < in.count; ++i)
        for (long r = 0; r < rows; r += 32)
            for (int j = 0; j < 16; ++j) {
                const Number16* row = in.part[i] + (r + j) * in.stride;
                Number16* to = out.part[i] + (r / 2 + j) * out.stride;
                for (long c = 0; 2 * c < out.stride; c += 16)
                    store_words(to + 2 * c, pair_of_rows(row + c, row + 16 * in.stride + c));
            }
}
// Rows transposed, as the A of a product whose depth is the rows: out[feature][row].
inline void transposed(const Parts& in, long rows, long features, const Parts& out) {
    for (int i = 0; i < in.count; ++i)
        for (long r = 0; r < rows; r += 32)
            for (long c = 0; c < features; c += 16) {
                Vec<float> m[16];
                for (int j = 0; j < 16; ++j) {
                    const Number16* row = in.part[i] + (r + 2 * j) * in.stride + c;
                    m[j] = floats_of(pair_of_rows(row, row + in.stride));
                }
                transpose<float>(m);
                for (int j = 0; j < 16; ++j) store_words(out.part[i] + (c + j) * out.stride + r, words_of(m[j]));
            }
}

// --- products --------------------------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__

// RAII: configures this thread's AMX tiles, 16 rows of 64 bytes each, and restores the previous configuration.
class AmxTiles {
    struct alignas(64) Config {
        std::uint8_t palette = 0, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
    };
    static constexpr Config ours{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    Config before_;

public:
    AmxTiles() {
        __asm__ volatile("sttilecfg %0" : "=m"(before_));
        __asm__ volatile("ldtilecfg %0" ::"m"(ours));
    }
    ~AmxTiles() {
        if (before_.palette) {
            __asm__ volatile("ldtilecfg %0" ::"m"(before_));
        } else {
            _tile_release();
        }
    }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;
};

// MI x NI AMX tiles of C, in registers 0 to 3; A has 4 and 5, B 6 and 7.
template <int MI, int NI, bool add, bool all>
inline void amx_tile_product(long depth, const Parts& a, const Parts& b, float* c, long c_stride) {
    const long cs = c_stride * 4, as = a.stride * 2, bs = b.stride * 2;
    float* lower = c + 16 * c_stride;
    __asm__ volatile("" ::: "memory");  // to the compiler, the instructions below touch no memory
    if constexpr (add) {
        _tile_loadd(0, c, cs);
        if constexpr (NI == 2) _tile_loadd(1, c + 16, cs);
        if constexpr (MI == 2) _tile_loadd(2, lower, cs);
        if constexpr (MI == 2 && NI == 2) _tile_loadd(3, lower + 16, cs);
    } else {
        _tile_zero(0);
        if constexpr (NI == 2) _tile_zero(1);
        if constexpr (MI == 2) _tile_zero(2);
        if constexpr (MI == 2 && NI == 2) _tile_zero(3);
    }
    for (long k = 0; k < depth; k += 32)
        for (int j = 0; j < b.count; ++j) {
            const Number16* pb = b.part[j] + k / 2 * b.stride;
            _tile_loadd(6, pb, bs);
            if constexpr (NI == 2) _tile_loadd(7, pb + 32, bs);
            for (int i = 0; i < a.count; ++i) {
                if (!all && i + j == 2) continue;
                if (j == 0 || a.count > 1) {  // else it is there
                    const Number16* pa = a.part[i] + k;
                    _tile_loadd(4, pa, as);
                    if constexpr (MI == 2) _tile_loadd(5, pa + 16 * a.stride, as);
                }
                _tile_dpbf16ps(0, 4, 6);
                if constexpr (NI == 2) _tile_dpbf16ps(1, 4, 7);
                if constexpr (MI == 2) _tile_dpbf16ps(2, 5, 6);
                if constexpr (MI == 2 && NI == 2) _tile_dpbf16ps(3, 5, 7);
            }
        }
    _tile_stored(0, c, cs);
    if constexpr (NI == 2) _tile_stored(1, c + 16, cs);
    if constexpr (MI == 2) _tile_stored(2, lower, cs);
    if constexpr (MI == 2 && NI == 2) _tile_stored(3, lower + 16, cs);
    __asm__ volatile("" ::: "memory");
}

#else

// The same without such hardware, so that tests reach the passes on any machine.
struct AmxTiles {
    AmxTiles() {}
};
template <int MI, int NI, bool add, bool all>
inline void amx_tile_product(long depth, const Parts& a, const Parts& b, float* c, long c_stride) {
    for (int m = 0; m < 16 * MI; ++m)
        for (int n = 0; n < 16 * NI; n += 16) {
            Vec<float> sum = add ? load<float>(c + m * c_stride + n) : Vec<float>{};
            for (long k = 0; k < depth; k += 2)
                for (int j = 0; j < b.count; ++j)
                    for (int i = 0; i < a.count; ++i) {
                        if (!all && i + j == 2) continue;
                        const Number16* x = a.part[i] + m * a.stride + k;
                        const Words pair = load_words(b.part[j] + k / 2 * b.stride + 2 * n);
                        sum += bits_to_float(std::uint32_t{x[0]} << 16) * floats_of(pair << 16u);
                        sum += bits_to_float(std::uint32_t{x[1]} << 16) * floats_of(pair & 0xffff0000u);
                    }
            store<float>(c + m * c_stride + n, sum);
        }
}

#endif

// C (rows x columns, multiples of 16) = A B or C += A B; without the product of the lower parts unless `all` are wanted.
template <bool add, bool all>
inline void multiply(long rows, long columns, long depth, const Parts& a, const Parts& b, float* c, long c_stride) {
    for (long n = 0; n < columns; n += 32)
        for (long m = 0; m < rows; m += 32) {
            const Parts x = a.at(m, 0), y = b.at(0, 2 * n);
            float* to = c + m * c_stride + n;
            const bool two_rows = m + 16 < rows, two_columns = n + 16 < columns;
            if (two_rows && two_columns) {
                amx_tile_product<2, 2, add, all>(depth, x, y, to, c_stride);
            } else if (two_rows) {
                amx_tile_product<2, 1, add, all>(depth, x, y, to, c_stride);
            } else if (two_columns) {
                amx_tile_product<1, 2, add, all>(depth, x, y, to, c_stride);
            } else {
                amx_tile_product<1, 1, add, all>(depth, x, y, to, c_stride);
            }
        }
}

// --- what the passes share -------------------------------------------------------------------------------------------------

constexpr int W = 16;                              // rows and columns of an AMX tile
constexpr long Q = block<float>, K = keys<float>;  // queries of a block, keys of a key tile
constexpr int G = 32;                              // queries whose products are made at once
constexpr long R = 96;                             // keys that the backward pass takes at once
static_assert(Q % 32 == 0 && K % R == 0 && R % 32 == 0 && lanes<float> == W);

// The rows of a block, zeros for those that are `fully_masked`, and up to a whole number of AMX tiles along the depth.
template <class S, class FullyMasked>
inline void split_rows(const Rows& x, const Block<float>& q, long length, const Parts& out, FullyMasked fully_masked) {
    for (int lane = 0; lane < up(q.width, 32); ++lane) {
        if (!x.data || lane >= q.count || fully_masked(lane)) {
            zero_row(out, lane);
        } else {
            split_row(row_of<S>(x, q.b, q.head[lane], q.row[lane]), length, out, lane);
        }
    }
}
// Keys k0 .. k1 of one head, likewise. A copy even of bfloat16: rows of 64 bytes are best read where they are aligned.
template <class S>
inline void split_keys(const Rows& x, std::int64_t b, std::int64_t head, long length, long k0, long k1, const Parts& out) {
    const S* row = row_of<S>(x, b, head, k0);
    for (long k = 0; k < k1 - k0; ++k, row += x.row) split_row(row, length, out, k);
    for (long k = k1 - k0; k < up(k1 - k0, 32); ++k) zero_row(out, k);
}

// Some queries of a block, side by side. They are gone through in turn, so that their scores and what is made of them lie in
// the same memory, and that in the first cache.
struct Group {
    int lane, width;
    Span seen;  // the keys that any of them sees, of k0 .. k1
    Group(const Block<float>& q, int first, long k0, long k1) : lane(first), width(std::min(G, q.width - first)) {
        Band band = q.vectors[lane / W];
        for (int n = lane + W; n < lane + width; n += W) band.join(q.vectors[n / W]);
        seen = band.outer.clipped(k0, k1);
    }
};

// Scores, transposed like everywhere: out[key][lane] = row[key] . column[lane], for the keys that the group sees.
inline void amx_dots(const Group& g, const Parts& rows, const Parts& columns, long depth, ScoreTile<float> out) {
    const long a = (g.seen.a - out.k0) / 16 * 16, b = up(g.seen.b - out.k0, 16);
    multiply<false, true>(b - a, g.width, depth, rows.at(a, 0), columns.at(0, 2 * g.lane), out.at(out.k0 + a, g.lane), Q);
}

// Zeros where a vector of queries sees no key, up to a whole number of AMX tiles along the depth.
inline void clear_unseen(const Block<float>& q, int lane, int end, long k1, ScoreTile<float> tile) {
    for (; lane < end; lane += W) {
        const Span own = q.vectors[lane / W].outer.clipped(tile.k0, k1);
        for (long k = tile.k0; k < own.a; ++k) store<float>(tile.at(k, lane), Vec<float>{});
        for (long k = own.b; k < tile.k0 + up(k1 - tile.k0, 32); ++k) store<float>(tile.at(k, lane), Vec<float>{});
    }
}

// Weights [key][lane] of n keys and at most 32 lanes, in two parts: as B of a product whose depth is the keys (`pairs`); as A
// of one whose depth is the lanes (`rows`), where lanes j and j + 16 are a pair.
template <bool to_pairs, bool to_rows>
inline void pack_weights(int width, const float* weights, long n, const Parts& pairs, const Parts& rows) {
    const bool both = width > W;
    for (long k = 0; k < up(n, 32); k += 2, weights += 2 * Q) {
        Vec<float> a = load<float>(weights), b{}, c = load<float>(weights + Q), d{};  // of keys k and k + 1
        if (both) b = load<float>(weights + W), d = load<float>(weights + Q + W);
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            if constexpr (to_pairs) {
                Number16* to = pairs.part[part] + k / 2 * pairs.stride;
                store_words(to, side_by_side(words_of(a), words_of(c)));
                if (both) store_words(to + 32, side_by_side(words_of(b), words_of(d)));
            }
            if constexpr (to_rows) {
                Number16* to = rows.part[part] + k * rows.stride;
                store_words(to, side_by_side(words_of(a), words_of(b)));
                store_words(to + rows.stride, side_by_side(words_of(c), words_of(d)));
            }
            if (part == 0) a = remainder_of(a), b = remainder_of(b), c = remainder_of(c), d = remainder_of(d);
        }
    }
}

// Sums [feature][lane], times factor[lane], to rows of arrays (B, Hq, T, length), the second contiguous; either may be null.
template <class S>
inline void write_transposed(const float* sums, const float* factor, const Problem& p, const Block<float>& q, long length,
                             const ResultRows& out, float* wide_out) {
    for (int lane = 0; lane < q.count; lane += W) {
        const Vec<float> scale = load<float>(factor + lane);
        for (long c = 0; c < length; c += W) {
            Vec<float> m[W];
            for (int j = 0; j < W; ++j) m[j] = load<float>(sums + (c + j) * Q + lane) * scale;
            transpose<float>(m);
            const int n = static_cast<int>(std::min<long>(W, length - c));
            for (int i = 0; i < W && lane + i < q.count; ++i) {
                if (wide_out) store_some<float>(wide_out + q.index(p, lane + i) * length + c, m[i], n);
                if (!out) continue;
                S row[W];
                for (int j = 0; j < W; ++j) narrow(m[i][j], row[j]);
                const std::int64_t at = out.at(p.Hq, p.T, length, q.b, q.head[lane + i], q.row[lane + i]);
                std::memcpy(static_cast<S*>(out.data) + at + c, row, sizeof(S) * n);
            }
        }
    }
}

}  // namespace attngrad::ATTNGRAD_ISA
