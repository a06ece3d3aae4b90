// The backward pass of 16-bit numbers on AMX tiles: passes/backward.hpp with other products. dq is summed transposed, like
// scores.
#pragma once

#include "amx/matrix.hpp"
#include "passes/backward.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class S>
class MatrixBackward {
    struct Packed {
        Block<float> q;
        Parts q_features, dout_features, q_rows, dout_rows;  // B of F1, R2, R9, R1
        float* dq;
        RowStatistics<float> rows;
    };

public:
    using Number = float;
    static constexpr bool one_product = false;  // sums over queries are added to, step by step over the keys

    MatrixBackward(const Problem& p, const BackwardProblem& g, int blocks, char* memory)
        : MatrixBackward(p, g, blocks, Arena(memory)) {}
    static std::size_t bytes(const Problem& p, const BackwardProblem& g, int blocks) {
        return MatrixBackward(p, g, blocks, Arena(nullptr)).used_;
    }
    static long packed_rows(const Problem& p) { return p.D + parts_of<S> * (p.D + p.E); }

    Block<float>& queries(int n) { return packed_[n].q; }
    Scores<float>& scores() { return scores_; }
    template <class F>
    void each_key_sum(F f) {
        f(dk_);
        f(dv_);
    }
    template <class F>
    void each_bias_sum(F f) {
        if (g_.dbias) f(dbias_);
    }

    void pack(int n) {
        Packed& x = packed_[n];
        load_statistics<float>(p_, g_, x.q, x.rows);
        // A query that sees nothing is as good as zero, whatever it holds.
        const auto fully_masked = [&](int lane) { return x.rows.inv_row_sum[lane] == 0; };
        std::memset(dout_rows_, 0, sizeof(float) * W * padded<float>(p_.E));
        for (int lane = 0; lane < x.q.count; lane += W) {
            VectorOfRows<float> rows{dout_rows_, padded<float>(p_.E), std::min(W, x.q.count - lane)};
            if (g_.dout.data) rows = gather_rows<float>(p_.type, g_.dout, x.q, lane, p_.E, dout_rows_);
            write_deltas<float>(p_, g_, x.q, lane, rows, x.rows);
        }
        split_rows<S>(p_.q, x.q, p_.D, q_, fully_masked);
        pairs_of_features(q_, x.q.width, p_.D, x.q_features);
        pairs_of_rows(q_, x.q.width, x.q_rows);
        split_rows<S>(g_.dout, x.q, p_.E, dout_, fully_masked);
        pairs_of_features(dout_, x.q.width, p_.E, x.dout_features);
        pairs_of_rows(dout_, x.q.width, x.dout_rows);
        std::memset(x.dq, 0, sizeof(float) * up(p_.D, W) * Q);
    }

    void load_keys(const ChunkTask& task, long k0, long k1) {
        split_keys<S>(p_.k, task.b, task.key_head, p_.D, k0, k1, k_);
        split_keys<S>(p_.v, task.b, task.key_head, p_.E, k0, k1, v_);
        if (g_.dq) transposed(k_, k1 - k0, up(p_.D, W), keys_);
    }

    void process_key_tile(int n, long k0, long k1) {
        const AmxTiles configured;
        Packed& x = packed_[n];
        const ScoreTile<float> ds{g_.dbias ? dbias_.omega() : nullptr, k0};
        float *dk = dk_.sums(), *dv = dv_.sums();
        const float factor = Scores<float>::query_factor(p_);
        const long D = up(p_.D, W), E = up(p_.E, W);
        if (ds) clear_unseen(x.q, 0, x.q.width, k1, ds);
        // Many AMX products at once, since the unit takes long to start; on as much memory as the near caches hold.
        const Span seen = x.q.all.outer.clipped(k0, k1);
        const long first = (seen.a - k0) / R * R;
        long at = first;
        for (; at < seen.b - k0; at += R) {
            const long a = k0 + at, b = std::min(a + R, k1);
            const ScoreTile<float> s{st_, a}, dp{dt_, a};
            const OmegaTiles<float> tiles{st_, dt_, ds ? ds.at(a, 0) : nullptr, a};
            for (int lane = 0; lane < x.q.width; lane += G) {
                const Group g(x.q, lane, a, b);
                if (g.seen.empty()) continue;
                amx_dots(g, k_.at(at, 0), x.q_features, up(p_.D, 32), s);      // (F1)
                amx_dots(g, v_.at(at, 0), x.dout_features, up(p_.E, 32), dp);  // (R2)
            }
            for (int lane = 0, end; lane < x.q.width; lane = end) {
                const Panel<float> panel(x.q, lane, a, b, G);
                end = panel.end();
                panel.parts([&](const Part& part) { omega<float, true>(scores_, tiles, part, x.rows, factor); });
                for (const auto& tile : {s, dp}) clear_unseen(x.q, lane, end, b, tile);
                pack_weights<false, true>(end - lane, s.at(a, lane), b - a, {}, p_rows_.at(0, lane));
                pack_weights<true, true>(end - lane, dp.at(a, lane), b - a, dz_pairs_.at(at / 2, 2 * lane),
                                         dz_rows_.at(0, lane));
            }
            const auto add_to = [&](float* sums, const Parts& weights, const Parts& queries, long columns) {
                if (!sums) return;
                multiply<true, false>(up(b - a, 16), columns, up(x.q.width, 32), weights, queries, sums + at * columns,
                                      columns);
            };
            add_to(dv, p_rows_, x.dout_rows, E);  // (R1)
            add_to(dk, dz_rows_, x.q_rows, D);    // (R9)
        }
        if (!g_.dq) return;
        multiply<true, false>(D, x.q.width, up(std::min(at, k1 - k0) - first, 32), keys_.at(0, first),
                              dz_pairs_.at(first / 2, 0), x.dq, Q);  // (R8)
    }

    void finish(int n) {
        const Packed& x = packed_[n];
        if (g_.dq) write_transposed<S>(x.dq, scale_, p_, x.q, p_.D, g_.dq, nullptr);
    }

private:
    MatrixBackward(const Problem& p, const BackwardProblem& g, int blocks, Arena arena)
        : p_(p),
          g_(g),
          q_(Parts::take(parts_of<S>, Q, up(p.D, 32), arena)),
          dout_(Parts::take(parts_of<S>, Q, up(p.E, 32), arena)),
          k_(Parts::take(parts_of<S>, K, up(p.D, 32), arena)),
          v_(Parts::take(parts_of<S>, K, up(p.E, 32), arena)),
          keys_(Parts::take(parts_of<S>, up(p.D, W), K, arena)),
          dz_pairs_(Parts::take(2, K / 2, 2 * Q, arena)),
          p_rows_(Parts::take(2, R, Q, arena)),
          dz_rows_(Parts::take(2, R, Q, arena)),
          dout_rows_(arena.take<float>(W * padded<float>(p.E))),
          st_(arena.take<float>(R * Q)),
          dt_(arena.take<float>(R * Q)),
          scale_(arena.fill<float>(Q, static_cast<float>(p.scale))),
          dk_(p.type, p.D, g.dk, static_cast<float>(p.scale), arena),
          dv_(p.type, p.E, g.dv, 1.0f, arena),
          scores_(p, arena),
          dbias_(g.dbias, g.dbias_alone, scores_.bias_tile(), blocks, arena),
          packed_(arena.take<Packed>(blocks)) {
        for (int n = 0; n < blocks; ++n) {
            Packed x{};
            x.q_features = Parts::take(parts_of<S>, up(p.D, 32) / 2, 2 * Q, arena);
            x.dout_features = Parts::take(parts_of<S>, up(p.E, 32) / 2, 2 * Q, arena);
            x.q_rows = Parts::take(parts_of<S>, Q / 2, 2 * up(p.D, W), arena);
            x.dout_rows = Parts::take(parts_of<S>, Q / 2, 2 * up(p.E, W), arena);
            x.dq = arena.take<float>(up(p.D, W) * Q);
            x.rows = RowStatistics<float>::take(arena);
            if (q_.part[0]) packed_[n] = x;
        }
        used_ = arena.used();
    }

    const Problem& p_;
    BackwardProblem g_;
    Parts q_, dout_, k_, v_, keys_, dz_pairs_, p_rows_, dz_rows_;
    float *dout_rows_, *st_, *dt_, *scale_;
    KeySum<float> dk_, dv_;
    Scores<float> scores_;
    BiasSum<float> dbias_;
    Packed* packed_;
    std::size_t used_ = 0;
};

template <class S>
void matrix_backward(const Problem& p, const BackwardProblem& g, ParallelCall& parallel) {
    run_chunks<MatrixBackward<S>>(p, g.dbias, 2.0 * p.D, parallel, g);
}

}  // namespace attngrad::ATTNGRAD_ISA
