// The score modifiers and masks of one block of queries against one tile of keys, in one place for all passes.
#pragma once

#include <cmath>
#include <limits>

#include "tiles.hpp"

namespace attngrad::ATTNGRAD_ISA {

constexpr double log2e = 1.44269504088896340735992468100189214;

// The queries in the lanes of a block. Lanes past `count` repeat the last one; their results are not used.
template <class T>
struct Block {
    std::int64_t b = 0;
    int count = 0, width = 0;  // width: count rounded up to whole vectors
    alignas(64) std::int32_t lo[block<T>], hi[block<T>];  // the band: keys lo <= k < hi
    std::int32_t head[block<T>], row[block<T>];

    void set(const Problem& p, std::int64_t batch, std::int64_t key_head, std::int64_t first, int length) {
        b = batch;
        count = length;
        width = static_cast<int>(padded<T>(length));
        std::int64_t h = key_head * p.group() + first / p.T, i = first % p.T;
        for (int n = 0; n < width; ++n) {
            head[n] = static_cast<std::int32_t>(h);
            row[n] = static_cast<std::int32_t>(i);
            std::int64_t low = 0, high = p.S;
            if (p.banded()) {
                const std::int64_t at = i + p.offset[b];
                if (p.causal) high = std::min(high, at + 1);
                if (p.right >= 0) high = std::min(high, at + p.right + 1);
                if (p.left >= 0) low = std::max(low, at - p.left);
                high = std::max<std::int64_t>(high, 0);
                low = std::min(low, high);
            }
            lo[n] = static_cast<std::int32_t>(low);
            hi[n] = static_cast<std::int32_t>(high);
            if (n + 1 < count && ++i == p.T) i = 0, ++h;
        }
    }
    // The keys that any (outer) and that all (inner) of lanes a .. b see.
    struct Band {
        long outer_lo, outer_hi, inner_lo, inner_hi;
    };
    Band band(int a, int end) const {
        Band r{lo[a], hi[a], lo[a], hi[a]};
        for (int n = a + 1; n < end; ++n) {
            r.outer_lo = std::min<long>(r.outer_lo, lo[n]);
            r.inner_lo = std::max<long>(r.inner_lo, lo[n]);
            r.outer_hi = std::max<long>(r.outer_hi, hi[n]);
            r.inner_hi = std::min<long>(r.inner_hi, hi[n]);
        }
        return r;
    }
};

template <class T>
class Scores {
public:
    // How q is scaled before the product with k, so that apply() starts from z/c with a softcap and from z log2(e) without.
    static T query_factor(const Problem& p) {
        return static_cast<T>(p.softcap > 0 ? p.scale / p.softcap : p.scale * log2e);
    }

    Scores(const Problem& p, Cutter& cut) : p_(p), cap_(static_cast<T>(p.softcap * log2e)) {
        if (p.mask || p.q_segments) visible_ = cut.take<std::int8_t>(keys<T> * block<T>);
        if (p.bias) bias_ = cut.take<T>(keys<T> * block<T>);
        if (p.dropout > 0) keep_ = cut.take<T>(keys<T> * block<T>);
    }

    // Look at keys k0 .. k1: false if no query of the block sees any of them.
    bool prepare(const Block<T>& q, long k0, long k1) {
        q_ = &q;
        k0_ = k0;
        masked_ = false;
        if (visible_ && !prepare_visible(q, k0, k1)) return false;
        if (bias_) prepare_bias(q, k0, k1);
        if (keep_) prepare_keep(q, k0, k1);
        return true;
    }

    // Whether apply() does anything for these lanes and keys.
    bool plain(const typename Block<T>::Band& band, long ka, long kb) const {
        return !masked_ && !bias_ && p_.softcap <= 0 && band.inner_lo <= ka && band.inner_hi >= kb;
    }

    // The score in units of log2, -inf where masked. `slope` receives cap'(z).
    template <bool want_slope>
    ATTNGRAD_INLINE Vec<T> apply(Vec<T> x, long k, int lane, Vec<T>* slope = nullptr) const {
        if (p_.softcap > 0) {
            const Vec<T> t = tanh<T>(x);
            if constexpr (want_slope) *slope = static_cast<T>(1) - t * t;
            x = t * cap_;
        }
        const long at = (k - k0_) * block<T> + lane;
        if (bias_) x += load<T>(bias_ + at);
        return sees(k, lane) ? x : broadcast<T>(-std::numeric_limits<T>::infinity());
    }

    // Which lanes see key k, by band, mask and segments; -inf biases are left to arithmetic.
    ATTNGRAD_INLINE Int<T> sees(long k, int lane) const {
        using Scalar = typename VecTypes<T>::Scalar;
        Int<T> in = (load_int32<T>(q_->lo + lane) <= static_cast<Scalar>(k)) &
                    (load_int32<T>(q_->hi + lane) > static_cast<Scalar>(k));
        if (masked_) in &= load_bytes<T>(visible_ + (k - k0_) * block<T> + lane);
        return in;
    }

    bool capped() const { return p_.softcap > 0; }
    bool drops() const { return keep_ != nullptr; }
    // M: 0 or 1 / (1 - rate).
    ATTNGRAD_INLINE Vec<T> keep(long k, int lane) const { return load<T>(keep_ + (k - k0_) * block<T> + lane); }
    T* bias_tile() const { return bias_; }  // free for other use once apply() is done with it

private:
    bool prepare_visible(const Block<T>& q, long k0, long k1) {
        const long n = k1 - k0;
        long seen = n * q.count;
        if (p_.mask) {
            seen = 0;
            const auto* mask = static_cast<const std::uint8_t*>(p_.mask.data) + q.b * p_.mask.b + k0 * p_.mask.s;
            for (int lane = 0; lane < q.count; ++lane) {
                const std::uint8_t* row = mask + q.head[lane] * p_.mask.h + q.row[lane] * p_.mask.t;
                for (long k = 0; k < n; ++k) {
                    const int bit = row[k * p_.mask.s] != 0;
                    visible_[k * block<T> + lane] = static_cast<std::int8_t>(-bit);
                    seen += bit;
                }
            }
            for (long k = 0; k < n; ++k)
                for (int lane = q.count; lane < q.width; ++lane) visible_[k * block<T> + lane] = 0;
        } else {
            std::memset(visible_, -1, static_cast<std::size_t>(n) * block<T>);
        }
        if (p_.q_segments) {
            std::int32_t ids[block<T>];
            for (int lane = 0; lane < q.count; ++lane) ids[lane] = p_.q_segments[q.b * p_.T + q.row[lane]];
            const std::int32_t* key_ids = p_.k_segments + q.b * p_.S + k0;
            seen = 0;
            for (long k = 0; k < n; ++k) {
                std::int8_t* row = visible_ + k * block<T>;
                const std::int32_t id = key_ids[k];
                int here = 0;
                for (int lane = 0; lane < q.count; ++lane) {
                    row[lane] &= static_cast<std::int8_t>(-(ids[lane] == id));
                    here -= row[lane];
                }
                seen += here;
            }
        }
        masked_ = seen != n * q.count;
        return seen != 0;
    }

    template <class S>
    void load_bias(const Block<T>& q, long k0, long k1) {
        const S* bias = static_cast<const S*>(p_.bias.data) + q.b * p_.bias.b + k0 * p_.bias.s;
        for (int lane = 0; lane < q.count; ++lane) {
            const S* row = bias + q.head[lane] * p_.bias.h + q.row[lane] * p_.bias.t;
            for (long k = 0; k < k1 - k0; ++k)
                bias_[k * block<T> + lane] = static_cast<T>(widen(row[k * p_.bias.s]) * static_cast<T>(log2e));
        }
        for (long k = 0; k < k1 - k0; ++k)
            for (int lane = q.count; lane < q.width; ++lane) bias_[k * block<T> + lane] = 0;
    }
    void prepare_bias(const Block<T>& q, long k0, long k1) {
        if constexpr (sizeof(T) == 8) {
            load_bias<double>(q, k0, k1);
        } else {
            if (p_.bias.type == Type::f32) load_bias<float>(q, k0, k1);
            if (p_.bias.type == Type::f16) load_bias<Half>(q, k0, k1);
            if (p_.bias.type == Type::bf16) load_bias<BFloat16>(q, k0, k1);
        }
    }

    void prepare_keep(const Block<T>& q, long k0, long k1) {
        const T kept = static_cast<T>(1.0 / (1.0 - p_.dropout));
        for (int lane = 0; lane < q.width; ++lane) {
            Words words{};
            for (long k = k0; k < k1; ++k) {
                const std::int64_t j = k + p_.origin.j;
                if (k == k0 || j % 4 == 0)
                    words = philox({static_cast<std::uint32_t>(j / 4),
                                    static_cast<std::uint32_t>(q.row[lane] + p_.origin.i),
                                    static_cast<std::uint32_t>(q.head[lane] + p_.origin.h),
                                    static_cast<std::uint32_t>(q.b + p_.origin.b)},
                                   p_.seed);
                keep_[(k - k0) * block<T> + lane] = words[j % 4] >= p_.threshold ? kept : 0;
            }
        }
    }

    const Problem& p_;
    T cap_;
    const Block<T>* q_ = nullptr;
    long k0_ = 0;
    bool masked_ = false;
    std::int8_t* visible_ = nullptr;
    T *bias_ = nullptr, *keep_ = nullptr;
};

}  // namespace attngrad::ATTNGRAD_ISA
