// The backward pass: five products per key tile, all from one Omega, in a fixed order of additions.
//
//     p = exp(s - lse) (F4); dv = (p o M)^T dout (R1); dp = (dout v^T) o M (R2); delta (R3); ds = p o (dp - delta) (R4)
//     dbias (R5); dz = ds o m'(z) (R7); dq = scale dz k (R8); dk = scale dz^T q (R9)
//
#pragma once

#include "passes/chunk.hpp"

namespace attngrad::ATTNGRAD_ISA {

// Per row of a block, one number per lane: what the weights are rebuilt from, and delta (R3).
template <class T>
struct RowStatistics {
    T *row_max, *inv_row_sum, *delta;

    static RowStatistics take(Arena& arena) {
        return {arena.take<T>(block<T>), arena.take<T>(block<T>), arena.take<T>(block<T>)};
    }
};

// Score tiles of the same keys, in place: s to p o M, dp to dz; and Omega, where there is a bias (else null).
template <class T>
struct OmegaTiles {
    T *s, *dp, *ds;
    long k0;
    ATTNGRAD_INLINE long index(long k, int lane) const { return (k - k0) * block<T> + lane; }
};

// Omega of a part of NV vectors, from scores (times `factor` where `scaled`) and dp.
template <class T, int NV, bool scaled>
__attribute__((noinline)) void omega_vectors(const Scores<T> scores, const OmegaTiles<T> tiles, const Part& part,
                                             const RowStatistics<T>& rows, T factor) {
    constexpr int W = lanes<T>;
    const int lane = part.lane;
    Vec<T> m[NV], r[NV], d[NV];
    for (int v = 0; v < NV; ++v) {
        m[v] = load<T>(rows.row_max + lane + v * W);
        r[v] = load<T>(rows.inv_row_sum + lane + v * W);
        d[v] = load<T>(rows.delta + lane + v * W);
    }
    each_key(part, scores.paths(true), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        for (int v = 0; v < NV; ++v) {
            const int n = lane + v * W;
            const long at = tiles.index(k, n);
            Vec<T> x = load<T>(tiles.s + at);
            if constexpr (scaled) x = scores.scaled(x, factor);
            Modified<T> y{x};
            Int<T> sees = ~Int<T>{};
            if constexpr (path == Path::biased) y.value = scores.add_bias(x, k, n);
            if constexpr (path == Path::general) y = scores.apply(x, k, n);
            x = y.value;
            if constexpr (modified<path>) sees = x != -std::numeric_limits<T>::infinity();  // by a bias of -inf, too
            if constexpr (path == Path::hidden) sees = scores.sees(k, n);
            x -= m[v];
            if constexpr (modified<path>) x = scores.exponent(x);
            Vec<T> p = exp2<T, modified<path>>(x) * r[v];
            if constexpr (path != Path::clear) p = sees ? p : Vec<T>{};  // even where the row is NaN
            Vec<T> g = load<T>(tiles.dp + at), kept = p;
            if (path == Path::general && scores.drops()) {
                const Vec<T> keep = scores.keep(k, n);
                kept = p * keep;
                g *= keep;
            }
            Vec<T> dz = p * (g - d[v]);  // (R4)
            if constexpr (path != Path::clear) dz = sees ? dz : Vec<T>{};
            if (modified<path> && tiles.ds) store<T>(tiles.ds + at, dz);
            if (path == Path::general && scores.modifies()) dz = sees ? dz * y.slope : Vec<T>{};  // (R7)
            store<T>(tiles.s + at, kept);
            store<T>(tiles.dp + at, dz);
        }
    });
}

template <class T, bool scaled = false>
ATTNGRAD_INLINE void omega(const Scores<T>& scores, const OmegaTiles<T>& tiles, const Part& part, const RowStatistics<T>& rows,
                           T factor = 1) {
    with_vectors<scaled ? 2 : 3>(
        part.vectors, [&]<int NV>() ATTNGRAD_LAMBDA { omega_vectors<T, NV, scaled>(scores, tiles, part, rows, factor); });
}

// The statistics of the rows of a block, and no delta yet. Past its end p = 0.
template <class T>
inline void load_statistics(const Problem& p, const BackwardProblem& g, const Block<T>& q, const RowStatistics<T>& rows) {
    for (int lane = 0; lane < q.width; ++lane) {
        const std::int64_t at = q.index(p, lane);
        const bool past = lane >= q.count;
        rows.row_max[lane] = past ? 0 : static_cast<const T*>(g.row_max)[at];
        rows.inv_row_sum[lane] = past ? 0 : static_cast<const T*>(g.inv_row_sum)[at];
        rows.delta[lane] = 0;
    }
}

// delta of the queries from `lane` on, whose rows of dout are these. What a query that sees nothing holds does not matter.
template <class T>
inline void write_deltas(const Problem& p, const BackwardProblem& g, const Block<T>& q, int lane, VectorOfRows<T> dout,
                         const RowStatistics<T>& rows) {
    const std::int64_t first = q.index(p, lane);
    const auto* dlse = static_cast<const T*>(g.dlse);
    const Vec<T> sums = dots<T>(dout, static_cast<const T*>(g.out) + first * p.E, p.E);
    for (int i = 0; i < dout.count; ++i) {
        const bool fully_masked = rows.inv_row_sum[lane + i] == 0;
        const T x = (fully_masked ? T{0} : sums[i]) - (dlse ? dlse[first + i] : T{0});  // (R3)
        static_cast<T*>(g.delta)[first + i] = x;
        if (!fully_masked) rows.delta[lane + i] = x;
    }
}

template <class T>
class Backward {
    struct Packed {
        Block<T> q;
        T *qt, *dot, *q_copy, *dout_copy, *dq;
        RowStatistics<T> rows;
        const T *qs, *dos;  // the copies, or where the rows lie
        T* in_place;        // where the products write the rows of dq: there, or in dq of this block
        bool complete;      // they have
    };

public:
    using Number = T;
    static constexpr bool one_product = true;  // a key tile of a block adds one product to each sum over queries

    Backward(const Problem& p, const BackwardProblem& g, int blocks, char* memory) : Backward(p, g, blocks, Arena(memory)) {}
    static std::size_t bytes(const Problem& p, const BackwardProblem& g, int blocks) {
        return Backward(p, g, blocks, Arena(nullptr)).used_;
    }
    static long packed_rows(const Problem& p) { return 3 * padded<T>(p.D) + 2 * padded<T>(p.E); }

    Block<T>& queries(int n) { return packed_[n].q; }
    Scores<T>& scores() { return scores_; }
    template <class F>
    void each_key_sum(F f) {
        f(dk_);
        f(dv_);
    }
    template <class F>
    void each_bias_sum(F f) {
        if (g_.dbias) f(dbias_);
    }

    // Everything of a block of queries that the key tiles need, once per chunk.
    void pack(int n) {
        Packed& x = packed_[n];
        load_statistics<T>(p_, g_, x.q, x.rows);
        x.qs = pack_rows<T>(p_.type, p_.q, x.q, p_.D, x.rows.inv_row_sum, Scores<T>::query_factor(p_), rows_, x.qt, x.q_copy,
                            [](int, VectorOfRows<T>) {});
        const auto deltas = [&](int lane, VectorOfRows<T> rows) { write_deltas<T>(p_, g_, x.q, lane, rows, x.rows); };
        x.dos = pack_rows<T>(p_.type, g_.dout, x.q, p_.E, x.rows.inv_row_sum, T{1}, rows_, x.dot, x.dout_copy, deltas);
        x.in_place = x.q.in_one_key_tile(p_) ? rows_as_sums<T>(p_.type, g_.dq, p_, x.q, p_.D, x.dq) : nullptr;
        x.complete = false;
        if (!x.in_place) std::memset(x.dq, 0, sizeof(T) * x.q.count * padded<T>(p_.D));
    }

    void load_keys(const ChunkTask& task, long k0, long k1) {
        k_.load(p_.k, task.b, task.key_head, k0, k1);
        v_.load(p_.v, task.b, task.key_head, k0, k1);
    }

    void process_key_tile(int n, long k0, long k1) {
        Packed& x = packed_[n];
        const OmegaTiles<T> tiles{st_, dt_, g_.dbias ? dbias_.omega() : nullptr, k0};
        const ScoreTile<T> s{st_, k0}, dp{dt_, k0};
        // p o M into s, dz into dp, panel by panel; and dq from dz.
        each_panel<T>(x.q, k0, k1, x.in_place, {tiles.s, tiles.dp, tiles.ds}, seen_,
                      [&](const Panel<T>& panel) ATTNGRAD_LAMBDA {
                          if (x.in_place && panel.fully_masked())
                              std::memset(x.in_place + panel.lane * p_.D, 0,
                                          sizeof(T) * (std::min(panel.end(), x.q.count) - panel.lane) * p_.D);
                          panel.parts([&](const Part& part) {
                              k_.template dots<ToZero>(part, x.qt, s);    // (F1)
                              v_.template dots<ToZero>(part, x.dot, dp);  // (R2)
                              omega<T>(scores_, tiles, part, x.rows);
                              if (!g_.dq) return;
                              if (x.in_place) {
                                  k_.template combine<ScaledToZero>(part, dp, x.in_place, scale_);  // (R8)
                              } else {
                                  k_.template combine<ToC>(part, dp, x.dq);
                              }
                          });
                      });
        x.complete = x.in_place;
        each_key_run<T>(x.q, seen_, k0, k1, [&](const KeyRun& run) {
            dv_.add(run, s, x.dos);  // (R1)
            dk_.add(run, dp, x.qs);  // (R9)
        });
    }

    void finish(int n) {
        const Packed& x = packed_[n];
        if (x.complete && x.in_place != x.dq) return;
        if (x.in_place && !x.complete) std::memset(x.dq, 0, sizeof(T) * x.q.count * padded<T>(p_.D));
        write_rows<T>(p_.type, x.dq, x.complete ? nullptr : scale_, p_, x.q, p_.D, g_.dq);
    }

private:
    Backward(const Problem& p, const BackwardProblem& g, int blocks, Arena arena)
        : p_(p),
          g_(g),
          rows_(arena.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          st_(arena.take<T>(keys<T> * block<T>)),
          dt_(arena.take<T>(keys<T> * block<T>)),
          scale_(arena.fill<T>(block<T>, static_cast<T>(p.scale))),
          k_(p.type, p.D, true, arena),
          v_(p.type, p.E, false, arena),
          dk_(p.type, p.D, g.dk, static_cast<T>(p.scale), arena),
          dv_(p.type, p.E, g.dv, T{1}, arena),
          scores_(p, arena),
          dbias_(g.dbias, g.dbias_alone, scores_.bias_tile(), blocks, arena),
          packed_(arena.take<Packed>(blocks)) {
        const long d = padded<T>(p.D) * block<T>, e = padded<T>(p.E) * block<T>;
        for (int n = 0; n < blocks; ++n) {
            Packed x{};
            for (T** part : {&x.qt, &x.q_copy, &x.dq}) *part = arena.take<T>(d);
            for (T** part : {&x.dot, &x.dout_copy}) *part = arena.take<T>(e);
            x.rows = RowStatistics<T>::take(arena);
            if (rows_) packed_[n] = x;
        }
        used_ = arena.used();
    }

    const Problem& p_;
    BackwardProblem g_;
    T *rows_, *st_, *dt_, *scale_;
    KeyTile<T> k_, v_;
    KeySum<T> dk_, dv_;
    Scores<T> scores_;
    BiasSum<T> dbias_;
    Packed* packed_;
    Span seen_[block<T> / lanes<T>];  // the keys of the key tile that each vector of queries sees
    std::size_t used_ = 0;
};

template <class T>
void backward(const Problem& p, const BackwardProblem& g, ParallelCall& parallel) {
    run_chunks<Backward<T>>(p, g.dbias, 10.0 * p.D, parallel, g);
}

}  // namespace attngrad::ATTNGRAD_ISA
