// The forward pass of 16-bit numbers on AMX tiles: passes/forward.hpp with other products. Sums are kept transposed, like
// scores; and a key tile meets several blocks of queries, so that its parts are made once for all of them.
#pragma once

#include "amx/matrix.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class S>
class MatrixForward {
    struct Running {
        Block<float> q;
        Parts queries;  // B of F1
        float* sums;
        OnlineRows<float> online;
    };

public:
    static constexpr int most = 8;  // blocks at once

    MatrixForward(const Problem& p, const ForwardResult& r, int blocks, char* memory)
        : MatrixForward(p, r, blocks, Arena(memory)) {}

    static std::size_t bytes(const Problem& p, int blocks) { return MatrixForward(p, {}, blocks, Arena(nullptr)).used_; }

    // Blocks first .. last of a key head.
    void run(const RowBlocks& rows, std::int64_t b, std::int64_t key_head, std::int64_t first, std::int64_t last,
             const ParallelCall& parallel) {
        const AmxTiles configured;
        const int blocks = static_cast<int>(last - first);
        Span seen{p_.S, 0};
        for (int n = 0; n < blocks; ++n) {
            Running& x = running_[n];
            x.q.set(p_, b, key_head, rows.first(first + n), rows.length(first + n));
            start(x);
            const Span own = x.q.all.outer;
            if (!own.empty()) seen = {std::min(seen.a, own.a), std::max(seen.b, own.b)};
        }
        for (long k0 = seen.a / K * K; k0 < seen.b && !parallel.cancelled(); k0 += K) {
            bool loaded = false;
            const long k1 = std::min<long>(k0 + K, seen.b);
            for (int n = 0; n < blocks; ++n) {
                Running& x = running_[n];
                if (x.q.all.outer.clipped(k0, k1).empty() || !scores_.prepare(x.q, k0, k1)) continue;
                if (!loaded) load_keys(b, key_head, k0, k1);
                loaded = true;
                process_key_tile(x, k0, k1);
            }
        }
        for (int n = 0; n < blocks; ++n) finish(running_[n]);
    }

private:
    MatrixForward(const Problem& p, const ForwardResult& r, int blocks, Arena arena)
        : p_(p),
          r_(r),
          rows_(Parts::take(parts_of<S>, Q, up(p.D, 32), arena)),
          k_(Parts::take(parts_of<S>, K, up(p.D, 32), arena)),
          v_(Parts::take(parts_of<S>, K, up(p.E, W), arena)),
          values_(Parts::take(parts_of<S>, up(p.E, W), K, arena)),
          weights_(Parts::take(2, K / 2, 2 * G, arena)),
          st_(arena.take<float>(K * Q)),
          scores_(p, arena),
          running_(arena.take<Running>(blocks)) {
        for (int n = 0; n < blocks; ++n) {
            Running x{};
            x.queries = Parts::take(parts_of<S>, up(p.D, 32) / 2, 2 * Q, arena);
            x.sums = arena.take<float>(up(p.E, W) * Q);
            x.online = OnlineRows<float>::take(arena);
            if (rows_.part[0]) running_[n] = x;
        }
        used_ = arena.used();
    }

    void start(Running& x) {
        split_rows<S>(p_.q, x.q, p_.D, rows_, [](int) { return false; });
        pairs_of_features(rows_, x.q.width, p_.D, x.queries);
        for (int n = 0; n < x.q.width; ++n) x.online.start(n, Scores<float>::sink(p_, x.q.head[n]));
        std::memset(x.sums, 0, sizeof(float) * up(p_.E, W) * Q);
    }

    void load_keys(std::int64_t b, std::int64_t key_head, long k0, long k1) {
        split_keys<S>(p_.k, b, key_head, p_.D, k0, k1, k_);
        split_keys<S>(p_.v, b, key_head, p_.E, k0, k1, v_);
        transposed(v_, k1 - k0, up(p_.E, W), values_);
    }

    void process_key_tile(Running& x, long k0, long k1) {
        const float factor = Scores<float>::query_factor(p_);
        for (int lane = 0; lane < x.q.width; lane += G) {
            const Group g(x.q, lane, k0, k1);
            if (g.seen.empty()) continue;
            const ScoreTile<float> s{st_ - lane, k0};     // the groups share its memory
            amx_dots(g, k_, x.queries, up(p_.D, 32), s);  // (F1)
            Panel<float>(x.q, lane, k0, k1, G).rows([&](const Part& part) {
                softmax<float, true>(scores_, s, part, x.online, factor);
            });
            clear_unseen(x.q, lane, lane + g.width, k1, s);
            pack_weights<true, false>(g.width, st_, k1 - k0, weights_, {});
            rescale(x, g);
            multiply<true, true>(up(p_.E, W), g.width, up(k1 - k0, 32), values_, weights_, x.sums + lane, Q);
        }
    }

    void rescale(Running& x, const Group& g) {
        for (int lane = g.lane; lane < g.lane + g.width; lane += W) {
            const Vec<float> factor = load<float>(x.online.rescale + lane), one = broadcast<float>(1);
            if (std::memcmp(&factor, &one, sizeof one) == 0) continue;
            for (long e = 0; e < up(p_.E, W); ++e) {
                float* at = x.sums + e * Q + lane;
                store<float>(at, load<float>(at) * factor);
            }
        }
    }

    void finish(const Running& x) {
        float* inv_row_sum = x.online.rescale;  // of no other use any more
        for (int n = 0; n < x.q.width; n += W) {
            const Vec<float> sum = load<float>(x.online.row_sum + n);
            write_statistics<float>(p_, r_, x.q.index(p_, n), x.q.count - n, load<float>(x.online.row_max + n), sum);
            store<float>(inv_row_sum + n, sum == 0 ? Vec<float>{} : 1 / sum);
        }
        write_transposed<S>(x.sums, inv_row_sum, p_, x.q, p_.E, r_.out, static_cast<float*>(r_.wide_out));
    }

    const Problem& p_;
    ForwardResult r_;
    Parts rows_, k_, v_, values_, weights_;
    float* st_;
    Scores<float> scores_;
    Running* running_;
    std::size_t used_ = 0;
};

template <class S>
void matrix_forward(const Problem& p, const ForwardResult& r, ParallelCall& parallel) {
    const RowBlocks rows(p, Q);
    const std::int64_t heads = p.B * p.Hk, blocks = heads * rows.count;
    const int useful = useful_workers((p.D + p.E) / 2.0 * p.B * p.Hq * p.T * p.S);
    // Many blocks at once, but several tasks for each worker.
    const std::int64_t share = blocks / (4 * parallel.workers(blocks, useful));
    const int capacity = static_cast<int>(std::clamp<std::int64_t>(std::min(share, rows.count), 1, MatrixForward<S>::most));
    const std::int64_t chunks = (rows.count + capacity - 1) / capacity, tasks = heads * chunks;
    const int workers = parallel.workers(tasks, useful);
    const std::size_t each = Scratch::bytes<char>(MatrixForward<S>::bytes(p, capacity));
    const Scratch scratch(each * workers);
    std::vector<MatrixForward<S>> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.emplace_back(p, r, capacity, scratch.data() + each * n);
    parallel.run(
        tasks, useful,
        [&](std::int64_t task, int worker) {
            // As in run_blocks: chunks of one head together, the longest of a causal mask first.
            const std::int64_t head = task / chunks, first = (chunks - 1 - task % chunks) * capacity;
            passes[worker].run(rows, head / p.Hk, head % p.Hk, first, std::min(first + capacity, rows.count), parallel);
        },
        true);
}

}  // namespace attngrad::ATTNGRAD_ISA
