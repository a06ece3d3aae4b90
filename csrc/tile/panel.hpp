// Which keys the queries of a block see: spans, bands, and panels of vectors against key tiles.
#pragma once

#include <algorithm>

#include "tile/blocking.hpp"

namespace attngrad::ATTNGRAD_ISA {

// Keys a .. b.
struct Span {
    long a = 0, b = 0;
    bool empty() const { return a >= b; }
    Span clipped(long k0, long k1) const {  // within k0 .. k1, even where empty
        const long first = std::clamp(a, k0, k1);
        return {first, std::clamp(b, first, k1)};
    }
};

// The keys that any (outer) and that all (inner) of some queries see, by causal and window.
struct Band {
    Span outer, inner;
    void join(const Band& x) {
        outer = {std::min(outer.a, x.outer.a), std::max(outer.b, x.outer.b)};
        inner = {std::max(inner.a, x.inner.a), std::min(inner.b, x.inner.b)};
    }
};

// The queries in the lanes of a block. Lanes past `count` repeat the last one; their results are not used.
template <class T>
struct Block {
    std::int64_t b = 0;
    int count = 0, width = 0;  // width: count rounded up to whole vectors
    Band all, vectors[block<T> / lanes<T>];
    using Lane = typename VecTypes<T>::Scalar;
    alignas(64) Lane lo[block<T>], hi[block<T>];  // the keys lo <= k < hi of each lane
    std::int32_t head[block<T>], row[block<T>];
    std::int64_t key_head_ = 0, first_ = -1;

    void set(const Problem& p, std::int64_t batch, std::int64_t key_head, std::int64_t first, int length) {
        const std::int64_t step = (key_head - key_head_) * p.group();
        const bool same_rows = first == first_ && length == count && (!p.banded() || p.offset[batch] == p.offset[b]);
        b = batch;
        key_head_ = key_head;
        if (same_rows) {  // as the block before: the same rows of another head
            for (int n = 0; n < width; ++n) head[n] += static_cast<std::int32_t>(step);
            return;
        }
        first_ = first;
        count = length;
        width = static_cast<int>(padded<T>(length));
        std::int64_t h = key_head * p.group() + first / p.T, i = first % p.T;
        for (int n = 0; n < width; ++n) {
            head[n] = static_cast<std::int32_t>(h);
            row[n] = static_cast<std::int32_t>(i);
            Span sees{0, p.S};
            if (p.banded()) {
                const std::int64_t at = i + p.offset[b];
                if (p.causal) sees.b = std::min<long>(sees.b, at + 1);
                if (p.right >= 0) sees.b = std::min<long>(sees.b, at + p.right + 1);
                if (p.left >= 0) sees.a = std::max<long>(sees.a, at - p.left);
                sees.b = std::max(sees.b, 0L);
                sees.a = std::min(sees.a, sees.b);
            }
            lo[n] = static_cast<Lane>(sees.a);
            hi[n] = static_cast<Lane>(sees.b);
            Band& band = vectors[n / lanes<T>];
            if (n % lanes<T> == 0) band = {sees, sees};
            band.join({sees, sees});
            if (n + 1 < count && ++i == p.T) i = 0, ++h;
        }
        all = vectors[0];
        for (int v = 1; v < width / lanes<T>; ++v) all.join(vectors[v]);
    }
    // Whether all keys that are seen are of one key tile: then the first sums over keys are the last. Not at the beginning of a
    // long causal head, where panels in parts are faster than uniform ones.
    bool in_one_key_tile(const Problem& p) const {
        if (all.outer.empty() || (p.banded() && p.T > block<T>)) return false;
        return all.outer.a / keys<T> == (all.outer.b - 1) / keys<T>;
    }
    // The row of a lane in arrays (B, Hq, T).
    std::int64_t index(const Problem& p, int lane) const { return (b * p.Hq + head[lane]) * p.T + row[lane]; }
};

// Some vectors of queries, from `lane` on, against some keys.
struct Part {
    int vectors = 0, lane = 0, count = 0;  // count: of the lanes, those that are queries of the block
    Span keys, inner;                      // inner: keys that every lane of the panel sees
};

// Some keys against the queries q0 .. q1 of a block.
struct KeyRun {
    Span keys;
    int q0, q1;
};

// f.operator()<NV>() for the number of vectors of a part, at most `most`.
template <int most, class F>
ATTNGRAD_INLINE void with_vectors(int vectors, F f) {
    if (vectors == 1) return f.template operator()<1>();
    if (vectors == 2) return f.template operator()<2>();
    if constexpr (most == 3) return f.template operator()<3>();
}

// A view of scores, or of what is made of them, transposed: [key][lane], for the queries of a block.
template <class T>
struct ScoreTile {
    T* data = nullptr;
    long k0 = 0;    // its first key
    int first = 0;  // its first lane
    ATTNGRAD_INLINE T* at(long k, int lane) const { return data + (k - k0) * block<T> + (lane - first); }
    explicit operator bool() const { return data != nullptr; }
};

// How a panel of vectors meets a key tile: `common` keys that every vector sees some of, and what each sees besides.
// On the diagonal of a causal mask this is what keeps the wasted work below a vector's width.
template <class T>
struct Panel {
    int lane = 0, vectors = 0, queries = 0;  // queries: the first lane that is none
    Span common, own[3], inner;              // inner: keys that every lane sees
    bool same_keys = true;                   // every vector sees exactly the common keys

    Panel(const Block<T>& q, int first, long k0, long k1, int most = panel<T>) : lane(first), queries(q.count) {
        vectors = std::min(q.width - lane, most) / lanes<T>;
        const Band* bands = q.vectors + lane / lanes<T>;
        Band joint = bands[0];
        common = bands[0].outer.clipped(k0, k1);
        for (int v = 0; v < vectors; ++v) {
            joint.join(bands[v]);
            own[v] = bands[v].outer.clipped(k0, k1);
            same_keys = same_keys && own[v].a == own[0].a && own[v].b == own[0].b;
            common = {std::max(common.a, own[v].a), std::min(common.b, own[v].b)};
        }
        common.b = std::max(common.a, common.b);
        inner = joint.inner;
    }
    // Vectors that see the same keys: a whole panel of them, or one.
    static Panel uniform(const Block<T>& q, int first, long k0, long k1) {
        const Panel x(q, first, k0, k1);
        return x.same_keys ? x : Panel(q, first, k0, k1, lanes<T>);
    }
    int end() const { return lane + vectors * lanes<T>; }
    bool fully_masked() const {
        for (int v = 0; v < vectors; ++v)
            if (!own[v].empty()) return false;
        return true;
    }
    Part part(int number, int at, Span keys) const {
        return {number, at, std::min(number * lanes<T>, queries - at), keys, inner};
    }
    // f(part) over the common keys, then over the others of each vector.
    template <class F>
    ATTNGRAD_INLINE void parts(F f) const {
        if (!common.empty()) f(part(vectors, lane, common));
        if (same_keys) return;
        for (int v = 0; v < vectors; ++v) {
            const int at = lane + v * lanes<T>;
            if (common.empty()) {
                if (!own[v].empty()) f(part(1, at, own[v]));
                continue;
            }
            const Span before{own[v].a, common.a}, after{common.b, own[v].b};
            if (!before.empty()) f(part(1, at, before));
            if (!after.empty()) f(part(1, at, after));
        }
    }
    // f(part) such that a part has all keys of its vectors, as the online softmax needs them.
    template <class F>
    ATTNGRAD_INLINE void rows(F f) const {
        if (same_keys) return f(part(vectors, lane, common));
        for (int v = 0; v < vectors; ++v) f(part(1, lane + v * lanes<T>, own[v]));
    }
};

}  // namespace attngrad::ATTNGRAD_ISA
