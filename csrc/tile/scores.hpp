// All that happens to the scores of one block of queries against one key tile: modifiers, bias, masks, dropout; in one place
// for all passes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "tile/modifiers.hpp"
#include "tile/panel.hpp"

namespace attngrad::ATTNGRAD_ISA {

constexpr double log2e = 1.44269504088896340735992468100189214;

// What has to be done to the scores of a key: nothing; hide it from some lanes; add a bias, or just turn to units of log2;
// or all that modifies scores.
enum class Path { clear, hidden, biased, general };
template <Path path>
constexpr bool modified = path == Path::biased || path == Path::general;
struct Paths {
    Path inner, outer;  // of the keys that every lane sees, and of the others
};

// Passed to the inner loops by value: otherwise the compiler must assume that stores through T* alias its members.
template <class T>
class Scores {
public:
    // Scores are held in units of log2, which saves a multiplication before exp2. With a bias or sinks they are held as they
    // are: a bias close to the lowest number would overflow.
    static T unit(const Problem& p) { return static_cast<T>(p.natural || p.bias || p.sinks ? 1.0 : log2e); }

    // How q is scaled before the product with k, so that apply() starts from what the first modifier takes; without one, from
    // the score.
    static T query_factor(const Problem& p) {
        return static_cast<T>(Modifiers<T>::active(p) ? p.scale / Modifiers<T>::argument_unit(p) : p.scale * unit(p));
    }
    // What the softmax of a row starts from, a sink if there is one.
    static T sink(const Problem& p, std::int64_t head) {
        return p.sinks ? static_cast<const T*>(p.sinks)[head] : -std::numeric_limits<T>::infinity();
    }

    Scores(const Problem& p, Arena& arena, const Plane& bias_dot = {})
        : p_(p),
          p_bias_dot_(bias_dot),
          modifiers_(p, unit(p)),
          to_log2_(static_cast<T>(log2e) / unit(p)),
          to_score_(
              static_cast<T>(Modifiers<T>::active(p) ? Modifiers<T>::argument_unit(p) : 1 / static_cast<double>(unit(p)))),
          natural_(unit(p) == 1) {
        if (p.mask) visible_ = arena.take<std::uint16_t>(keys<T> * vectors);
        if (p.q_segments) q_ids_ = arena.take<Lane>(block<T>);
        if (p.bias) bias_ = arena.take<T>(keys<T> * block<T>);
        if (bias_dot) bias_dot_ = arena.take<T>(keys<T> * block<T>);
        if (p.dropout > 0) keep_ = arena.take<T>(keys<T> * block<T>);
    }

    // Look at keys k0 .. k1: false if no query of the block sees any of them.
    bool prepare(const Block<T>& q, long k0, long k1) {
        q_ = &q;
        k0_ = k0;
        masked_ = mixed_ = false;
        edge_ = q.all.inner.a > k0 || q.all.inner.b < k1;
        if (visible_) {
            const long seen = load_mask(q, k0, k1 - k0);
            if (seen == 0) return false;
            masked_ = seen != (k1 - k0) * q.count;
        }
        if (q_ids_ && !prepare_segments(q, k0, k1)) return false;
        if (bias_) prepare_bias(p_.bias, q, k0, k1, bias_);
        if (bias_dot_) prepare_bias(p_bias_dot_, q, k0, k1, bias_dot_);
        if (keep_) prepare_keep(q, k0, k1);
        return true;
    }

    // The paths of the keys; with `keep`, where dropout matters, too.
    Paths paths(bool keep) const {
        if (modifies() || (keep && drops())) return {Path::general, Path::general};
        const Path outer = natural_ ? Path::general : Path::hidden, inner = natural_ ? Path::biased : Path::clear;
        return {masked_ || mixed_ ? outer : inner, outer};
    }

    // Products of q as it is, times query_factor(). Every pass must round them identically: see tangent().
    static ATTNGRAD_INLINE Vec<T> scaled(Vec<T> x, T factor) { return x * factor + Vec<T>{}; }

    ATTNGRAD_INLINE Vec<T> hide(Vec<T> x, long k, int lane) const {
        return sees(k, lane) ? x : broadcast<T>(-std::numeric_limits<T>::infinity());
    }

    ATTNGRAD_INLINE Vec<T> add_bias(Vec<T> x, long k, int lane) const {
        return bias_ ? x + load<T>(bias_ + (k - k0_) * block<T> + lane) : x;
    }

    // The score, -inf where masked; and slope and bend of the modifiers, where there are any.
    ATTNGRAD_INLINE Modified<T> apply(Vec<T> x, long k, int lane) const {
        Modified<T> y = modifiers_(x);
        y.value = hide(add_bias(y.value, k, lane), k, lane);
        return y;
    }

    // s_dot = m'(z) z_dot + bias_dot (T2), as it is, from z_dot as the products give it: times query_factor() / scale,
    // like z. Every pass must round it identically: adding zero keeps the compiler from contracting the product with what the
    // caller subtracts next.
    ATTNGRAD_INLINE Vec<T> tangent(Vec<T> z_dot, Vec<T> slope, long k, int lane) const {
        Vec<T> x = z_dot * to_score_, add{};
        if (modifies()) x *= slope;
        if (bias_dot_) add = load<T>(bias_dot_ + (k - k0_) * block<T> + lane);
        return x + add;
    }
    ATTNGRAD_INLINE Vec<T> unmodified_tangent(Vec<T> z_dot) const { return z_dot * to_score_ + Vec<T>{}; }

    // Which lanes see key k, by band, mask and segments; -inf biases are left to arithmetic.
    ATTNGRAD_INLINE Int<T> sees(long k, int lane) const {
        Int<T> in = ~Int<T>{};
        if (edge_)
            in = (load_lanes<T>(q_->lo + lane) <= static_cast<Lane>(k)) & (load_lanes<T>(q_->hi + lane) > static_cast<Lane>(k));
        if (masked_) in &= from_bits<T>(visible_[(k - k0_) * vectors + lane / lanes<T>]);
        if (mixed_) in &= load_lanes<T>(q_ids_ + lane) == static_cast<Lane>(k_ids_[k]);
        return in;
    }

    // The exponent of 2 for a difference of scores.
    ATTNGRAD_INLINE Vec<T> exponent(Vec<T> difference) const { return difference * to_log2_; }

    bool modifies() const { return modifiers_.active(); }
    bool drops() const { return keep_ != nullptr; }
    // M: 0 or 1 / (1 - rate).
    ATTNGRAD_INLINE Vec<T> keep(long k, int lane) const { return load<T>(keep_ + (k - k0_) * block<T> + lane); }
    T* bias_tile() const { return bias_; }  // free for other use once apply() is done with it

private:
    using Lane = typename VecTypes<T>::Scalar;
    static constexpr int vectors = block<T> / lanes<T>;

    // False if no query and key have the same id; mixed_ unless all have.
    bool prepare_segments(const Block<T>& q, long k0, long k1) {
        const std::int32_t* ids = p_.q_segments + q.b * p_.T;
        k_ids_ = p_.k_segments + q.b * p_.S;
        for (int lane = 0; lane < q.width; ++lane) q_ids_[lane] = ids[q.row[lane]];
        const auto [q_low, q_high] = std::minmax_element(q_ids_, q_ids_ + q.count);
        const auto [k_low, k_high] = std::minmax_element(k_ids_ + k0, k_ids_ + k1);
        if (*q_high < *k_low || *k_high < *q_low) return false;
        mixed_ = *q_low != *q_high || *k_low != *k_high;
        return true;
    }

    // The mask, transposed 16 x 16 at a time into one bit per lane; how many entries are true.
    long load_mask(const Block<T>& q, long k0, long n) {
        const auto* mask = static_cast<const std::int8_t*>(p_.mask.data) + q.b * p_.mask.b + k0 * p_.mask.s;
        long seen = 0;
        for (int lane = 0; lane < q.width; lane += 16) {
            const int used = std::min(16, q.count - lane);
            const std::int8_t* rows[16] = {};
            for (int i = 0; i < used; ++i) rows[i] = mask + q.head[lane + i] * p_.mask.h + q.row[lane + i] * p_.mask.t;
            for (long k = 0; k < n; k += 16) {
                const int here = static_cast<int>(std::min<long>(16, n - k));
                Bytes x[16] = {}, sum{};
                for (int i = 0; i < used; ++i) {
                    if (p_.mask.s == 1 && here == 16) {
                        std::memcpy(&x[i], rows[i] + k, 16);
                    } else {
                        for (int j = 0; j < here; ++j) x[i][j] = rows[i][(k + j) * p_.mask.s];
                    }
                    x[i] = x[i] != 0;  // any nonzero byte is true
                    sum -= x[i];
                }
                std::uint64_t halves[2];
                std::memcpy(halves, &sum, 16);
                for (const std::uint64_t half : halves) seen += static_cast<long>((half * 0x0101010101010101) >> 56);
                transpose_bytes(x);
                for (int j = 0; j < here; ++j) {
                    std::memcpy(halves, &x[j], 16);
                    const unsigned bits = bits_of(halves[0]) | bits_of(halves[1]) << 8;
                    std::uint16_t* to = visible_ + (k + j) * vectors + lane / lanes<T>;
                    for (int i = 0; i < 16 && lane + i < q.width; i += lanes<T>) *to++ = static_cast<std::uint16_t>(bits >> i);
                }
            }
        }
        return seen;
    }

    typedef std::int8_t Bytes __attribute__((vector_size(16)));

    // Eight bytes of 0 or -1 as eight bits.
    static ATTNGRAD_INLINE unsigned bits_of(std::uint64_t bytes) {
        return static_cast<unsigned>(((bytes & 0x0101010101010101) * 0x0102040810204080) >> 56);
    }

    // Interleaving rows i and i + 8, four times over, transposes.
    static ATTNGRAD_INLINE void transpose_bytes(Bytes (&x)[16]) {
        for (int round = 0; round < 4; ++round) {
            Bytes y[16];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                y[2 * i] = __builtin_shufflevector(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                y[2 * i + 1] =
                    __builtin_shufflevector(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            }
            std::memcpy(x, y, sizeof y);
        }
    }

    template <class S>
    static void load_bias(const Plane& plane, const Block<T>& q, long k0, long n, T* tile) {
        constexpr int W = lanes<T>;
        const S* bias = static_cast<const S*>(plane.data) + q.b * plane.b + k0 * plane.s;
        for (int lane = 0; lane < q.width; lane += W) {
            const S* rows[W];
            for (int i = 0; i < W; ++i) {
                const int at = std::min(lane + i, q.count - 1);
                rows[i] = bias + q.head[at] * plane.h + q.row[at] * plane.t;
            }
            long k = 0;
            if constexpr (std::is_same_v<S, T>) {
                if (plane.s == 1) {
                    for (; k + W <= n; k += W) {
                        Vec<T> m[W];
                        for (int i = 0; i < W; ++i) m[i] = load<T>(rows[i] + k);
                        transpose<T>(m);
                        for (int i = 0; i < W; ++i) store<T>(tile + (k + i) * block<T> + lane, m[i]);
                    }
                }
            }
            for (; k < n; ++k)
                for (int i = 0; i < W; ++i) tile[k * block<T> + lane + i] = widen(rows[i][k * plane.s]);
        }
    }
    static void prepare_bias(const Plane& plane, const Block<T>& q, long k0, long k1, T* tile) {
        with_storage<T>(plane.type, [&]<class S>() { load_bias<S>(plane, q, k0, k1 - k0, tile); });
    }

    void prepare_keep(const Block<T>& q, long k0, long k1) {
        const T kept = static_cast<T>(1.0 / (1.0 - p_.dropout));
        const std::int64_t j0 = k0 + p_.origin.j, j1 = k1 + p_.origin.j;
        const auto batch = static_cast<std::uint32_t>(q.b + p_.origin.b);
        const std::uint32_t threshold = keep_threshold(p_.dropout);
        std::uint32_t words[4][block<T>];
        for (std::int64_t four = j0 / 4; four * 4 < j1; ++four) {
            for (int lane = 0; lane < q.width; ++lane) {
                const Words w =
                    philox({static_cast<std::uint32_t>(four),
                            static_cast<std::uint32_t>(q.row[lane]) + static_cast<std::uint32_t>(p_.origin.i),
                            static_cast<std::uint32_t>(q.head[lane]) + static_cast<std::uint32_t>(p_.origin.h), batch},
                           p_.seed);
                for (int n = 0; n < 4; ++n) words[n][lane] = w[n];
            }
            for (int n = 0; n < 4; ++n) {
                const std::int64_t j = four * 4 + n;
                if (j < j0 || j >= j1) continue;
                T* row = keep_ + (j - j0) * block<T>;
                for (int lane = 0; lane < q.width; ++lane) row[lane] = words[n][lane] >= threshold ? kept : 0;
            }
        }
    }

    const Problem& p_;
    Plane p_bias_dot_;
    Modifiers<T> modifiers_;
    T to_log2_, to_score_;
    bool natural_;  // natural: the unit of scores is 1
    const Block<T>* q_ = nullptr;
    long k0_ = 0;
    bool edge_ = false, masked_ = false, mixed_ = false;  // whether band, mask, segments hide any key from any query
    std::uint16_t* visible_ = nullptr;                    // [key][vector]: one bit per lane
    Lane* q_ids_ = nullptr;
    const std::int32_t* k_ids_ = nullptr;
    T *bias_ = nullptr, *bias_dot_ = nullptr, *keep_ = nullptr;
};

}  // namespace attngrad::ATTNGRAD_ISA
