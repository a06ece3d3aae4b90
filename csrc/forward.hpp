// The forward pass: online softmax over tiles of keys, queries in the lanes, scores kept transposed.
//
//     z = scale q k^T (F1); s = cap(z) + bias, masked (F2); lse (F3); p = exp(s - lse) (F4); out = (p o M) v (F5)
#pragma once

#include <vector>

#include "key_tile.hpp"
#include "team.hpp"

namespace attngrad::ATTNGRAD_ISA {

// W rows of q (or dout) starting at lane n of a block, as rows of the compute type in `rows` [W][columns]; zero past the end.
template <class S, class T>
inline void gather_rows(const Rows& x, const Block<T>& q, int n, long length, T* rows) {
    const long columns = padded<T>(length);
    for (int i = 0; i < lanes<T>; ++i) {
        T* out = rows + i * columns;
        if (n + i < q.count && x.data) {
            widen_row<S, T>(row_of<S>(x, q.b, q.head[n + i], q.row[n + i]), length, columns, out);
        } else {
            std::memset(out, 0, static_cast<std::size_t>(columns) * sizeof(T));
        }
    }
}

// q transposed into the lanes: out[d][lane] = factor * q[lane][d].
template <class S, class T>
inline void pack_lanes(const Rows& x, const Block<T>& q, long length, T factor, T* rows, T* out) {
    const long columns = padded<T>(length);
    for (int n = 0; n < q.width; n += lanes<T>) {
        const T* in = rows;
        long stride = columns;
        if constexpr (std::is_same_v<S, T>) {  // whole vectors of one head: from where they are
            const int last = n + lanes<T> - 1;
            if (columns == length && last < q.count && q.head[n] == q.head[last])
                in = row_of<S>(x, q.b, q.head[n], q.row[n]), stride = x.row;
        }
        if (in == rows) gather_rows<S, T>(x, q, n, length, rows);
        transpose_in<T>(in, stride, columns, out + n, block<T>, factor);
    }
}

// Sums of a block, a row of whole vectors for each lane, to rows of an array (B, Hq, T, length), times factor[lane].
template <class S, class T>
inline void write_rows(const T* sums, const T* factor, const Problem& p, const Block<T>& q, long length, S* out, T* wide) {
    for (int n = 0; n < q.count; ++n, sums += padded<T>(length)) {
        const std::int64_t at = q.index(p, n) * length;
        if (out) narrow_row<S, T>(sums, length, factor[n], out + at);
        if (wide) narrow_row<T, T>(sums, length, factor[n], wide + at);
    }
}

// f<path>(k) for every key of a span. `inner` are the keys that every lane sees by the band.
template <class F>
ATTNGRAD_INLINE void each_key(Span keys, Span inner, Paths paths, F f) {
    const auto all = [&](Path path, long a, long b) ATTNGRAD_LAMBDA {
        const auto loop = [&]<Path which>() ATTNGRAD_LAMBDA {
            for (long k = a; k < b; ++k) f.template operator()<which>(k);
        };
        switch (path) {
            case Path::clear: return loop.template operator()<Path::clear>();
            case Path::hidden: return loop.template operator()<Path::hidden>();
            case Path::biased: return loop.template operator()<Path::biased>();
            case Path::general: return loop.template operator()<Path::general>();
        }
    };
    Span parts[3] = {{keys.a, keys.b}, {}, {}};
    if (paths.inner != paths.outer) {
        const Span in = inner.cut(keys.a, keys.b);
        parts[0].b = in.a;
        parts[1] = in;
        parts[2] = {in.b, keys.b};
    }
    for (int n = 0; n < 3; ++n) all(n == 1 ? paths.inner : paths.outer, parts[n].a, parts[n].b);
}

// The online softmax of NV vectors: turns scores into weights in place, and moves the running maximum and sum.
template <class T, int NV>
__attribute__((noinline)) void softmax(const Scores<T> scores, T* s, long k0, Span keys, Span inner, int lane, T* top,
                                       T* sum, T* rescale) {
    constexpr int W = lanes<T>;
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    Vec<T> m[NV], total[NV], part[NV] = {};
    for (int v = 0; v < NV; ++v) m[v] = load<T>(top + v * W);
    each_key(keys, inner, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T* row = s + (k - k0) * block<T>;
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(row + v * W);
            if constexpr (path == Path::hidden) x = scores.hide(x, k, lane + v * W);
            if constexpr (path == Path::biased) x = scores.add_bias(x, k, lane + v * W);
            if constexpr (path == Path::general) x = scores.template apply<0>(x, k, lane + v * W);
            if constexpr (path != Path::clear) store<T>(row + v * W, x);
            m[v] = vmax(x, m[v]);
        }
    });
    for (int v = 0; v < NV; ++v) {
        const Vec<T> old = load<T>(top + v * W);
        store<T>(top + v * W, m[v]);
        m[v] = m[v] == minus_inf ? Vec<T>{} : m[v];  // nothing seen yet: exp2(-inf - 0) is 0
        const Vec<T> factor = exp2<T>(scores.exponent(old - m[v]));
        store<T>(rescale + v * W, factor);
        total[v] = load<T>(sum + v * W) * factor;
    }
    each_key(keys, inner, scores.paths(true), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T* row = s + (k - k0) * block<T>;
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(row + v * W) - m[v];
            if constexpr (modified<path>) x = scores.exponent(x);  // else the unit is log2
            Vec<T> p = exp2<T, path != Path::clear>(x);
            part[v] += p;
            if (path == Path::general && scores.drops()) p *= scores.keep(k, lane + v * W);
            store<T>(row + v * W, p);
        }
    });
    for (int v = 0; v < NV; ++v) {  // scores that are all -inf by overflow: nothing is seen, whatever exp2 gave
        const Vec<T> all = total[v] + part[v];
        store<T>(sum + v * W, (load<T>(top + v * W) == minus_inf) & (all == all) ? Vec<T>{} : all);
    }
}

// lse, and what a backward pass rebuilds the weights from. A row that saw no key has top = inverse = 0.
template <class T>
inline void write_row_statistics(const Problem& p, const ForwardResult& r, std::int64_t b, std::int64_t h, std::int64_t i,
                                 T top, T sum) {
    const std::int64_t at = (b * p.Hq + h) * p.T + i;
    static_cast<T*>(r.lse)[at] = sum == 0 ? -std::numeric_limits<T>::infinity()
                                          : top * (Scores<T>::unit(p) == 1 ? 1 : static_cast<T>(1 / log2e)) + std::log(sum);
    const bool blind = sum == 0 || (p.sinks && sum == 1 && top == Scores<T>::sink(p, h));
    if (r.top) static_cast<T*>(r.top)[at] = blind ? 0 : top;
    if (r.inverse) static_cast<T*>(r.inverse)[at] = blind ? 0 : 1 / sum;
}

template <class S>
class Forward {
    using T = Compute<S>;

public:
    Forward(const Problem& p, const ForwardResult& r, char* memory) : Forward(p, r, Cutter(memory)) {}

    static std::size_t bytes(const Problem& p) { return Forward(p, {}, Cutter(nullptr)).used_; }

    void run(std::int64_t b, std::int64_t key_head, std::int64_t first, int length, const Team& team) {
        q_.set(p_, b, key_head, first, length);
        pack_lanes<S, T>(p_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, qt_);
        start();
        const Span seen = q_.all.outer;
        for (long k0 = seen.a / keys<T> * keys<T>; k0 < seen.b && !team.cancelled(); k0 += keys<T>) {
            const long k1 = std::min<long>(k0 + keys<T>, seen.b);
            if (scores_.prepare(q_, k0, k1)) tile(key_head, k0, k1);
        }
        finish();
    }

private:
    Forward(const Problem& p, const ForwardResult& r, Cutter cut)
        : p_(p),
          r_(r),
          rows_(cut.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          qt_(cut.take<T>(padded<T>(p.D) * block<T>)),
          sums_(cut.take<T>(padded<T>(p.E) * block<T>)),
          st_(cut.take<T>(keys<T> * block<T>)),
          top_(cut.take<T>(block<T>)),
          sum_(cut.take<T>(block<T>)),
          factor_(cut.take<T>(block<T>)),
          k_(p.D, false, cut),
          v_(p.E, true, cut),
          scores_(p, cut),
          used_(cut.used()) {}

    // With a sink, the softmax starts from it: one more key, whose value is zero.
    void start() {
        for (int n = 0; n < q_.width; ++n) {
            top_[n] = p_.sinks ? Scores<T>::sink(p_, q_.head[n]) : -std::numeric_limits<T>::infinity();
            sum_[n] = top_[n] == -std::numeric_limits<T>::infinity() ? 0 : 1;
        }
        std::memset(sums_, 0, sizeof(T) * q_.count * padded<T>(p_.E));
    }

    void tile(std::int64_t key_head, long k0, long k1) {
        k_.load(p_.k, q_.b, key_head, k0, k1);
        v_.load(p_.v, q_.b, key_head, k0, k1);
        for (int lane = 0; lane < q_.width; lane += panel<T>) {
            const Panel<T> panel(q_, lane, k0, k1);
            if (panel.blind()) continue;
            panel.parts([&](int vectors, int at, Span span) {
                k_.template dots<ToZero>(vectors, span, qt_ + at, st_ + (span.a - k0) * block<T> + at);
            });
            const auto weights = [&](auto* softmax, int at, Span span) {
                softmax(scores_, st_ + at, k0, span, panel.inner, at, top_ + at, sum_ + at, factor_ + at);
            };
            if (panel.whole) {
                weights(panel.vectors == 3   ? softmax<T, 3>
                        : panel.vectors == 2 ? softmax<T, 2>
                                             : softmax<T, 1>,
                        lane, panel.common);
            } else {
                for (int n = 0; n < panel.vectors; ++n) weights(softmax<T, 1>, lane + n * lanes<T>, panel.own[n]);
            }
            bool rescaled = false;
            const auto add = [&]<class To>(To, int vectors, int at, Span span) {
                v_.template combine<To>(std::min(vectors * lanes<T>, q_.count - at), span,
                                        st_ + (span.a - k0) * block<T> + at, sums_ + at * padded<T>(p_.E), factor_ + at);
            };
            if (panel.common.empty()) add(ToScaledC{}, panel.vectors, lane, Span{k0, k0}), rescaled = true;
            panel.parts([&](int vectors, int at, Span span) {
                if (rescaled) {
                    add(ToC{}, vectors, at, span);
                } else {
                    add(ToScaledC{}, vectors, at, span);
                    rescaled = true;
                }
            });
        }
    }

    void finish() {
        for (int n = 0; n < q_.width; ++n) {
            factor_[n] = sum_[n] == 0 ? 0 : 1 / sum_[n];
            if (n < q_.count) write_row_statistics<T>(p_, r_, q_.b, q_.head[n], q_.row[n], top_[n], sum_[n]);
        }
        write_rows<S, T>(sums_, factor_, p_, q_, p_.E, static_cast<S*>(r_.out), static_cast<T*>(r_.wide_out));
    }

    const Problem& p_;
    ForwardResult r_;
    Block<T> q_;
    T *rows_, *qt_, *sums_, *st_, *top_, *sum_, *factor_;
    KeyTile<S> k_, v_;
    Scores<T> scores_;
    std::size_t used_;
};

// How many threads a number of floating-point operations is worth waking.
inline int worth_waking(double flops) { return flops < 4e5 ? 1 : static_cast<int>(std::min(flops / 2e5, 4096.0)); }

// A forward pass over all blocks of queries; `flops` for each query and key. `make` gives the pass of one worker its memory.
template <class Pass, class T, class Make>
void run_blocks(const Problem& p, double flops, Team& team, std::size_t bytes, Make make) {
    const RowBlocks blocks(p, block<T>);
    const std::int64_t heads = p.B * p.Hk, tasks = heads * blocks.count;
    const int worth = worth_waking(flops * p.B * p.Hq * p.T * p.S), workers = team.workers(tasks, worth);
    const std::size_t each = Scratch::bytes<char>(bytes);
    const Scratch scratch(each * workers);
    std::vector<Pass> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.push_back(make(scratch.data() + each * n));
    team.run(tasks, worth, [&](std::int64_t task, int worker) {
        // Blocks of one head together, for its keys and values to stay in the cache; the longest of a causal mask first.
        const std::int64_t head = task / blocks.count, n = blocks.count - 1 - task % blocks.count;
        passes[worker].run(head / p.Hk, head % p.Hk, blocks.first(n), blocks.length(n), team);
    }, true);
}

template <class S>
void forward(const Problem& p, const ForwardResult& r, Team& team) {
    run_blocks<Forward<S>, Compute<S>>(p, 2.0 * (p.D + p.E), team, Forward<S>::bytes(p),
                                       [&](char* memory) { return Forward<S>(p, r, memory); });
}

}  // namespace attngrad::ATTNGRAD_ISA
