// What the backward passes share: chunks of queries against all keys, and sums in a fixed order of additions.
//
// A task is a chunk of queries of one key head against all keys. dq is its own; dk and dv of a tile of keys are summed
// within the chunk, then added to the result in the order of the chunks. So nothing is computed twice, no two threads
// write one number at once, and the result does not depend on how many threads there are.
#pragma once

#include <initializer_list>
#include <tuple>
#include <vector>

#include "passes/forward.hpp"

namespace attngrad::ATTNGRAD_ISA {

struct ChunkTask {
    std::int64_t b, key_head, chunk, chunks, ticket, tiles;  // ticket: of tile 0 of this head
    std::int64_t rank;                                       // among all tasks, for a shared bias
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

// f(panel) for every panel of a block, `alike` or not; what its vectors do not see of the tiles (null ones aside) becomes zero.
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

// f(row, rows, q0, q1) for runs of keys of the tile, with the queries from the first to the last vector that sees any.
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
        if (first < last) f(a - k0, b - a, first * lanes<T>, std::min(last * lanes<T>, q.count));
    }
}

// --- a tile of keys ---------------------------------------------------------------------------------------------------

// The gradient of k or v (or its tangent): summed within a tile of keys, then added to the result (B, Hk, S, length). Where
// there is no result, nothing is done. A 16-bit result is rounded once, when the last chunk has been added.
template <class T>
class KeySum {
public:
    KeySum(Type type, long length, void* result, T factor, Arena& arena)
        : type_(type),
          rounds_(type != compute_type<T>),
          length_(length),
          columns_(padded<T>(length)),
          result_(result),
          tile_(arena.take<T>(keys<T> * padded<T>(length))),
          factor_(arena.fill<T>(keys<T>, factor)) {}

    // Numbers per key that are kept from chunk to chunk outside the result, and where.
    long kept() const { return rounds_ && result_ ? length_ : 0; }
    void keep_in(T* sums) { sums_ = sums; }

    // A tile of keys, whose rows of the result start at `first_row`. `alone`: every row is added to once at most, in order.
    void start(std::int64_t first_row, long rows, bool alone) {
        if (!result_) return;
        first_ = first_row * length_;
        rows_ = rows;
        written_ = 0;
        summed_ = false;
        alone_ = !rounds_ && alone && length_ == columns_;
    }

    // Rows of the tile += a (rows x queries q0 .. q1) b, with b in strips.
    void add(const T* a, const T* b, int q0, int q1, long row, long rows) {
        if (!result_) return;
        if (alone_) {
            write_zeros(row);
            add_to<ScaledToZero>(a, b, q0, q1, rows, numbers() + row * length_);
            written_ = row + rows;
        } else if (!summed_ && rows == rows_) {
            add_to<ToZero>(a, b, q0, q1, rows, tile_);
        } else {
            if (!summed_) std::memset(tile_, 0, sizeof(T) * rows_ * columns_);
            add_to<ToC>(a, b, q0, q1, rows, tile_ + row * columns_);
        }
        summed_ = true;
    }

    // Where to add to the tile, rows of whole vectors; null where there is no result.
    T* sums() {
        if (!result_) return nullptr;
        if (!summed_) std::memset(tile_, 0, sizeof(T) * keys<T> * columns_);
        summed_ = true;
        return tile_;
    }

    // The tile to the result: the first chunk writes (zeros where it saw nothing), the others add.
    void write(bool first, bool last) {
        if (!result_) return;
        if (alone_ || (first && !summed_ && (last || !rounds_))) return write_zeros(rows_);
        if (!rounds_) return add_tile(first, numbers());
        if (!last) return add_tile(first, sums_ + first_);
        if (!summed_) std::memset(tile_, 0, sizeof(T) * rows_ * columns_);
        const T *sums = sums_ + first_, factor = factor_[0];
        T* tile = tile_;
        for (long k = 0; k < rows_; ++k, sums += length_, tile += columns_) {
            if (first) {
                for (long i = 0; i < length_; ++i) tile[i] *= factor;
            } else {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) tile[i] = sums[i] + factor * tile[i];
            }
        }
        narrow_rows<T>(type_, tile_, columns_, rows_, length_, nullptr, result_, first_);
    }

private:
    T* numbers() const { return static_cast<T*>(result_) + first_; }  // of a result in the compute type

    void write_zeros(long end) {
        const std::int64_t size = size_of(type_), at = first_ + written_ * length_;
        if (written_ < end) std::memset(static_cast<char*>(result_) + at * size, 0, size * (end - written_) * length_);
    }

    // The tile to sums in the compute type, or added to what earlier chunks have left there.
    void add_tile(bool first, T* to) {
        if (!summed_ && !first) return;
        if (!summed_) std::memset(tile_, 0, sizeof(T) * rows_ * columns_);
        const T *tile = tile_, factor = factor_[0];
        for (long k = 0; k < rows_; ++k, to += length_, tile += columns_) {
            if (first) {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) to[i] = factor * tile[i];
            } else {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) to[i] += factor * tile[i];
            }
        }
    }

    template <class To>
    void add_to(const T* a, const T* b, int q0, int q1, long rows, T* to) {
        for (long c = 0; c < columns_; c += strip<T>) {
            const long width = std::min<long>(strip<T>, columns_ - c);
            product<T, Order::RowMajor, To>(static_cast<int>(width / lanes<T>), rows, q1 - q0, {a + q0, block<T>},
                                            {b + c * block<T> + q0 * width, width}, {to + c, columns_}, factor_);
        }
    }

    Type type_;
    bool rounds_;  // the result is of fewer bits than the sums
    long length_, columns_, rows_ = 0, written_ = 0;
    std::int64_t first_ = 0;  // where the rows of the tile start in the result
    void* result_;
    T *sums_ = nullptr, *tile_, *factor_;  // factor: the same for every row
    bool summed_ = false, alone_ = false;
};

// The gradient of the bias (R5) or its tangent (H8): Omega summed over the axes that the bias was broadcast along. Sums
// within the tile come first.
template <class T>
class BiasSum {
public:
    // `tile` is where the pass leaves Omega, transposed like the scores. Where every score has a number of its own
    // (`alone`), the result is written, and may hold anything before; else it is added to.
    BiasSum(const Plane& out, bool alone, T* tile, int blocks, Arena& arena)
        : out_(out),
          alone_(alone),
          tile_(tile),
          row_sums_(out && out.s == 0 ? arena.take<T>(blocks * block<T>) : nullptr) {}

    T* tile() const { return tile_; }
    bool along_keys() const { return out_.s == 0; }  // one number for all keys: added up over all tiles first

    void start(int n) {
        if (row_sums_) std::memset(row_sums_ + n * block<T>, 0, sizeof(T) * block<T>);
    }

    void sum_rows(int n, const Block<T>& q, long rows) {
        for (int lane = 0; lane < q.width; lane += lanes<T>) {
            Vec<T> sum{};
            for (long k = 0; k < rows; ++k) sum += load<T>(tile_ + k * block<T> + lane);
            T* to = row_sums_ + n * block<T> + lane;
            store<T>(to, load<T>(to) + sum);
        }
    }
    void write_rows(int n, const Block<T>& q) {
        for (int lane = 0, run; lane < q.count; lane = run) {
            run = end_of_run(q, lane);
            T sum = 0;
            for (int i = lane; i < run; ++i) sum += row_sums_[n * block<T> + i];
            *row_of(q, lane) += sum;
        }
    }

    // A tile that was skipped.
    void skip_key_tile(const Block<T>& q, long k0, long k1) {
        if (!alone_) return;
        for (int lane = 0; lane < q.count; ++lane)
            for (long k = k0; k < k1; ++k) row_of(q, lane)[k * out_.s] = 0;
    }

    void write_key_tile(const Block<T>& q, long k0, long k1) {
        constexpr int W = lanes<T>;
        const long n = k1 - k0, first = k0 * out_.s;
        int lane = 0;
        if (out_.t != 0 && out_.s == 1) {  // every query and key its own: W x W at a time
            for (; lane + W <= q.count; lane += W) {
                long k = 0;
                for (; k + W <= n; k += W) {
                    Vec<T> m[W];
                    for (int i = 0; i < W; ++i) m[i] = load<T>(tile_ + (k + i) * block<T> + lane);
                    transpose<T>(m);
                    for (int i = 0; i < W; ++i) {
                        T* row = row_of(q, lane + i) + first + k;
                        store<T>(row, alone_ ? m[i] : load<T>(row) + m[i]);
                    }
                }
                for (; k < n; ++k)
                    for (int i = 0; i < W; ++i) add(row_of(q, lane + i)[first + k], tile_[k * block<T> + lane + i]);
            }
        }
        for (int run; lane < q.count; lane = run) {
            T* row = row_of(q, lane) + first;
            run = end_of_run(q, lane);
            for (long k = 0; k < n; ++k) {
                T sum = 0;
                for (int i = lane; i < run; ++i) sum += tile_[k * block<T> + i];
                add(row[k * out_.s], sum);
            }
        }
    }

private:
    ATTNGRAD_INLINE void add(T& to, T x) const { to = alone_ ? x : to + x; }
    T* row_of(const Block<T>& q, int lane) const {
        return static_cast<T*>(const_cast<void*>(out_.data)) + q.b * out_.b + q.head[lane] * out_.h + q.row[lane] * out_.t;
    }
    // The end of the run of queries, from `lane` on, that share their row of the bias.
    int end_of_run(const Block<T>& q, int lane) const {
        int end = lane + 1;
        while (end < q.count && row_of(q, end) == row_of(q, lane)) ++end;
        return end;
    }

    Plane out_;
    bool alone_;
    T *tile_, *row_sums_;
};

// --- chunks -----------------------------------------------------------------------------------------------------------

// One task of a pass: pack its queries, take tile after tile of keys, and add up what belongs to the keys and the bias.
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
    for (std::int64_t j = 0; j < task.tiles; ++j) {
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
    const std::int64_t tiles = (p.S + keys<T> - 1) / keys<T>;
    const int useful = useful_workers(flops * p.B * p.Hq * p.T * p.S), workers = parallel.workers(tasks, useful);
    const std::size_t each = Scratch::bytes<char>(Pass::bytes(p, arguments..., capacity));
    const Scratch scratch(each * workers);
    Tickets tickets(chunks > 1 ? heads * tiles : 0);
    // Tasks that share numbers of dbias add them in the order of the tasks.
    const bool shared = dbias && ((dbias.b == 0 && p.B > 1) || (dbias.h == 0 && p.Hq > 1) || dbias.t == 0);
    Tickets bias_tickets(shared ? std::max<std::int64_t>(tiles, 1) : 0);
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
            run_chunk(passes[worker], p, {head / p.Hk, head % p.Hk, task / heads, chunks, head * tiles, tiles, task}, rows,
                      capacity, tickets, shared ? &bias_tickets : nullptr, parallel);
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
