// The backward pass: five products a tile, all from one Omega, in a fixed order of additions.
//
//     p = exp(s - lse) (F4); dv = (p o M)^T dout (R1); dp = (dout v^T) o M (R2); delta (R3); ds = p o (dp - delta) (R4)
//     dbias (R5); dz = ds o m'(z) (R7); dq = scale dz k (R8); dk = scale dz^T q (R9)
//
#pragma once

#include "passes/chunk.hpp"

namespace attngrad::ATTNGRAD_ISA {

// Omega of NV vectors: from scores (times `factor` where `scaled`) and dp, in place, to p o M (in s) and dz (in dp). `ds`
// receives Omega where wanted.
template <class T, int NV, bool scaled = false>
__attribute__((noinline)) void omega(const Scores<T> scores, T* s, T* dp, T* ds, long k0, Span keys, Span inner, int lane,
                                     const T* top, const T* inverse, const T* delta, T factor) {
    constexpr int W = lanes<T>;
    Vec<T> m[NV], r[NV], d[NV];
    for (int v = 0; v < NV; ++v) {
        m[v] = load<T>(top + v * W);
        r[v] = load<T>(inverse + v * W);
        d[v] = load<T>(delta + v * W);
    }
    each_key(keys, inner, scores.paths(true), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        const long at = (k - k0) * block<T>;
        for (int v = 0; v < NV; ++v) {
            const int n = v * W;
            Vec<T> x = load<T>(s + at + n);
            if constexpr (scaled) x = scores.scaled(x, factor);
            Modified<T> y{x};
            Int<T> sees = ~Int<T>{};
            if constexpr (path == Path::biased) y.value = scores.add_bias(x, k, lane + n);
            if constexpr (path == Path::general) y = scores.apply(x, k, lane + n);
            x = y.value;
            if constexpr (modified<path>) sees = x != -std::numeric_limits<T>::infinity();  // by a bias of -inf, too
            if constexpr (path == Path::hidden) sees = scores.sees(k, lane + n);
            x -= m[v];
            if constexpr (modified<path>) x = scores.exponent(x);
            Vec<T> p = exp2<T, modified<path>>(x) * r[v];
            if constexpr (path != Path::clear) p = sees ? p : Vec<T>{};  // even where the row is NaN
            Vec<T> g = load<T>(dp + at + n), kept = p;
            if (path == Path::general && scores.drops()) {
                const Vec<T> keep = scores.keep(k, lane + n);
                kept = p * keep;
                g *= keep;
            }
            Vec<T> dz = p * (g - d[v]);
            if constexpr (path != Path::clear) dz = sees ? dz : Vec<T>{};
            if (modified<path> && ds) store<T>(ds + at + n, dz);
            if (path == Path::general && scores.modifies()) dz = sees ? dz * y.slope : Vec<T>{};
            store<T>(s + at + n, kept);
            store<T>(dp + at + n, dz);
        }
    });
}

// The statistics of the rows of a block, and no delta yet. Past its end p = 0.
template <class T>
inline void load_statistics(const Problem& p, const BackwardProblem& g, const Block<T>& q, T* top, T* inverse, T* delta) {
    for (int lane = 0; lane < q.width; ++lane) {
        const std::int64_t at = q.index(p, lane);
        const bool past = lane >= q.count;
        top[lane] = past ? 0 : static_cast<const T*>(g.top)[at];
        inverse[lane] = past ? 0 : static_cast<const T*>(g.inverse)[at];
        delta[lane] = 0;
    }
}

// delta of the queries from `lane` on, whose rows of dout are these. What a query that sees nothing holds does not matter.
template <class T>
inline void write_deltas(const Problem& p, const BackwardProblem& g, const Block<T>& q, int lane, VectorOfRows<T> dout,
                         const T* inverse, T* delta) {
    const std::int64_t first = q.index(p, lane);
    const auto* dlse = static_cast<const T*>(g.dlse);
    const Vec<T> sums = dots<T>(dout, static_cast<const T*>(g.out) + first * p.E, p.E);
    for (int i = 0; i < dout.count; ++i) {
        const bool blind = inverse[lane + i] == 0;
        const T x = (blind ? T{0} : sums[i]) - (dlse ? dlse[first + i] : T{0});  // (R3)
        static_cast<T*>(g.delta)[first + i] = x;
        if (!blind) delta[lane + i] = x;
    }
}

template <class T>
class Backward {
    struct Packed {
        Block<T> q;
        T *qt, *dot, *q_copy, *dout_copy, *dq, *top, *inverse, *delta;
        const T *qs, *dos;  // the copies, or where the rows lie
        T* in_place;        // the rows of dq, where the products write them
        bool complete;      // they have
    };

public:
    using Number = T;
    static constexpr bool one_product = true;  // a tile of a block adds one product to each sum over queries

    Backward(const Problem& p, const BackwardProblem& g, int blocks, char* memory) : Backward(p, g, blocks, Cutter(memory)) {}
    static std::size_t bytes(const Problem& p, const BackwardProblem& g, int blocks) {
        return Backward(p, g, blocks, Cutter(nullptr)).used_;
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

    // Everything of a block of queries that the tiles need, once a chunk.
    void pack(int n) {
        Packed& x = packed_[n];
        load_statistics<T>(p_, g_, x.q, x.top, x.inverse, x.delta);
        x.qs = pack_rows<T>(p_.type, p_.q, x.q, p_.D, x.inverse, Scores<T>::query_factor(p_), rows_, x.qt, x.q_copy,
                            [](int, VectorOfRows<T>) {});
        const auto deltas = [&](int lane, VectorOfRows<T> rows) {
            write_deltas<T>(p_, g_, x.q, lane, rows, x.inverse, x.delta);
        };
        x.dos = pack_rows<T>(p_.type, g_.dout, x.q, p_.E, x.inverse, T{1}, rows_, x.dot, x.dout_copy, deltas);
        x.in_place = g_.dq && x.q.in_one_tile(p_) ? rows_as_sums<T>(p_.type, g_.dq, p_, x.q, p_.D) : nullptr;
        x.complete = false;
        if (!x.in_place) std::memset(x.dq, 0, sizeof(T) * x.q.count * padded<T>(p_.D));
    }

    void load_keys(const ChunkTask& task, long k0, long k1) {
        k_.load(p_.k, task.b, task.key_head, k0, k1);
        v_.load(p_.v, task.b, task.key_head, k0, k1);
    }

    void tile(int n, long k0, long k1) {
        Packed& x = packed_[n];
        T* ds = g_.dbias ? dbias_.tile() : nullptr;
        // p o M into st_, dz into dt_, panel by panel; and dq from dz.
        each_panel<T>(x.q, k0, k1, x.in_place, {st_, dt_, ds}, seen_, [&](const Panel<T>& panel) ATTNGRAD_LAMBDA {
            if (x.in_place && panel.blind())
                std::memset(x.in_place + panel.lane * p_.D, 0,
                            sizeof(T) * (std::min(panel.end(), x.q.count) - panel.lane) * p_.D);
            panel.parts([&](int vectors, int at, Span span) {
                const long row = (span.a - k0) * block<T> + at;
                k_.template dots<ToZero>(vectors, span, x.qt + at, st_ + row);   // (F1)
                v_.template dots<ToZero>(vectors, span, x.dot + at, dt_ + row);  // (R2)
                auto* fill = vectors == 3 ? omega<T, 3> : vectors == 2 ? omega<T, 2> : omega<T, 1>;
                fill(scores_, st_ + at, dt_ + at, ds ? ds + at : nullptr, k0, span, panel.inner, at, x.top + at, x.inverse + at,
                     x.delta + at, T{1});
                const int count = std::min(vectors * lanes<T>, x.q.count - at);
                if (!g_.dq) return;
                if (x.in_place) {
                    k_.template combine<ScaledToZero>(count, span, dt_ + row, x.in_place + at * p_.D, scale_);  // (R8)
                } else {
                    k_.template combine<ToC>(count, span, dt_ + row, x.dq + at * padded<T>(p_.D));
                }
            });
        });
        x.complete = x.in_place;
        each_key_run<T>(x.q, seen_, k0, k1, [&](long row, long rows, int q0, int q1) {
            dv_.add(st_ + row * block<T>, x.dos, q0, q1, row, rows);  // (R1)
            dk_.add(dt_ + row * block<T>, x.qs, q0, q1, row, rows);   // (R9)
        });
    }

    void finish(int n) {
        const Packed& x = packed_[n];
        if (x.complete || !g_.dq) return;
        if (x.in_place) std::memset(x.dq, 0, sizeof(T) * x.q.count * padded<T>(p_.D));
        write_rows<T>(x.dq, scale_, p_, x.q, p_.D, g_.dq, nullptr);
    }

private:
    Backward(const Problem& p, const BackwardProblem& g, int blocks, Cutter cut)
        : p_(p),
          g_(g),
          rows_(cut.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          st_(cut.take<T>(keys<T> * block<T>)),
          dt_(cut.take<T>(keys<T> * block<T>)),
          scale_(cut.fill<T>(block<T>, static_cast<T>(p.scale))),
          k_(p.type, p.D, true, cut),
          v_(p.type, p.E, false, cut),
          dk_(p.type, p.D, g.dk, static_cast<T>(p.scale), cut),
          dv_(p.type, p.E, g.dv, T{1}, cut),
          scores_(p, cut),
          dbias_(g.dbias, g.dbias_alone, scores_.bias_tile(), blocks, cut),
          packed_(cut.take<Packed>(blocks)) {
        const long d = padded<T>(p.D) * block<T>, e = padded<T>(p.E) * block<T>;
        for (int n = 0; n < blocks; ++n) {
            Packed x{};
            for (T** part : {&x.qt, &x.q_copy, &x.dq}) *part = cut.take<T>(d);
            for (T** part : {&x.dot, &x.dout_copy}) *part = cut.take<T>(e);
            for (T** part : {&x.top, &x.inverse, &x.delta}) *part = cut.take<T>(block<T>);
            if (rows_) packed_[n] = x;
        }
        used_ = cut.used();
    }

    const Problem& p_;
    BackwardProblem g_;
    T *rows_, *st_, *dt_, *scale_;
    KeyTile<T> k_, v_;
    KeySum<T> dk_, dv_;
    Scores<T> scores_;
    BiasSum<T> dbias_;
    Packed* packed_;
    Span seen_[block<T> / lanes<T>];  // the keys of the tile that each vector of queries sees
    std::size_t used_ = 0;
};

template <class T>
void backward(const Problem& p, const BackwardProblem& g, Team& team) {
    run_chunks<Backward<T>>(p, g.dbias, 10.0 * p.D, team, g);
}

}  // namespace attngrad::ATTNGRAD_ISA
