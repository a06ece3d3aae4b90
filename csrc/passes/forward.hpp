// The forward pass: online softmax over key tiles, queries in the lanes, scores kept transposed.
//
//     z = scale q k^T (F1); s = m(z) + bias, masked (F2); lse (F3); p = exp(s - lse) (F4); out = (p o M) v (F5)
//
// m: the score modifiers, M: dropout.
#pragma once

#include <vector>

#include "runtime/thread_pool.hpp"
#include "tile/key_tile.hpp"

namespace attngrad::ATTNGRAD_ISA {

// A vector of rows of q (or dout): where they lie, if they are of the compute type, whole vectors and of one head; else a
// copy in `rows` [W][columns].
template <class T>
inline VectorOfRows<T> gather_rows(Type type, const Rows& x, const Block<T>& q, int lane, long length, T* rows) {
    const long columns = padded<T>(length);
    const int count = std::min(lanes<T>, q.count - lane);
    if (type == compute_type<T> && columns == length && q.head[lane] == q.head[lane + count - 1])
        return {row_of<T>(x, q.b, q.head[lane], q.row[lane]), x.row, count};
    for (int i = 0, end; i < count; i = end) {  // the rows of one head at a time
        for (end = i + 1; end < count && q.head[lane + end] == q.head[lane + i];) ++end;
        widen_rows<T>(type, row_of(x, type, q.b, q.head[lane + i], q.row[lane + i]), x.row, end - i, length, columns,
                      rows + i * columns);
    }
    return {rows, columns, count};
}

// q transposed into the lanes: out[d][lane] = factor * q[lane][d].
template <class T>
inline void pack_lanes(Type type, const Rows& x, const Block<T>& q, long length, T factor, T* rows, T* out) {
    for (int lane = 0; lane < q.width; lane += lanes<T>)
        transpose_in<T>(gather_rows<T>(type, x, q, lane, length, rows), padded<T>(length), out + lane, block<T>, factor);
}

// Sums of a block, a row of whole vectors for each lane, times factor[lane] (null: 1), to rows of an array (B, Hq, T, length),
// if there is one.
template <class T>
inline void write_rows(Type type, const T* sums, const T* factor, const Problem& p, const Block<T>& q, long length,
                       const ResultRows& array) {
    if (!array) return;
    const long columns = padded<T>(length);
    if (array.is_contiguous() && !factor && columns == length)
        return narrow_rows<T>(type, sums, 0, 1, q.count * length, nullptr, array.data, q.index(p, 0) * length);
    for (int n = 0, end; n < q.count; n = end) {
        for (end = n + 1; end < q.count && (array.is_contiguous() || q.head[end] == q.head[n]);) ++end;
        narrow_rows<T>(type, sums + n * columns, columns, end - n, length, factor ? factor + n : nullptr, array.data,
                       array.at(p.Hq, p.T, length, q.b, q.head[n], q.row[n]), array.row);
    }
}

// Where products may write the rows of a block, if these are whole vectors: in an array (B, Hq, T, length) that is contiguous
// and of the compute type, else in `sums`, from which they are copied. Null where there is no array, or they are not.
template <class T>
inline T* rows_as_sums(Type type, const ResultRows& array, const Problem& p, const Block<T>& q, long length, T* sums) {
    if (!array || length != padded<T>(length)) return nullptr;
    const bool there = type == compute_type<T> && array.is_contiguous();
    return there ? static_cast<T*>(array.data) + q.index(p, 0) * length : sums;
}

// f<path>(k) for every key of a part.
template <class F>
ATTNGRAD_INLINE void each_key(const Part& part, Paths paths, F f) {
    const Span keys = part.keys;
    const auto all = [&](Path path, long a, long b) ATTNGRAD_LAMBDA {
        const auto loop = [&]<Path which>() ATTNGRAD_LAMBDA {
#pragma GCC unroll 2
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
        const Span in = part.inner.clipped(keys.a, keys.b);
        parts[0].b = in.a;
        parts[1] = in;
        parts[2] = {in.b, keys.b};
    }
    for (int n = 0; n < 3; ++n) all(n == 1 ? paths.inner : paths.outer, parts[n].a, parts[n].b);
}

// What the online softmax knows of the queries of a block so far, one number per lane.
template <class T>
struct OnlineRows {
    T *row_max, *row_sum;
    T* rescale;  // by what earlier sums are to be multiplied

    static OnlineRows take(Arena& arena) { return {arena.take<T>(block<T>), arena.take<T>(block<T>), arena.take<T>(block<T>)}; }
    // Nothing seen; or the sink, which is one more key whose value is zero.
    void start(int lane, T sink) const {
        row_max[lane] = sink;
        row_sum[lane] = sink == -std::numeric_limits<T>::infinity() ? 0 : 1;
    }
};

// The online softmax of a part of NV vectors: turns scores, times `factor` where `scaled`, into weights in place, and updates
// the running maximum and sum.
template <class T, int NV, bool scaled>
__attribute__((noinline)) void softmax_vectors(const Scores<T> scores, ScoreTile<T> s, const Part& part,
                                               const OnlineRows<T>& rows, T factor) {
    constexpr int W = lanes<T>;
    const int lane = part.lane;
    const Vec<T> minus_inf = broadcast<T>(-std::numeric_limits<T>::infinity());
    Vec<T> m[NV], next[NV], total[NV], sums[NV] = {};  // two alternating maxima, to break the loop-carried dependency
    for (int v = 0; v < NV; ++v) m[v] = next[v] = load<T>(rows.row_max + lane + v * W);
    each_key(part, scores.paths(false), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T* row = s.at(k, lane);
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(row + v * W);
            if constexpr (scaled) x = scores.scaled(x, factor);
            if constexpr (path == Path::hidden) x = scores.hide(x, k, lane + v * W);
            if constexpr (path == Path::biased) x = scores.add_bias(x, k, lane + v * W);
            if constexpr (path == Path::general) x = scores.apply(x, k, lane + v * W).value;
            if constexpr (scaled || path != Path::clear) store<T>(row + v * W, x);
            const Vec<T> larger = vmax(x, m[v]);
            m[v] = next[v];
            next[v] = larger;
        }
    });
    for (int v = 0; v < NV; ++v) {
        const int at = lane + v * W;
        m[v] = vmax(m[v], next[v]);
        const Vec<T> old = load<T>(rows.row_max + at);
        store<T>(rows.row_max + at, m[v]);
        m[v] = m[v] == minus_inf ? Vec<T>{} : m[v];  // nothing seen yet: exp2(-inf - 0) is 0
        const Vec<T> rescale = exp2<T>(scores.exponent(old - m[v]));
        store<T>(rows.rescale + at, rescale);
        total[v] = load<T>(rows.row_sum + at) * rescale;
    }
    each_key(part, scores.paths(true), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        T* row = s.at(k, lane);
        for (int v = 0; v < NV; ++v) {
            Vec<T> x = load<T>(row + v * W) - m[v];
            if constexpr (modified<path>) x = scores.exponent(x);  // else the unit is log2
            Vec<T> p = exp2<T, path != Path::clear>(x);
            sums[v] += p;
            if (path == Path::general && scores.drops()) p *= scores.keep(k, lane + v * W);
            store<T>(row + v * W, p);
        }
    });
    for (int v = 0; v < NV; ++v) {  // scores that are all -inf by overflow: nothing is seen, whatever exp2 gave
        const int at = lane + v * W;
        const Vec<T> all = total[v] + sums[v];
        store<T>(rows.row_sum + at, (load<T>(rows.row_max + at) == minus_inf) & (all == all) ? Vec<T>{} : all);
    }
}

template <class T, bool scaled = false>
ATTNGRAD_INLINE void softmax(const Scores<T>& scores, ScoreTile<T> s, const Part& part, const OnlineRows<T>& rows,
                             T factor = 1) {
    with_vectors<scaled ? 2 : 3>(
        part.vectors, [&]<int NV>() ATTNGRAD_LAMBDA { softmax_vectors<T, NV, scaled>(scores, s, part, rows, factor); });
}

// lse, and what a backward pass rebuilds the weights from, of a vector of rows, or as many of them as are left, from `at` on
// in arrays (B, Hq, T). A row that saw no key has row_max = inv_row_sum = 0.
template <class T>
inline void write_statistics(const Problem& p, const ForwardResult& r, std::int64_t at, int left, Vec<T> row_max, Vec<T> sum) {
    const int count = std::min(left, lanes<T>);
    const auto write = [&](void* to, Vec<T> x) {
        if (to) store_some<T>(static_cast<T*>(to) + at, x, count);
    };
    const T unit = Scores<T>::unit(p) == 1 ? 1 : static_cast<T>(1 / log2e);
    write(r.lse, sum == 0 ? broadcast<T>(-std::numeric_limits<T>::infinity()) : row_max * unit + log<T>(sum));
    if (!r.row_max && !r.inv_row_sum) return;
    Int<T> fully_masked = sum == 0;
    if (p.sinks) {
        Vec<T> sinks{};
        for (int i = 0; i < count; ++i) sinks[i] = Scores<T>::sink(p, (at + i) / p.T % p.Hq);
        fully_masked |= (sum == 1) & (row_max == sinks);
    }
    write(r.row_max, fully_masked ? Vec<T>{} : row_max);
    write(r.inv_row_sum, fully_masked ? Vec<T>{} : 1 / sum);
}

template <class T>
class Forward {
public:
    Forward(const Problem& p, const ForwardResult& r, char* memory) : Forward(p, r, Arena(memory)) {}

    static std::size_t bytes(const Problem& p) { return Forward(p, {}, Arena(nullptr)).used_; }

    void run(std::int64_t b, std::int64_t key_head, std::int64_t first, int length, const ParallelCall& parallel) {
        q_.set(p_, b, key_head, first, length);
        pack_lanes<T>(p_.type, p_.q, q_, p_.D, Scores<T>::query_factor(p_), rows_, qt_);
        start();
        const Span seen = q_.all.outer;
        in_place_ = nullptr;
        if (q_.in_one_key_tile(p_))
            in_place_ = r_.wide_out ? rows_as_sums<T>(compute_type<T>, r_.wide_out, p_, q_, p_.E, sums_)
                                    : rows_as_sums<T>(p_.type, r_.out, p_, q_, p_.E, sums_);
        if (!in_place_) clear();
        bool any = false;
        for (long k0 = seen.a / keys<T> * keys<T>; k0 < seen.b && !parallel.cancelled(); k0 += keys<T>) {
            const long k1 = std::min<long>(k0 + keys<T>, seen.b);
            if (!scores_.prepare(q_, k0, k1)) continue;
            process_key_tile(key_head, k0, k1);
            any = true;
        }
        if (in_place_ && !any) in_place_ = nullptr, clear();
        finish();
    }

private:
    Forward(const Problem& p, const ForwardResult& r, Arena arena)
        : p_(p),
          r_(r),
          rows_(arena.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          qt_(arena.take<T>(padded<T>(p.D) * block<T>)),
          sums_(arena.take<T>(padded<T>(p.E) * block<T>)),
          st_(arena.take<T>(keys<T> * block<T>)),
          online_(OnlineRows<T>::take(arena)),
          k_(p.type, p.D, false, arena),
          v_(p.type, p.E, true, arena),
          scores_(p, arena),
          used_(arena.used()) {}

    void start() {
        for (int n = 0; n < q_.width; ++n) online_.start(n, Scores<T>::sink(p_, q_.head[n]));
    }

    void clear() { std::memset(sums_, 0, sizeof(T) * q_.count * padded<T>(p_.E)); }

    // 1 / row_sum, in the place of the factor that is of no use any more.
    const T* invert_sums(int lane, int end) {
        for (int n = lane; n < end; n += lanes<T>) {
            const Vec<T> sum = load<T>(online_.row_sum + n);
            store<T>(online_.rescale + n, sum == 0 ? Vec<T>{} : 1 / sum);
        }
        return online_.rescale;
    }

    void process_key_tile(std::int64_t key_head, long k0, long k1) {
        k_.load(p_.k, q_.b, key_head, k0, k1);
        v_.load(p_.v, q_.b, key_head, k0, k1);
        for (int lane = 0, end; lane < q_.width; lane = end) {
            const ScoreTile<T> s{st_, k0, lane};  // every panel in the same memory: it stays in the first-level cache
            const auto panel = in_place_ ? Panel<T>::uniform(q_, lane, k0, k1) : Panel<T>(q_, lane, k0, k1);
            end = panel.end();
            if (panel.fully_masked()) {
                if (in_place_) std::memset(in_place_ + lane * p_.E, 0, sizeof(T) * (std::min(end, q_.count) - lane) * p_.E);
                continue;
            }
            panel.parts([&](const Part& part) { k_.template dots<ToZero>(part, qt_, s); });  // (F1)
            panel.rows([&](const Part& part) { softmax<T>(scores_, s, part, online_); });
            const Part common = panel.part(panel.vectors, lane, panel.common);
            if (in_place_) {
                v_.template combine<ScaledToZero>(common, s, in_place_, invert_sums(lane, end));  // (F5)
                continue;
            }
            bool rescaled = panel.common.empty();
            if (rescaled) v_.template combine<ToScaledC>(panel.part(panel.vectors, lane, {k0, k0}), s, sums_, online_.rescale);
            panel.parts([&](const Part& part) {
                if (rescaled) {
                    v_.template combine<ToC>(part, s, sums_);
                } else {
                    v_.template combine<ToScaledC>(part, s, sums_, online_.rescale);
                    rescaled = true;
                }
            });
        }
    }

    void finish() {
        for (int n = 0; n < q_.width; n += lanes<T>)
            write_statistics<T>(p_, r_, q_.index(p_, n), q_.count - n, load<T>(online_.row_max + n),
                                load<T>(online_.row_sum + n));
        if (!in_place_) {
            const T* factor = invert_sums(0, q_.width);
            write_rows<T>(p_.type, sums_, factor, p_, q_, p_.E, r_.out);
            write_rows<T>(compute_type<T>, sums_, factor, p_, q_, p_.E, r_.wide_out);
        } else if (r_.wide_out || in_place_ == sums_) {
            write_rows<T>(p_.type, in_place_, nullptr, p_, q_, p_.E, r_.out);
        }
    }

    const Problem& p_;
    ForwardResult r_;
    Block<T> q_;
    T *rows_, *qt_, *sums_, *st_;
    OnlineRows<T> online_;
    KeyTile<T> k_, v_;
    Scores<T> scores_;
    std::size_t used_;
    T* in_place_ = nullptr;  // where the products write the rows of out: there, or in sums_
};

// The number of workers that so many floating-point operations keep busy: the minimum parallel work is 0.4 Mflop.
inline int useful_workers(double flops) { return flops < 4e5 ? 1 : static_cast<int>(std::min(flops / 2e5, 4096.0)); }

// A forward pass over all blocks of queries; `flops` for each query and key. `make` gives the pass of one worker its memory.
template <class Pass, class T, class Make>
void run_blocks(const Problem& p, double flops, ParallelCall& parallel, std::size_t bytes, Make make) {
    const RowBlocks blocks(p, block<T>);
    const std::int64_t heads = p.B * p.Hk, tasks = heads * blocks.count;
    const int useful = useful_workers(flops * p.B * p.Hq * p.T * p.S), workers = parallel.workers(tasks, useful);
    const std::size_t each = Scratch::bytes<char>(bytes);
    const Scratch scratch(each * workers);
    std::vector<Pass> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.push_back(make(scratch.data() + each * n));
    parallel.run(
        tasks, useful,
        [&](std::int64_t task, int worker) {
            // Blocks of one head together, for its keys and values to stay in the cache; the longest of a causal mask first.
            const std::int64_t head = task / blocks.count, n = blocks.count - 1 - task % blocks.count;
            passes[worker].run(head / p.Hk, head % p.Hk, blocks.first(n), blocks.length(n), parallel);
        },
        true);
}

template <class T>
void forward(const Problem& p, const ForwardResult& r, ParallelCall& parallel) {
    run_blocks<Forward<T>, T>(p, 2.0 * (p.D + p.E), parallel, Forward<T>::bytes(p),
                              [&](char* memory) { return Forward<T>(p, r, memory); });
}

}  // namespace attngrad::ATTNGRAD_ISA
