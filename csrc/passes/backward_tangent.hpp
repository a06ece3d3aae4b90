// The tangent of the backward pass: gradients and their tangents, key tile by key tile from the row statistics.
//
//     delta_dot (H1); dp_dot = (dout_dot v^T + dout v_dot^T) o M (H2)
//     ds_dot = p_dot o (dp - delta) + p o (dp_dot - delta_dot) (H3); dz_dot = ds_dot o m'(z) + ds o m''(z) o z_dot (H4)
//     dq_dot = scale (dz_dot k + dz k_dot) (H5); dk_dot = scale (dz_dot^T q + dz^T q_dot) (H6)
//     dv_dot = (p_dot o M)^T dout + (p o M)^T dout_dot (H7); dbias_dot (H8)
//
// P, dP, dS and their tangents are built once per key tile and serve all products that need them: 15 with every tangent given.
#pragma once

#include "passes/chunk.hpp"

namespace attngrad::ATTNGRAD_ISA {

// RowStatistics, with tangents.
template <class T>
struct RowStatisticsTangent : RowStatistics<T> {
    T *tangent_shift, *tangent_mean, *delta_dot;

    static RowStatisticsTangent take(Arena& arena) {
        return {RowStatistics<T>::take(arena), arena.take<T>(block<T>), arena.take<T>(block<T>), arena.take<T>(block<T>)};
    }
};

// OmegaTiles, with tangents: z_dot becomes p_dot o M, dp_dot becomes dz_dot, and ds_dot receives the tangent of Omega. Without
// a score tangent, p_dot is zero and z_dot null; without a value tangent, dp_dot is not read.
template <class T>
struct OmegaTangentTiles : OmegaTiles<T> {
    T *z_dot, *dp_dot, *ds_dot;
    bool has_score_tangent, has_value_tangent;
};

template <class T, int NV>
__attribute__((noinline)) void omega_tangent_vectors(const Scores<T> scores, const OmegaTangentTiles<T>& tiles,
                                                     const Part& part, const RowStatisticsTangent<T>& rows) {
    constexpr int W = lanes<T>;
    each_key(part, scores.paths(true), [&]<Path path>(long k) ATTNGRAD_LAMBDA {
        for (int v = 0; v < NV; ++v) {
            const int n = part.lane + v * W;
            const long at = tiles.index(k, n);
            Vec<T> x = load<T>(tiles.s + at), z_dot{}, dp = load<T>(tiles.dp + at), dp_dot{}, w{};
            if (tiles.has_score_tangent) z_dot = load<T>(tiles.z_dot + at);
            if (tiles.has_value_tangent) dp_dot = load<T>(tiles.dp_dot + at);
            Modified<T> y{x};
            Int<T> sees = ~Int<T>{};
            if constexpr (path == Path::biased) y.value = scores.add_bias(x, k, n);
            if constexpr (path == Path::general) y = scores.apply(x, k, n);
            x = y.value;
            if constexpr (modified<path>) sees = x != -std::numeric_limits<T>::infinity();  // by a bias of -inf, too
            if constexpr (path == Path::hidden) sees = scores.sees(k, n);
            if (tiles.has_score_tangent) {  // s_dot - lse_dot
                w = modified<path> ? scores.tangent(z_dot, y.slope, k, n) : scores.unmodified_tangent(z_dot);
                w = (w - load<T>(rows.tangent_shift + n)) - load<T>(rows.tangent_mean + n);
            }
            x -= load<T>(rows.row_max + n);
            if constexpr (modified<path>) x = scores.exponent(x);
            Vec<T> p = exp2<T>(x) * load<T>(rows.inv_row_sum + n);  // 0, not 2^low: it may be all that is left of a tangent
            if constexpr (path != Path::clear) p = sees ? p : Vec<T>{};  // even where the row is NaN
            Vec<T> kept = p;
            if (path == Path::general && scores.drops()) {
                const Vec<T> keep = scores.keep(k, n);
                kept = p * keep;
                dp *= keep;
                dp_dot *= keep;
            }
            const Vec<T> e = dp - load<T>(rows.delta + n);
            Vec<T> dz = p * e;                                                     // (R4)
            Vec<T> dz_dot = p * (w * e + (dp_dot - load<T>(rows.delta_dot + n)));  // (H3), p_dot = p o w
            Vec<T> kept_dot = kept * w;
            if constexpr (path != Path::clear) {
                dz = sees ? dz : Vec<T>{};
                dz_dot = sees ? dz_dot : Vec<T>{};
                kept_dot = sees ? kept_dot : Vec<T>{};
            }
            if (modified<path> && tiles.ds) {
                store<T>(tiles.ds + at, dz);
                store<T>(tiles.ds_dot + at, dz_dot);
            }
            if (path == Path::general && scores.modifies()) {
                dz_dot = sees ? dz_dot * y.slope + dz * (y.bend * z_dot) : Vec<T>{};  // (H4)
                dz = sees ? dz * y.slope : Vec<T>{};                                  // (R7)
            }
            store<T>(tiles.s + at, kept);
            store<T>(tiles.dp + at, dz);
            store<T>(tiles.dp_dot + at, dz_dot);
            if (tiles.has_score_tangent) store<T>(tiles.z_dot + at, kept_dot);
        }
    });
}

template <class T>
ATTNGRAD_INLINE void omega_tangent(const Scores<T>& scores, const OmegaTangentTiles<T>& tiles, const Part& part,
                                   const RowStatisticsTangent<T>& rows) {
    with_vectors<3>(part.vectors, [&]<int NV>() ATTNGRAD_LAMBDA { omega_tangent_vectors<T, NV>(scores, tiles, part, rows); });
}

template <class T>
class BackwardTangent {
    struct Packed {
        Block<T> q;
        T *qt, *dot, *q_copy, *dout_copy, *dq;  // as in the backward pass
        const T *qs, *dos;
        T *q_dot_t, *dout_dot_t, *q_dot_copy, *dout_dot_copy, *dq_dot;  // the same of the tangents; null where these are
        const T *q_dots, *dout_dots;
        RowStatisticsTangent<T> rows;
    };

public:
    using Number = T;
    static constexpr bool one_product = false;  // two, with all tangents

    BackwardTangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, int blocks, char* memory)
        : BackwardTangent(p, t, g, blocks, Arena(memory)) {}
    static std::size_t bytes(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, int blocks) {
        return BackwardTangent(p, t, g, blocks, Arena(nullptr)).used_;
    }
    static long packed_rows(const Problem& p) { return 6 * padded<T>(p.D) + 4 * padded<T>(p.E); }

    Block<T>& queries(int n) { return packed_[n].q; }
    Scores<T>& scores() { return scores_; }
    template <class F>
    void each_key_sum(F f) {
        f(dk_);
        f(dv_);
        f(dk_dot_);
        f(dv_dot_);
    }
    template <class F>
    void each_bias_sum(F f) {
        if (!g_.g.dbias) return;
        f(dbias_);
        f(dbias_dot_);
    }

    void pack(int n) {
        Packed& x = packed_[n];
        const BackwardProblem& g = g_.g;
        const auto number = [](const void* array, std::int64_t at) { return array ? static_cast<const T*>(array)[at] : T{0}; };
        for (int lane = 0; lane < x.q.width; ++lane) {
            const std::int64_t at = x.q.index(p_, lane);
            const bool past = lane >= x.q.count;
            x.rows.row_max[lane] = past ? 0 : number(g.row_max, at);
            x.rows.inv_row_sum[lane] = past ? 0 : number(g.inv_row_sum, at);
            const bool fully_masked = past || x.rows.inv_row_sum[lane] == 0;
            x.rows.tangent_shift[lane] = fully_masked ? 0 : number(g_.tangent_shift, at);
            x.rows.tangent_mean[lane] = fully_masked ? 0 : number(g_.tangent_mean, at);
        }
        const T factor = Scores<T>::query_factor(p_), *inv_row_sum = x.rows.inv_row_sum;
        const auto pack = [&](const Rows& from, long length, T times, T* into_lanes, T* copy, auto f) {
            return pack_rows<T>(p_.type, from, x.q, length, inv_row_sum, times, rows_, into_lanes, copy, f);
        };
        const auto nothing = [](int, VectorOfRows<T>) {};
        const auto dots_with = [&](const void* out, int lane, VectorOfRows<T> rows) {
            const T* first = static_cast<const T*>(out) + x.q.index(p_, lane) * p_.E;
            return dots<T>(rows, first, p_.E);
        };
        x.qs = pack(p_.q, p_.D, factor, x.qt, x.q_copy, nothing);
        if (t_.q.data) x.q_dots = pack(t_.q, p_.D, factor, x.q_dot_t, x.q_dot_copy, nothing);
        x.dos = pack(g.dout, p_.E, T{1}, x.dot, x.dout_copy, [&](int lane, VectorOfRows<T> rows) {
            store<T>(x.rows.delta + lane, dots_with(g.out, lane, rows));           // (R3)
            store<T>(x.rows.delta_dot + lane, dots_with(g_.out_dot, lane, rows));  // (H1)
        });
        if (g_.dout_dot.data)
            x.dout_dots = pack(g_.dout_dot, p_.E, T{1}, x.dout_dot_t, x.dout_dot_copy, [&](int lane, VectorOfRows<T> rows) {
                T* to = x.rows.delta_dot + lane;
                store<T>(to, load<T>(to) + dots_with(g.out, lane, rows));
            });
        for (int lane = 0; lane < x.q.count; ++lane) {
            const std::int64_t at = x.q.index(p_, lane);
            T &delta = x.rows.delta[lane], &delta_dot = x.rows.delta_dot[lane];
            delta -= number(g.dlse, at);
            delta_dot -= number(g_.dlse_dot, at);
            static_cast<T*>(g.delta)[at] = delta;
            static_cast<T*>(g_.delta_dot)[at] = delta_dot;
            if (inv_row_sum[lane] == 0) delta = delta_dot = 0;
        }
        for (T* sums : {x.dq, x.dq_dot}) std::memset(sums, 0, sizeof(T) * x.q.count * padded<T>(p_.D));
    }

    void load_keys(const ChunkTask& task, long k0, long k1) {
        k_.load(p_.k, task.b, task.key_head, k0, k1);
        v_.load(p_.v, task.b, task.key_head, k0, k1);
        if (t_.k.data) k_dot_.load(t_.k, task.b, task.key_head, k0, k1);
        if (t_.v.data) v_dot_.load(t_.v, task.b, task.key_head, k0, k1);
    }

    void process_key_tile(int n, long k0, long k1) {
        Packed& x = packed_[n];
        tiles_.k0 = k0;
        const ScoreTile<T> s{tiles_.s, k0}, z_dot{tiles_.z_dot, k0}, dp{tiles_.dp, k0}, dp_dot{tiles_.dp_dot, k0};
        each_panel<T>(x.q, k0, k1, false, {tiles_.s, tiles_.z_dot, tiles_.dp, tiles_.dp_dot, tiles_.ds, tiles_.ds_dot}, seen_,
                      [&](const Panel<T>& panel) ATTNGRAD_LAMBDA {
                          panel.parts([&](const Part& part) ATTNGRAD_LAMBDA {
                              k_.template dots<ToZero>(part, x.qt, s);    // (F1)
                              v_.template dots<ToZero>(part, x.dot, dp);  // (R2)
                              if (tiles_.has_score_tangent)
                                  sum_of_dots<T>(part, t_.q.data ? &k_ : nullptr, x.q_dot_t, t_.k.data ? &k_dot_ : nullptr,
                                                 x.qt,
                                                 z_dot);  // (T1)
                              if (tiles_.has_value_tangent)
                                  sum_of_dots<T>(part, g_.dout_dot.data ? &v_ : nullptr, x.dout_dot_t,
                                                 t_.v.data ? &v_dot_ : nullptr, x.dot, dp_dot);  // (H2)
                              omega_tangent<T>(scores_, tiles_, part, x.rows);
                              k_.template combine<ToC>(part, dp, x.dq);          // (R8)
                              k_.template combine<ToC>(part, dp_dot, x.dq_dot);  // (H5)
                              if (t_.k.data) k_dot_.template combine<ToC>(part, dp, x.dq_dot);
                          });
                      });
        each_key_run<T>(x.q, seen_, k0, k1, [&](const KeyRun& run) {
            dv_.add(run, s, x.dos);                                        // (R1)
            if (tiles_.has_score_tangent) dv_dot_.add(run, z_dot, x.dos);  // (H7)
            if (g_.dout_dot.data) dv_dot_.add(run, s, x.dout_dots);
            dk_.add(run, dp, x.qs);          // (R9)
            dk_dot_.add(run, dp_dot, x.qs);  // (H6)
            if (t_.q.data) dk_dot_.add(run, dp, x.q_dots);
        });
    }

    void finish(int n) {
        const Packed& x = packed_[n];
        write_rows<T>(p_.type, x.dq, scale_, p_, x.q, p_.D, g_.g.dq);
        write_rows<T>(p_.type, x.dq_dot, scale_, p_, x.q, p_.D, g_.dq_dot);
    }

private:
    BackwardTangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, int blocks, Arena arena)
        : p_(p),
          t_(t),
          g_(g),
          rows_(arena.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          scale_(arena.fill<T>(block<T>, static_cast<T>(p.scale))),
          k_(p.type, p.D, true, arena),
          v_(p.type, p.E, false, arena),
          k_dot_(p.type, t.k.data ? p.D : 0, true, arena),
          v_dot_(p.type, t.v.data ? p.E : 0, false, arena),
          dk_(p.type, p.D, g.g.dk, static_cast<T>(p.scale), arena),
          dv_(p.type, p.E, g.g.dv, T{1}, arena),
          dk_dot_(p.type, p.D, g.dk_dot, static_cast<T>(p.scale), arena),
          dv_dot_(p.type, p.E, g.dv_dot, T{1}, arena),
          scores_(p, arena, t.bias),
          tiles_(tiles(arena)),
          dbias_(g.g.dbias, g.g.dbias_alone, tiles_.ds, blocks, arena),
          dbias_dot_(g.dbias_dot, g.g.dbias_alone, tiles_.ds_dot, blocks, arena),
          packed_(arena.take<Packed>(blocks)) {
        const long d = padded<T>(p.D) * block<T>, e = padded<T>(p.E) * block<T>;
        for (int n = 0; n < blocks; ++n) {
            Packed x{};
            for (T** part : {&x.qt, &x.q_copy, &x.dq, &x.dq_dot}) *part = arena.take<T>(d);
            for (T** part : {&x.dot, &x.dout_copy}) *part = arena.take<T>(e);
            for (T** part : {&x.q_dot_t, &x.q_dot_copy}) *part = t.q.data ? arena.take<T>(d) : nullptr;
            for (T** part : {&x.dout_dot_t, &x.dout_dot_copy}) *part = g.dout_dot.data ? arena.take<T>(e) : nullptr;
            x.rows = RowStatisticsTangent<T>::take(arena);
            if (rows_) packed_[n] = x;
        }
        used_ = arena.used();
    }

    OmegaTangentTiles<T> tiles(Arena& arena) const {
        const auto tile = [&](bool needed) { return needed ? arena.take<T>(keys<T> * block<T>) : nullptr; };
        const bool has_score_tangent = t_.scores();
        OmegaTangentTiles<T> x{};
        x.s = tile(true);
        x.dp = tile(true);
        x.dp_dot = tile(true);
        x.z_dot = tile(has_score_tangent);
        x.ds = g_.g.dbias ? scores_.bias_tile() : nullptr;
        x.ds_dot = tile(static_cast<bool>(g_.g.dbias));
        x.has_score_tangent = has_score_tangent;
        x.has_value_tangent = t_.v.data || g_.dout_dot.data;
        return x;
    }

    const Problem& p_;
    const Tangents& t_;
    BackwardTangentProblem g_;
    T *rows_, *scale_;
    KeyTile<T> k_, v_, k_dot_, v_dot_;
    KeySum<T> dk_, dv_, dk_dot_, dv_dot_;
    Scores<T> scores_;
    OmegaTangentTiles<T> tiles_;
    BiasSum<T> dbias_, dbias_dot_;
    Packed* packed_;
    Span seen_[block<T> / lanes<T>];
    std::size_t used_ = 0;
};

template <class T>
void backward_tangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, ParallelCall& parallel) {
    run_chunks<BackwardTangent<T>>(p, g.g.dbias, 30.0 * p.D, parallel, t, g);
}

}  // namespace attngrad::ATTNGRAD_ISA
