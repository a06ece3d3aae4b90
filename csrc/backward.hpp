// The backward pass: five products a tile, all from one Omega, in a fixed order of additions.
//
//     p = exp(s - lse) (F4); dv = (p o M)^T dout (R1); dp = (dout v^T) o M (R2); delta (R3); ds = p o (dp - delta) (R4)
//     dbias (R5); dz = ds o cap'(z) (R7); dq = scale dz k (R8); dk = scale dz^T q (R9)
//
// A task is a chunk of queries of one key head against all keys. dq is its own; dk and dv of a tile of keys are summed
// within the chunk, then added to the result in the order of the chunks. So nothing is computed twice, no two threads
// write one number at once, and the result does not depend on how many threads there are.
#pragma once

#include <tuple>
#include <vector>

#include "forward.hpp"

namespace attngrad::ATTNGRAD_ISA {

// Omega of NV vectors: from scores and dp, in place, to p o M (in s) and dz (in dp). `ds` receives Omega where wanted.
template <class T, int NV>
__attribute__((noinline)) void omega(const Scores<T>& scores, T* s, T* dp, T* ds, long k0, Span keys, Span inner, int lane,
                                     const T* top, const T* inverse, const T* delta) {
    constexpr int W = lanes<T>;
    Vec<T> m[NV], r[NV], d[NV];
    for (int v = 0; v < NV; ++v) {
        m[v] = load<T>(top + v * W);
        r[v] = load<T>(inverse + v * W);
        d[v] = load<T>(delta + v * W);
    }
    each_key(keys, inner, scores.plain() && !scores.drops(), [&]<bool masked>(long k) ATTNGRAD_LAMBDA {
        const long at = (k - k0) * block<T>;
        for (int v = 0; v < NV; ++v) {
            const int n = v * W;
            Vec<T> x = load<T>(s + at + n), slope{};
            if constexpr (masked) x = scores.template apply<true>(x, k, lane + n, &slope);
            x -= m[v];
            if constexpr (masked) x = scores.exponent(x);
            Vec<T> p = exp2<T, masked>(x) * r[v];
            if constexpr (masked) p = scores.sees(k, lane + n) ? p : Vec<T>{};  // even where the row is NaN
            Vec<T> g = load<T>(dp + at + n), kept = p;
            if (masked && scores.drops()) {
                const Vec<T> keep = scores.keep(k, lane + n);
                kept = p * keep;
                g *= keep;
            }
            Vec<T> dz = p * (g - d[v]);
            if constexpr (masked) {
                const Int<T> sees = scores.sees(k, lane + n);
                if (ds) store<T>(ds + at + n, sees ? dz : Vec<T>{});
                if (scores.capped()) dz *= slope;
                dz = sees ? dz : Vec<T>{};
            }
            store<T>(s + at + n, kept);
            store<T>(dp + at + n, dz);
        }
    });
}

// Rows in the order of the features: strips of whole vectors, [strip][row][columns of the strip].
template <class T>
inline void pack_strips(const T* rows, long columns, int first, int count, T* out, long height) {
    for (long c = 0; c < columns; c += strip<T>) {
        const long wide = std::min<long>(strip<T>, columns - c);
        for (int i = 0; i < count; ++i)
            std::memcpy(out + c * height + (first + i) * wide, rows + i * columns + c, sizeof(T) * wide);
    }
}

// The blocks of queries that a task takes at once: as many as fit the second-level cache with all that is packed of them.
template <class T>
inline int chunk_blocks(const Problem& p) {
    const long bytes = static_cast<long>(sizeof(T)) * block<T> * (3 * padded<T>(p.D) + 2 * padded<T>(p.E));
    return static_cast<int>(std::clamp<long>(512 * 1024 / bytes, 1, 8));
}

template <class S>
class Backward {
    using T = Compute<S>;
    struct Packed {
        Block<T> q;
        T *qt, *dot, *qs, *dos, *dqt, *top, *inverse, *delta, *bias_sum;
    };

public:
    Backward(const Problem& p, const BackwardProblem& g, int blocks, char* memory)
        : Backward(p, g, blocks, Cutter(memory)) {}
    static std::size_t bytes(const Problem& p, int blocks) {
        return Backward(p, {}, blocks, Cutter(nullptr)).used_;
    }

    struct Task {
        std::int64_t b, key_head, chunk, chunks, ticket, tiles;  // ticket: of tile 0 of this head
        std::int64_t rank;                                       // among all tasks, for a shared bias
    };

    void run(const Task& task, const RowBlocks& blocks, Tickets& tickets, Tickets* bias_tickets, const Team& team) {
        blocks_ = 0;
        const std::int64_t first = task.chunk * capacity_, last = std::min(first + capacity_, blocks.count);
        for (std::int64_t n = first; n < last; ++n) pack(task, blocks.first(n), blocks.length(n));
        for (std::int64_t j = 0; j < task.tiles; ++j) {
            const long k0 = j * keys<T>, k1 = std::min<long>(k0 + keys<T>, p_.S);
            const bool any = tile(task, k0, k1, bias_tickets, j, team);
            if (task.chunks > 1) {
                tickets.wait(task.ticket + j, static_cast<std::int32_t>(task.chunk), team);
                if (team.cancelled()) return;
            }
            if (any || task.chunk == 0) add_tile(task, any, k0, k1);
            if (task.chunks > 1) tickets.pass(task.ticket + j, static_cast<std::int32_t>(task.chunk));
        }
        if (g_.dbias && g_.dbias.s == 0 && p_.S > 0) add_bias_rows(task, bias_tickets, team);
        for (int n = 0; n < blocks_; ++n) {
            const Packed& q = packed_[n];
            for (int i = 0; i < q.q.width; ++i) factor_[i] = static_cast<T>(p_.scale);
            unpack_lanes<S, T>(q.dqt, factor_, p_, q.q, p_.D, rows_, static_cast<S*>(g_.dq), nullptr);
        }
    }

private:
    Backward(const Problem& p, const BackwardProblem& g, int blocks, Cutter cut)
        : p_(p),
          g_(g),
          capacity_(blocks),
          rows_(cut.take<T>(lanes<T> * padded<T>(std::max(p.D, p.E)))),
          st_(cut.take<T>(keys<T> * block<T>)),
          dt_(cut.take<T>(keys<T> * block<T>)),
          dk_(cut.take<T>(keys<T> * padded<T>(p.D))),
          dv_(cut.take<T>(keys<T> * padded<T>(p.E))),
          factor_(cut.take<T>(block<T>)),
          k_(std::is_same_v<S, T> ? nullptr : cut.take<T>(keys<T> * p.D)),
          v_(std::is_same_v<S, T> ? nullptr : cut.take<T>(keys<T> * p.E)),
          scores_(p, cut),
          packed_(cut.take<Packed>(blocks)) {
        const long d = padded<T>(p.D) * block<T>, e = padded<T>(p.E) * block<T>;
        for (int n = 0; n < blocks; ++n) {
            Packed q{};
            q.qt = cut.take<T>(d);
            q.dot = cut.take<T>(e);
            q.qs = cut.take<T>(d);
            q.dos = cut.take<T>(e);
            q.dqt = cut.take<T>(d);
            q.top = cut.take<T>(block<T>);
            q.inverse = cut.take<T>(block<T>);
            q.delta = cut.take<T>(block<T>);
            q.bias_sum = cut.take<T>(block<T>);
            if (rows_) packed_[n] = q;
        }
        used_ = cut.used();
    }

    // Everything of a block of queries that the tiles need, once a chunk.
    void pack(const Task& task, std::int64_t first, int length) {
        Packed& x = packed_[blocks_++];
        x.q.set(p_, task.b, task.key_head, first, length);
        const long d = padded<T>(p_.D), e = padded<T>(p_.E);
        const auto* out = static_cast<const T*>(g_.out);
        const auto* dlse = static_cast<const T*>(g_.dlse);
        // A query that sees nothing is as good as zero, whatever it holds.
        const auto blank = [&](T* rows, int n, long columns) {
            for (int i = 0; i < lanes<T> && n + i < x.q.count; ++i)
                if (x.inverse[n + i] == 0) std::memset(rows + i * columns, 0, sizeof(T) * columns);
        };
        for (int lane = 0; lane < x.q.width; ++lane) {
            const std::int64_t at = (task.b * p_.Hq + x.q.head[lane]) * p_.T + x.q.row[lane];
            const bool past = lane >= x.q.count;  // past the end: p = 0
            x.top[lane] = past ? 0 : static_cast<const T*>(g_.top)[at];
            x.inverse[lane] = past ? 0 : static_cast<const T*>(g_.inverse)[at];
            x.delta[lane] = x.bias_sum[lane] = 0;
        }
        for (int n = 0; n < x.q.width; n += lanes<T>) {
            // Rows that make one strip go where they belong at once; wider ones are cut into strips.
            T* rows = d <= strip<T> ? x.qs + n * d : rows_;
            gather_rows<S, T>(p_.q, x.q, n, p_.D, rows);
            blank(rows, n, d);
            transpose_in<T>(rows, d, d, x.qt + n, block<T>, Scores<T>::query_factor(p_));
            if (rows == rows_) pack_strips<T>(rows, d, n, lanes<T>, x.qs, block<T>);
            rows = e <= strip<T> ? x.dos + n * e : rows_;
            gather_rows<S, T>(g_.dout, x.q, n, p_.E, rows);
            blank(rows, n, e);
            transpose_in<T>(rows, e, e, x.dot + n, block<T>, T{1});
            if (rows == rows_) pack_strips<T>(rows, e, n, lanes<T>, x.dos, block<T>);
            for (int i = 0; i < lanes<T> && n + i < x.q.count; ++i) {
                const int lane = n + i;
                const std::int64_t at = (task.b * p_.Hq + x.q.head[lane]) * p_.T + x.q.row[lane];
                const T delta = dot<T>(rows + i * e, out + at * p_.E, p_.E) - (dlse ? dlse[at] : T{0});  // (R3)
                static_cast<T*>(g_.delta)[at] = delta;
                x.delta[lane] = x.inverse[lane] == 0 ? 0 : delta;
            }
            for (long c = 0; c < d; ++c) store<T>(x.dqt + c * block<T> + n, Vec<T>{});
        }
    }

    // All blocks of the chunk against keys k0 .. k1; false if none of them sees any.
    bool tile(const Task& task, long k0, long k1, Tickets* bias_tickets, std::int64_t j, const Team& team) {
        const T *k = nullptr, *v = nullptr;
        long k_stride = 0, v_stride = 0;
        bool any = false, turn = false;
        for (int n = 0; n < blocks_ && !team.cancelled(); ++n) {
            Packed& x = packed_[n];
            if (x.q.all.outer.cut(k0, k1).empty() || !scores_.prepare(x.q, k0, k1)) continue;
            if (!any) {
                std::tie(k, k_stride) = key_rows<S, T>(p_.k, task.b, task.key_head, k0, k1, p_.D, k_);
                std::tie(v, v_stride) = key_rows<S, T>(p_.v, task.b, task.key_head, k0, k1, p_.E, v_);
                std::memset(dk_, 0, sizeof(T) * (k1 - k0) * padded<T>(p_.D));
                std::memset(dv_, 0, sizeof(T) * (k1 - k0) * padded<T>(p_.E));
                any = true;
            }
            query_gradients(x, k, k_stride, v, v_stride, k0, k1);
            key_gradients(x, k0, k1);
            if (g_.dbias && g_.dbias.s == 0) sum_bias_rows(x, k1 - k0);
            if (g_.dbias && g_.dbias.s != 0) {
                if (bias_tickets && !turn) bias_tickets->wait(j, static_cast<std::int32_t>(task.rank), team);
                turn = true;
                add_bias(x, k0, k1);
            }
        }
        if (bias_tickets && g_.dbias.s != 0) {
            if (!turn) bias_tickets->wait(j, static_cast<std::int32_t>(task.rank), team);
            bias_tickets->pass(j, static_cast<std::int32_t>(task.rank));
        }
        return any;
    }

    // p o M into st_, dz into dt_, panel by panel; and dq from dz.
    void query_gradients(Packed& x, const T* k, long k_stride, const T* v, long v_stride, long k0, long k1) {
        T* ds = g_.dbias ? scores_.bias_tile() : nullptr;
        for (int lane = 0; lane < x.q.width; lane += panel<T>) {
            const Panel<T> panel(x.q, lane, k0, k1);
            for (int n = 0; n < panel.vectors; ++n) {
                seen_[lane / lanes<T> + n] = panel.own[n];
                const int at = lane + n * lanes<T>;
                clear(st_ + at, dt_ + at, ds ? ds + at : nullptr, 0, panel.own[n].a - k0);
                clear(st_ + at, dt_ + at, ds ? ds + at : nullptr, panel.own[n].b - k0, k1 - k0);
            }
            panel.parts([&](int vectors, int at, Span span) {
                const long row = (span.a - k0) * block<T>, n = span.b - span.a;
                const T *k_rows = k + (span.a - k0) * k_stride, *v_rows = v + (span.a - k0) * v_stride;
                product<T, Order::RowMajor, ToZero>(vectors, n, p_.D, k_rows, k_stride, x.qt + at, block<T>,
                                                      st_ + row + at, block<T>);  // (F1)
                product<T, Order::RowMajor, ToZero>(vectors, n, p_.E, v_rows, v_stride, x.dot + at, block<T>,
                                                      dt_ + row + at, block<T>);  // (R2)
                auto* fill = vectors == 3 ? omega<T, 3> : vectors == 2 ? omega<T, 2> : omega<T, 1>;
                fill(scores_, st_ + at, dt_ + at, ds ? ds + at : nullptr, k0, span, panel.inner, at, x.top + at,
                     x.inverse + at, x.delta + at);
                product<T, Order::ColMajor, ToC>(vectors, p_.D, n, k_rows, k_stride, dt_ + row + at, block<T>,
                                                   x.dqt + at, block<T>);  // (R8)
            });
        }
    }

    // One vector's keys from .. to that it does not see.
    void clear(T* s, T* dp, T* ds, long from, long to) {
        for (long k = from; k < to; ++k) {
            store<T>(s + k * block<T>, Vec<T>{});
            store<T>(dp + k * block<T>, Vec<T>{});
            if (ds) store<T>(ds + k * block<T>, Vec<T>{});
        }
    }

    // dv += (p o M)^T dout (R1), dk += dz^T q (R9), over the keys of the tile; for a few keys at a time, from the first
    // to the last vector of queries that sees any of them.
    void key_gradients(const Packed& x, long k0, long k1) {
        const int vectors = x.q.width / lanes<T>;
        bool whole = true;
        for (int i = 0; i < vectors; ++i) whole = whole && seen_[i].a == k0 && seen_[i].b == k1;
        const long step = whole ? k1 - k0 : keys<T> / 4;
        for (long a = k0; a < k1; a += step) {
            const long b = std::min(a + step, k1), row = a - k0;
            int first = 0, last = vectors;
            while (first < last && seen_[first].cut(a, b).empty()) ++first;
            while (first < last && seen_[last - 1].cut(a, b).empty()) --last;
            if (first == last) continue;
            const int q0 = first * lanes<T>, q1 = std::min(last * lanes<T>, x.q.count);
            accumulate(st_ + row * block<T>, x.dos, q0, q1, p_.E, dv_ + row * padded<T>(p_.E), b - a);
            accumulate(dt_ + row * block<T>, x.qs, q0, q1, p_.D, dk_ + row * padded<T>(p_.D), b - a);
        }
    }

    // out (rows x length) += a (rows x queries q0 .. q1) b, b in strips.
    void accumulate(const T* a, const T* b, int q0, int q1, long length, T* out, long rows) {
        const long columns = padded<T>(length);
        for (long c = 0; c < columns; c += strip<T>) {
            const long wide = std::min<long>(strip<T>, columns - c);
            product<T, Order::RowMajor, ToC>(static_cast<int>(wide / lanes<T>), rows, q1 - q0, a + q0, block<T>,
                                               b + c * block<T> + q0 * wide, wide, out + c, columns);
        }
    }

    // The sums of the tile to the result: the first chunk writes, the others add.
    void add_tile(const Task& task, bool any, long k0, long k1) {
        const std::int64_t head = (task.b * p_.Hk + task.key_head) * p_.S + k0;
        const bool first = task.chunk == 0;
        const auto add = [&](T* out, const T* tile, long length, T factor) {
            for (long k = 0; k < k1 - k0; ++k, out += length, tile += padded<T>(length)) {
                if (!any) {
                    std::memset(out, 0, sizeof(T) * length);
                } else if (first) {
                    for (long i = 0; i < length; ++i) out[i] = factor * tile[i];
                } else {
                    for (long i = 0; i < length; ++i) out[i] += factor * tile[i];
                }
            }
        };
        add(static_cast<T*>(g_.dk) + head * p_.D, dk_, p_.D, static_cast<T>(p_.scale));
        add(static_cast<T*>(g_.dv) + head * p_.E, dv_, p_.E, T{1});
    }

    // dbias (R5): Omega summed over the axes that the bias was broadcast along. Sums within the tile come first.
    void add_bias(const Packed& x, long k0, long k1) {
        constexpr int W = lanes<T>;
        const Plane& out = g_.dbias;
        auto* data = static_cast<T*>(const_cast<void*>(out.data)) + x.q.b * out.b + k0 * out.s;
        const T* ds = scores_.bias_tile();
        const long n = k1 - k0;
        const auto row_of = [&](int lane) { return data + x.q.head[lane] * out.h + x.q.row[lane] * out.t; };
        int lane = 0;
        if (out.t != 0 && out.s == 1) {  // every query and key its own: W x W at a time
            for (; lane + W <= x.q.count; lane += W) {
                long k = 0;
                for (; k + W <= n; k += W) {
                    Vec<T> m[W];
                    for (int i = 0; i < W; ++i) m[i] = load<T>(ds + (k + i) * block<T> + lane);
                    transpose<T>(m);
                    for (int i = 0; i < W; ++i) {
                        T* row = row_of(lane + i) + k;
                        store<T>(row, load<T>(row) + m[i]);
                    }
                }
                for (; k < n; ++k)
                    for (int i = 0; i < W; ++i) row_of(lane + i)[k] += ds[k * block<T> + lane + i];
            }
        }
        for (int run; lane < x.q.count; lane = run) {
            T* row = row_of(lane);
            run = end_of_run(x, lane);
            for (long k = 0; k < n; ++k) {
                T sum = 0;
                for (int i = lane; i < run; ++i) sum += ds[k * block<T> + i];
                row[k * out.s] += sum;
            }
        }
    }

    // The end of the run of queries, from `lane` on, that share their row of the bias.
    int end_of_run(const Packed& x, int lane) const {
        const auto at = [&](int i) { return x.q.head[i] * g_.dbias.h + x.q.row[i] * g_.dbias.t; };
        int end = lane + 1;
        while (end < x.q.count && at(end) == at(lane)) ++end;
        return end;
    }

    // Where the bias broadcasts along the keys: the sum over all tiles first, then one turn at the result a task.
    void sum_bias_rows(const Packed& x, long n) {
        const T* ds = scores_.bias_tile();
        for (int lane = 0; lane < x.q.width; lane += lanes<T>) {
            Vec<T> sum{};
            for (long k = 0; k < n; ++k) sum += load<T>(ds + k * block<T> + lane);
            store<T>(x.bias_sum + lane, load<T>(x.bias_sum + lane) + sum);
        }
    }
    void add_bias_rows(const Task& task, Tickets* tickets, const Team& team) {
        const Plane& out = g_.dbias;
        auto* data = static_cast<T*>(const_cast<void*>(out.data)) + task.b * out.b;
        if (tickets) tickets->wait(0, static_cast<std::int32_t>(task.rank), team);
        for (int n = 0; n < blocks_; ++n) {
            const Packed& x = packed_[n];
            for (int lane = 0, run; lane < x.q.count; lane = run) {
                run = end_of_run(x, lane);
                T sum = 0;
                for (int i = lane; i < run; ++i) sum += x.bias_sum[i];
                data[x.q.head[lane] * out.h + x.q.row[lane] * out.t] += sum;
            }
        }
        if (tickets) tickets->pass(0, static_cast<std::int32_t>(task.rank));
    }

    const Problem& p_;
    BackwardProblem g_;
    int capacity_, blocks_ = 0;
    T *rows_, *st_, *dt_, *dk_, *dv_, *factor_, *k_, *v_;
    Scores<T> scores_;
    Packed* packed_;
    Span seen_[block<T> / lanes<T>];  // the keys of the tile that each vector of queries sees
    std::size_t used_ = 0;
};

template <class S>
void backward(const Problem& p, const BackwardProblem& g, Team& team) {
    using T = Compute<S>;
    if (p.B * p.Hq * p.T == 0) return;
    const RowBlocks blocks(p, block<T>);
    const int capacity = chunk_blocks<T>(p);
    const std::int64_t heads = p.B * p.Hk, chunks = (blocks.count + capacity - 1) / capacity, tasks = heads * chunks;
    const std::int64_t tiles = (p.S + keys<T> - 1) / keys<T>;
    const int worth = worth_waking(10.0 * p.B * p.Hq * p.T * p.S * p.D), workers = team.workers(tasks, worth);
    const std::size_t each = Scratch::bytes<char>(Backward<S>::bytes(p, capacity));
    const Scratch scratch(each * workers);
    Tickets tickets(chunks > 1 ? heads * tiles : 0);
    // Tasks that share numbers of dbias add them in the order of the tasks.
    const bool shared = g.dbias && ((g.dbias.b == 0 && p.B > 1) || (g.dbias.h == 0 && p.Hq > 1) || g.dbias.t == 0);
    Tickets bias_tickets(shared ? std::max<std::int64_t>(tiles, 1) : 0);
    std::vector<Backward<S>> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.emplace_back(p, g, capacity, scratch.data() + each * n);
    team.run(tasks, worth, [&](std::int64_t task, int worker) {
        const std::int64_t head = task % heads;
        passes[worker].run({head / p.Hk, head % p.Hk, task / heads, chunks, head * tiles, tiles, task}, blocks, tickets,
                 shared ? &bias_tickets : nullptr, team);
    });
}

// A sum in the compute type, rounded to the storage type.
template <class S>
void narrow_array(const Compute<S>* in, S* out, std::int64_t n, Team& team) {
    constexpr std::int64_t step = 1 << 16;
    const std::int64_t tasks = (n + step - 1) / step;
    team.run(tasks, static_cast<int>(std::min<std::int64_t>(tasks / 2 + 1, 4096)), [&](std::int64_t task, int) {
        narrow_row<S, Compute<S>>(in + task * step, std::min(step, n - task * step), out + task * step);
    });
}

}  // namespace attngrad::ATTNGRAD_ISA
