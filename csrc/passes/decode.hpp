// Few queries against many keys: features in the lanes, queries in the rows, parallel over the keys.
//
// With less than half a vector of queries per key head, queries in the lanes would waste most of them, and the work is bound
// by reading k and v anyway. Each task takes a run of keys; the partial softmaxes are merged in the order of the keys.
#pragma once

#include "passes/forward.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class T>
inline bool few_queries(const Problem& p) {
    return p.group() * p.T <= std::max(1, lanes<T> / 2);
}

// s[k][r] = q_r . k_k for rows r < count, keys k < n: lane products summed across by transposition, W keys at a time.
template <class T>
inline void dot_products(const T* q, long q_stride, int count, const T* k, long k_stride, long n, long length, T* s) {
    constexpr int W = lanes<T>;
    const long in_vectors = length / W * W;
    for (long k0 = 0; k0 < n; k0 += W) {
        const int here = static_cast<int>(std::min<long>(W, n - k0));
        for (int r = 0; r < count; ++r) {
            const T* row = q + r * q_stride;
            Vec<T> acc[W] = {};
            T tail[W] = {};
            for (int i = 0; i < here; ++i) {
                const T* key = k + (k0 + i) * k_stride;
                Vec<T> a{}, b{};
                long d = 0;
                for (; d + 2 * W <= in_vectors; d += 2 * W) {
                    a += load<T>(key + d) * load<T>(row + d);
                    b += load<T>(key + d + W) * load<T>(row + d + W);
                }
                if (d < in_vectors) a += load<T>(key + d) * load<T>(row + d);
                acc[i] = a + b;
                for (d = in_vectors; d < length; ++d) tail[i] += key[d] * row[d];
            }
            transpose<T>(acc);
            Vec<T> total = load<T>(tail);
            for (int i = 0; i < W; ++i) total += acc[i];
            for (int i = 0; i < here; ++i) s[(k0 + i) * block<T> + r] = total[i];
        }
    }
}

template <class T>
class Decode {
public:
    static constexpr long run_length = 16 * keys<T>;  // keys of one task

    Decode(const Problem& p, char* memory) : Decode(p, Arena(memory)) {}
    static std::size_t bytes(const Problem& p) { return Decode(p, Arena(nullptr)).used_; }

    // The partial result of `rows` queries: row_max and sum of each, and the sums of p v, in rows of padded(E).
    static std::size_t partial_size(const Problem& p) { return p.group() * p.T * (2 + padded<T>(p.E)); }

    void run(std::int64_t b, std::int64_t key_head, long first, T* partial, const ParallelCall& parallel) {
        const int rows = static_cast<int>(p_.group() * p_.T);
        q_.set(p_, b, key_head, 0, rows);
        const long columns = padded<T>(p_.D);
        for (int n = 0; n < rows; ++n)
            widen_rows<T>(p_.type, row_of(p_.q, p_.type, b, q_.head[n], q_.row[n]), 0, 1, p_.D, columns, q_rows_ + n * columns);
        for (long i = 0; i < rows * columns; ++i) q_rows_[i] *= Scores<T>::query_factor(p_);
        // The first run starts from the sink.
        for (int n = 0; n < q_.width; ++n)
            online_.start(n, first == 0 ? Scores<T>::sink(p_, q_.head[n]) : -std::numeric_limits<T>::infinity());
        T* out = partial + 2 * rows;
        std::memset(out, 0, sizeof(T) * rows * padded<T>(p_.E));
        const Span seen = q_.all.outer.clipped(first, std::min<long>(first + run_length, p_.S));
        for (long k0 = seen.a; k0 < seen.b && !parallel.cancelled(); k0 += keys<T>) {
            const long k1 = std::min<long>(k0 + keys<T>, seen.b);
            if (scores_.prepare(q_, k0, k1)) process_key_tile(key_head, k0, k1, out);
        }
        for (int n = 0; n < rows; ++n) partial[n] = online_.row_max[n], partial[rows + n] = online_.row_sum[n];
    }

private:
    Decode(const Problem& p, Arena arena)
        : p_(p),
          q_rows_(arena.take<T>(lanes<T> * padded<T>(p.D))),
          st_(arena.take<T>(keys<T> * block<T>)),
          online_(OnlineRows<T>::take(arena)),
          k_(p.type, p.D, false, arena),
          v_(p.type, p.E, true, arena),
          scores_(p, arena),
          used_(arena.used()) {}

    void process_key_tile(std::int64_t key_head, long k0, long k1, T* out) {
        k_.load(p_.k, q_.b, key_head, k0, k1);
        v_.load(p_.v, q_.b, key_head, k0, k1);
        const long n = k1 - k0;
        dot_products<T>(q_rows_, padded<T>(p_.D), q_.count, k_.rows(), k_.stride(), n, p_.D, st_);
        for (long i = 0; i < n; ++i)
            for (int lane = q_.count; lane < q_.width; ++lane) st_[i * block<T> + lane] = 0;
        const ScoreTile<T> s{st_, k0};
        const Part part{1, 0, q_.count, {k0, k1}, q_.all.inner};
        softmax_vectors<T, 1, false>(scores_, s, part, online_, T{1});
        v_.template combine<ToScaledC>(part, s, out, online_.rescale);
    }

    const Problem& p_;
    Block<T> q_;
    T *q_rows_, *st_;
    OnlineRows<T> online_;
    KeyTile<T> k_, v_;
    Scores<T> scores_;
    std::size_t used_;
};

// The partial softmaxes of one key head, merged in the order of the keys into the first, and written out.
template <class T>
void merge_runs(const Problem& p, const ForwardResult& r, std::int64_t b, std::int64_t key_head, std::int64_t runs,
                T* partials) {
    constexpr T minus_inf = -std::numeric_limits<T>::infinity();
    const T to_log2 = static_cast<T>(log2e) / Scores<T>::unit(p);
    const std::int64_t rows = p.group() * p.T, columns = padded<T>(p.E), each = rows * (2 + columns);
    for (std::int64_t row = 0; row < rows; ++row) {
        T row_max = minus_inf, sum = 0;
        for (std::int64_t n = 0; n < runs; ++n) row_max = std::max(row_max, partials[n * each + row]);
        T* total = partials + 2 * rows + row * columns;
        for (std::int64_t n = 0; n < runs; ++n) {
            const T* part = partials + n * each;
            const T factor = std::exp2((part[row] - (row_max == minus_inf ? 0 : row_max)) * to_log2);
            sum += part[rows + row] * factor;
            const T* values = part + 2 * rows + row * columns;
            for (std::int64_t e = 0; e < columns; ++e) total[e] = (n ? total[e] : 0) + values[e] * factor;
        }
        const T inv_row_sum = sum == 0 ? 0 : 1 / sum;
        const std::int64_t at = (b * p.Hq + key_head * p.group()) * p.T + row;
        const std::int64_t to = r.out.at(p.Hq, p.T, p.E, b, key_head * p.group() + row / p.T, row % p.T);
        if (r.out) narrow_rows<T>(p.type, total, 0, 1, p.E, &inv_row_sum, r.out.data, to);
        if (r.wide_out) narrow_rows<T>(compute_type<T>, total, 0, 1, p.E, &inv_row_sum, r.wide_out, at * p.E);
        write_statistics<T>(p, r, at, 1, broadcast<T>(row_max), broadcast<T>(sum));
    }
}

template <class T>
void decode(const Problem& p, const ForwardResult& r, ParallelCall& parallel) {
    const std::int64_t heads = p.B * p.Hk,
                       runs = std::max<std::int64_t>(1, (p.S + Decode<T>::run_length - 1) / Decode<T>::run_length);
    const std::int64_t tasks = heads * runs;
    const int useful = useful_workers(4.0 * p.B * p.Hk * p.S * (p.D + p.E)), workers = parallel.workers(tasks, useful);
    const std::size_t each = Scratch::bytes<char>(Decode<T>::bytes(p)), partial = Decode<T>::partial_size(p);
    const Scratch scratch(each * workers), partials(sizeof(T) * partial * tasks);
    auto* sums = reinterpret_cast<T*>(partials.data());
    parallel.run(tasks, useful, [&](std::int64_t task, int worker) {
        const std::int64_t head = task / runs, n = task % runs;
        Decode<T>(p, scratch.data() + each * worker)
            .run(head / p.Hk, head % p.Hk, n * Decode<T>::run_length, sums + task * partial, parallel);
    });
    if (parallel.cancelled()) return;
    for (std::int64_t head = 0; head < heads; ++head)
        merge_runs<T>(p, r, head / p.Hk, head % p.Hk, runs, sums + head * runs * partial);
}

}  // namespace attngrad::ATTNGRAD_ISA
