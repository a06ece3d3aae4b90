// What the backward passes share: chunks of queries against all keys, and sums in a fixed order of additions.
//
// A task is a chunk of queries of one key head against all keys. dq is its own; dk and dv of a key tile are summed
// within the chunk, then added to the result in the order of the chunks. So nothing is computed twice, no two threads
// write one number at once, and the result does not depend on how many threads there are.
#pragma once

#include <initializer_list>
#include <tuple>
#include <vector>

#include "passes/forward.hpp"
#include "passes/sums.hpp"

namespace attngrad::ATTNGRAD_ISA {

struct ChunkTask {
    std::int64_t b, key_head, chunk, chunks, ticket, key_tiles;  // ticket: of key tile 0 of this head
    std::int64_t rank;                                           // among all tasks, for a shared bias
};

// --- a block of queries -----------------------------------------------------------------------------------------------

// The rows of a block where they lie, if they lie as strips do: whole vectors, one strip, one head. Else null.
template <class T>
inline const T* strips_in_place(Type type, const Rows& x, const Block<T>& q, long length) {
    const bool one_strip = length == padded<T>(length) && length <= strip<T>;
    const bool in_place = type == compute_type<T> && one_strip && x.row == length && q.head[0] == q.head[q.count - 1];
    return in_place ? row_of<T>(x, q.b, q.head[0], q.row[0]) : nullptr;
}

// The queries of a block: into the lanes, times `factor`; and as strips of whole vectors, [strip][row][columns of the strip]:
// a copy, or where the rows lie. f(lane, rows) for every vector of them. A query that sees nothing (inv_row_sum = 0) is as good
// as zero, whatever it holds.
template <class T, class F>
inline const T* pack_rows(Type type, const Rows& x, const Block<T>& q, long length, const T* inv_row_sum, T factor, T* rows,
                          T* into_lanes, T* copy, F f) {
    const long columns = padded<T>(length);
    const bool fully_masked = !x.data || std::find(inv_row_sum, inv_row_sum + q.count, T{0}) != inv_row_sum + q.count;
    const T* strips = fully_masked ? nullptr : strips_in_place<T>(type, x, q, length);
    for (int lane = 0; lane < q.width; lane += lanes<T>) {
        VectorOfRows<T> in{rows, columns, std::min(lanes<T>, q.count - lane)};
        if (x.data) in = gather_rows<T>(type, x, q, lane, length, rows);
        if (fully_masked) {
            for (int i = 0; i < in.count; ++i) {
                T* row = rows + i * columns;
                if (!x.data || inv_row_sum[lane + i] == 0) {
                    std::memset(row, 0, sizeof(T) * columns);
                } else if (in.first != rows) {
                    std::memcpy(row, in[i], sizeof(T) * columns);
                }
            }
            in = {rows, columns, in.count};
        }
        transpose_in<T>(in, columns, into_lanes + lane, block<T>, factor);
        for (long c = 0; c < columns && !strips; c += strip<T>) {
            const long width = std::min<long>(strip<T>, columns - c);
            for (int i = 0; i < in.count; ++i)
                std::memcpy(copy + c * block<T> + (lane + i) * width, in[i] + c, sizeof(T) * width);
        }
        f(lane, in);
    }
    return strips ? strips : copy;
}

// f(panel) for every panel of a block, `uniform` or not; what its vectors do not see of the score tiles (null ones aside)
// becomes zero.
template <class T, class F>
ATTNGRAD_INLINE void each_panel(const Block<T>& q, long k0, long k1, bool uniform, std::initializer_list<T*> tiles, Span* seen,
                                F f) {
    for (int lane = 0, end; lane < q.width; lane = end) {
        const auto panel = uniform ? Panel<T>::uniform(q, lane, k0, k1) : Panel<T>(q, lane, k0, k1);
        end = panel.end();
        for (int n = 0; n < panel.vectors; ++n) {
            const Span own = panel.own[n];
            const int at = lane + n * lanes<T>;
            seen[at / lanes<T>] = own;
            for (T* tile : tiles) {
                if (!tile) continue;
                for (long k = k0; k < own.a; ++k) store<T>(tile + (k - k0) * block<T> + at, Vec<T>{});
                for (long k = own.b; k < k1; ++k) store<T>(tile + (k - k0) * block<T> + at, Vec<T>{});
            }
        }
        f(panel);
    }
}

// f(run) for runs of keys of the key tile, with the queries from the first to the last vector that sees any.
template <class T, class F>
inline void each_key_run(const Block<T>& q, const Span* seen, long k0, long k1, F f) {
    const int vectors = q.width / lanes<T>;
    bool all_seen = true;
    for (int i = 0; i < vectors; ++i) all_seen = all_seen && seen[i].a == k0 && seen[i].b == k1;
    const long step = all_seen ? k1 - k0 : keys<T> / 4;
    for (long a = k0; a < k1; a += step) {
        const long b = std::min(a + step, k1);
        int first = 0, last = vectors;
        while (first < last && seen[first].clipped(a, b).empty()) ++first;
        while (first < last && seen[last - 1].clipped(a, b).empty()) --last;
        if (first < last) f(KeyRun{{a, b}, first * lanes<T>, std::min(last * lanes<T>, q.count)});
    }
}

// --- chunks -----------------------------------------------------------------------------------------------------------

// One task of a pass: pack its queries, take key tile after key tile, and add up what belongs to the keys and the bias.
template <class Pass>
void run_chunk(Pass& pass, const Problem& p, const ChunkTask& task, const RowBlocks& rows, int capacity, Tickets& tickets,
               Tickets* bias_tickets, const ParallelCall& parallel) {
    using T = typename Pass::Number;
    const std::int64_t first = task.chunk * capacity;
    const int blocks = static_cast<int>(std::min<std::int64_t>(capacity, rows.count - first));
    const auto turn = static_cast<std::int32_t>(task.rank), chunk = static_cast<std::int32_t>(task.chunk);
    bool bias = false, along_keys = false;
    pass.each_bias_sum([&](auto& sum) { bias = true, along_keys = sum.along_keys(); });
    for (int n = 0; n < blocks; ++n) {
        pass.queries(n).set(p, task.b, task.key_head, rows.first(first + n), rows.length(first + n));
        pass.each_bias_sum([&](auto& sum) { sum.start(n); });
        pass.pack(n);
    }
    for (std::int64_t j = 0; j < task.key_tiles; ++j) {
        const long k0 = j * keys<T>, k1 = std::min<long>(k0 + keys<T>, p.S);
        bool any = false, my_turn = false;
        const std::int64_t row = (task.b * p.Hk + task.key_head) * p.S + k0;
        const bool alone = Pass::one_product && task.chunks == 1 && blocks == 1;
        pass.each_key_sum([&](auto& sum) { sum.start(row, k1 - k0, alone); });
        const auto take_turn = [&] {
            if (bias_tickets && !my_turn) bias_tickets->wait(j, turn, parallel);
            my_turn = true;
        };
        for (int n = 0; n < blocks && !parallel.cancelled(); ++n) {
            const Block<T>& q = pass.queries(n);
            if (q.all.outer.clipped(k0, k1).empty() || !pass.scores().prepare(q, k0, k1)) {
                pass.each_bias_sum([&](auto& sum) { sum.skip_key_tile(q, k0, k1); });
                continue;
            }
            if (!any) {
                pass.load_keys(task, k0, k1);
                any = true;
            }
            pass.process_key_tile(n, k0, k1);
            if (bias && !along_keys) take_turn();
            pass.each_bias_sum([&](auto& sum) {
                if (along_keys) {
                    sum.sum_rows(n, q, k1 - k0);
                } else {
                    sum.write_key_tile(q, k0, k1);
                }
            });
        }
        if (bias_tickets && !along_keys) {
            take_turn();
            bias_tickets->pass(j, turn);
        }
        if (task.chunks > 1) {
            tickets.wait(task.ticket + j, chunk, parallel);
            if (parallel.cancelled()) return;
        }
        pass.each_key_sum([&](auto& sum) { sum.write(task.chunk == 0, task.chunk == task.chunks - 1); });
        if (task.chunks > 1) tickets.pass(task.ticket + j, chunk);
    }
    if (along_keys && p.S > 0) {
        if (bias_tickets) bias_tickets->wait(0, turn, parallel);
        for (int n = 0; n < blocks; ++n) pass.each_bias_sum([&](auto& sum) { sum.write_rows(n, pass.queries(n)); });
        if (bias_tickets) bias_tickets->pass(0, turn);
    }
    for (int n = 0; n < blocks; ++n) pass.finish(n);
}

// All chunks of a pass, which is made from the problem and `arguments`; `flops` for each query and key.
template <class Pass, class... Arguments>
void run_chunks(const Problem& p, const Plane& dbias, double flops, ParallelCall& parallel, const Arguments&... arguments) {
    using T = typename Pass::Number;
    if (p.B * p.Hq * p.T == 0) return;
    const RowBlocks rows(p, block<T>);
    // As many blocks of queries at once as fit the second-level cache with all that is packed of them, but not so many that
    // fewer than about 16 tasks are left. Whatever the number of threads: the order of the sums depends on it.
    const long packed = static_cast<long>(sizeof(T)) * block<T> * std::max(1L, Pass::packed_rows(p));
    const std::int64_t heads = p.B * p.Hk, share = std::clamp<std::int64_t>(heads * rows.count / 16, 4, 12);
    const std::int64_t most = std::clamp<std::int64_t>(1024 * 1024 / packed, 1, share);
    const std::int64_t chunks = (rows.count + most - 1) / most, tasks = heads * chunks;
    const int capacity = static_cast<int>((rows.count + chunks - 1) / chunks);
    const std::int64_t key_tiles = (p.S + keys<T> - 1) / keys<T>;
    const int useful = useful_workers(flops * p.B * p.Hq * p.T * p.S), workers = parallel.workers(tasks, useful);
    const std::size_t each = Scratch::bytes<char>(Pass::bytes(p, arguments..., capacity));
    const Scratch scratch(each * workers);
    Tickets tickets(chunks > 1 ? heads * key_tiles : 0);
    // Tasks that share numbers of dbias add them in the order of the tasks.
    const bool shared = dbias && ((dbias.b == 0 && p.B > 1) || (dbias.h == 0 && p.Hq > 1) || dbias.t == 0);
    Tickets bias_tickets(shared ? std::max<std::int64_t>(key_tiles, 1) : 0);
    std::vector<Pass> passes;
    passes.reserve(workers);
    for (int n = 0; n < workers; ++n) passes.emplace_back(p, arguments..., capacity, scratch.data() + each * n);
    long kept = 0;
    if (chunks > 1) passes[0].each_key_sum([&](auto& sum) { kept += sum.kept(); });
    const Memory sums(sizeof(T) * heads * p.S * kept);
    for (Pass& pass : passes) {
        T* at = reinterpret_cast<T*>(sums.data());
        pass.each_key_sum([&](auto& sum) {
            sum.keep_in(at);
            at += heads * p.S * sum.kept();
        });
    }
    parallel.run(
        tasks, useful,
        [&](std::int64_t task, int worker) {
            const std::int64_t head = task % heads;
            run_chunk(passes[worker], p, {head / p.Hk, head % p.Hk, task / heads, chunks, head * key_tiles, key_tiles, task},
                      rows, capacity, tickets, shared ? &bias_tickets : nullptr, parallel);
        },
        chunks == 1 && !shared);
}

// A sum in the compute type, rounded to the storage type.
template <class T>
void narrow_array(Type type, const T* in, void* out, std::int64_t n, ParallelCall& parallel) {
    constexpr std::int64_t step = 1 << 16;
    const std::int64_t tasks = (n + step - 1) / step;
    parallel.run(tasks, static_cast<int>(std::min<std::int64_t>(tasks / 2 + 1, 4096)), [&](std::int64_t task, int) {
        narrow_rows<T>(type, in + task * step, 0, 1, std::min(step, n - task * step), nullptr, out, task * step);
    });
}

}  // namespace attngrad::ATTNGRAD_ISA
