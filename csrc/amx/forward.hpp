// The forward pass of 16-bit numbers on matrix tiles: forward.hpp with other products. Sums are kept transposed, like scores;
// and a tile of keys meets several blocks of queries, so that its parts are made once for all of them.
#pragma once

#include "amx/matrix.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class S>
class MatrixForward {
    struct Running {
        Block<float> q;
        Parts queries;  // B of F1
        float *sums, *top, *sum;
    };

public:
    static constexpr int most = 8;  // blocks at once

    MatrixForward(const Problem& p, const ForwardResult& r, int blocks, char* memory)
        : MatrixForward(p, r, blocks, Cutter(memory)) {}

    static std::size_t bytes(const Problem& p, int blocks) { return MatrixForward(p, {}, blocks, Cutter(nullptr)).used_; }

    // Blocks first .. last of a key head.
    void run(const RowBlocks& rows, std::int64_t b, std::int64_t key_head, std::int64_t first, std::int64_t last,
             const Team& team) {
        const TileRegisters registers;
        const int blocks = static_cast<int>(last - first);
        Span seen{p_.S, 0};
        for (int n = 0; n < blocks; ++n) {
            Running& x = running_[n];
            x.q.set(p_, b, key_head, rows.first(first + n), rows.length(first + n));
            start(x);
            const Span own = x.q.all.outer;
            if (!own.empty()) seen = {std::min(seen.a, own.a), std::max(seen.b, own.b)};
        }
        for (long k0 = seen.a / K * K; k0 < seen.b && !team.cancelled(); k0 += K) {
            bool loaded = false;
            const long k1 = std::min<long>(k0 + K, seen.b);
            for (int n = 0; n < blocks; ++n) {
                Running& x = running_[n];
                if (x.q.all.outer.cut(k0, k1).empty() || !scores_.prepare(x.q, k0, k1)) continue;
                if (!loaded) load_keys(b, key_head, k0, k1);
                loaded = true;
                tile(x, k0, k1);
            }
        }
        for (int n = 0; n < blocks; ++n) finish(running_[n]);
    }

private:
    MatrixForward(const Problem& p, const ForwardResult& r, int blocks, Cutter cut)
        : p_(p),
          r_(r),
          rows_(Parts::take(parts_of<S>, Q, up(p.D, 32), cut)),
          k_(Parts::take(parts_of<S>, K, up(p.D, 32), cut)),
          v_(Parts::take(parts_of<S>, K, up(p.E, W), cut)),
          values_(Parts::take(parts_of<S>, up(p.E, W), K, cut)),
          weights_(Parts::take(2, K / 2, 2 * G, cut)),
          st_(cut.take<float>(K * Q)),
          shrink_(cut.take<float>(Q)),
          scores_(p, cut),
          running_(cut.take<Running>(blocks)) {
        for (int n = 0; n < blocks; ++n) {
            Running x{};
            x.queries = Parts::take(parts_of<S>, up(p.D, 32) / 2, 2 * Q, cut);
            x.sums = cut.take<float>(up(p.E, W) * Q);
            for (float** part : {&x.top, &x.sum}) *part = cut.take<float>(Q);
            if (rows_.part[0]) running_[n] = x;
        }
        used_ = cut.used();
    }

    void start(Running& x) {
        split_rows<S>(p_.q, x.q, p_.D, rows_, [](int) { return false; });
        pairs_of_features(rows_, x.q.width, p_.D, x.queries);
        for (int n = 0; n < x.q.width; ++n) {
            x.top[n] = p_.sinks ? Scores<float>::sink(p_, x.q.head[n]) : -std::numeric_limits<float>::infinity();
            x.sum[n] = x.top[n] == -std::numeric_limits<float>::infinity() ? 0 : 1;
        }
        std::memset(x.sums, 0, sizeof(float) * up(p_.E, W) * Q);
    }

    void load_keys(std::int64_t b, std::int64_t key_head, long k0, long k1) {
        split_keys<S>(p_.k, b, key_head, p_.D, k0, k1, k_);
        split_keys<S>(p_.v, b, key_head, p_.E, k0, k1, v_);
        transposed(v_, k1 - k0, up(p_.E, W), values_);
    }

    void tile(Running& x, long k0, long k1) {
        const float factor = Scores<float>::query_factor(p_);
        for (int lane = 0; lane < x.q.width; lane += G) {
            const Group g(x.q, lane, k0, k1);
            if (g.seen.empty()) continue;
            tile_dots(g, k_, x.queries, up(p_.D, 32), k0, st_);
            const Panel<float> panel(x.q, lane, k0, k1, G);
            const auto weights = [&](auto* softmax, int at, Span span) {
                softmax(scores_, st_ + (at - lane), k0, span, panel.inner, at, x.top + at, x.sum + at, shrink_ + at, factor);
            };
            if (panel.whole) {
                weights(panel.vectors == 2 ? softmax<float, 2, true> : softmax<float, 1, true>, lane, panel.common);
            } else {
                for (int n = 0; n < panel.vectors; ++n) weights(softmax<float, 1, true>, lane + n * W, panel.own[n]);
            }
            clear_unseen(x.q, lane, lane + g.width, k0, k1, st_ - lane);
            pack_weights<true, false>(g.width, st_, k1 - k0, weights_, {});
            rescale(x, g);
            multiply<true, true>(up(p_.E, W), g.width, up(k1 - k0, 32), values_, weights_, x.sums + lane, Q);
        }
    }

    void rescale(Running& x, const Group& g) {
        for (int lane = g.lane; lane < g.lane + g.width; lane += W) {
            const Vec<float> shrink = load<float>(shrink_ + lane), one = broadcast<float>(1);
            if (std::memcmp(&shrink, &one, sizeof one) == 0) continue;
            for (long e = 0; e < up(p_.E, W); ++e) {
                float* at = x.sums + e * Q + lane;
                store<float>(at, load<float>(at) * shrink);
            }
        }
    }

    void finish(const Running& x) {
        float* inverse = shrink_;  // of no other use any more
        for (int n = 0; n < x.q.width; n += W) {
            const Vec<float> sum = load<float>(x.sum + n);
            write_statistics<float>(p_, r_, x.q.index(p_, n), x.q.count - n, load<float>(x.top + n), sum);
            store<float>(inverse + n, sum == 0 ? Vec<float>{} : 1 / sum);
        }
        write_transposed<S>(x.sums, inverse, p_, x.q, p_.E, static_cast<S*>(r_.out), static_cast<float*>(r_.wide_out));
    }

    const Problem& p_;
    ForwardResult r_;
    Parts rows_, k_, v_, values_, weights_;
    float *st_, *shrink_;
    Scores<float> scores_;
    Running* running_;
    std::size_t used_ = 0;
};

template <class S>
void matrix_forward(const Problem& p, const ForwardResult& r, Team& team) {
    const RowBlocks rows(p, Q);
    const std::int64_t heads = p.B * p.Hk, blocks = heads * rows.count;
    const int worth = worth_waking((p.D + p.E) / 2.0 * p.B * p.Hq * p.T * p.S);
    // Many blocks at once, but several tasks for each worker.
    const std::int64_t share = blocks / (4 * team.workers(blocks, worth));
    const int capacity = static_cast<int>(std::clamp<std::int64_t>(std::min(share, rows.count), 1, MatrixForward<S>::most));
    const std::int64_t chunks = (rows.count + capacity - 1) / capacity, tasks = heads * chunks;
    const int workers = team.workers(tasks, worth);
    const std::size_t each = Scratch::bytes<char>(MatrixForward<S>::bytes(p, capacity));
    const Scratch scratch(each * workers);
    std::vector<MatrixForward<S>> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.emplace_back(p, r, capacity, scratch.data() + each * n);
    team.run(
        tasks, worth,
        [&](std::int64_t task, int worker) {
            // As in run_blocks: chunks of one head together, the longest of a causal mask first.
            const std::int64_t head = task / chunks, first = (chunks - 1 - task % chunks) * capacity;
            passes[worker].run(rows, head / p.Hk, head % p.Hk, first, std::min(first + capacity, rows.count), team);
        },
        true);
}

}  // namespace attngrad::ATTNGRAD_ISA
