// What the backward passes add up over queries: the gradients of k, v and bias, in a fixed order of additions.
#pragma once

#include "tile/product.hpp"
#include "tile/scores.hpp"

namespace attngrad::ATTNGRAD_ISA {

// The gradient of k or v (or its tangent): summed within a key tile, then added to the result (B, Hk, S, length). Where
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
          partial_(arena.take<T>(keys<T> * padded<T>(length))),
          factor_(arena.fill<T>(keys<T>, factor)) {}

    // Numbers per key that are kept from chunk to chunk outside the result, and where.
    long kept() const { return rounds_ && result_ ? length_ : 0; }
    void keep_in(T* sums) { sums_ = sums; }

    // A key tile, whose rows of the result start at `first_row`. `alone`: every row is added to once at most, in order.
    void start(std::int64_t first_row, long rows, bool alone) {
        if (!result_) return;
        first_ = first_row * length_;
        rows_ = rows;
        written_ = 0;
        summed_ = false;
        alone_ = !rounds_ && alone && length_ == columns_;
    }

    // Rows of the keys of a run += weights^T b, with b, a row for each query, in strips.
    void add(const KeyRun& run, ScoreTile<T> weights, const T* b) {
        if (!result_) return;
        const long row = run.keys.a - weights.k0, rows = run.keys.b - run.keys.a;
        if (alone_) {
            write_zeros(row);
            add_to<ScaledToZero>(run, weights, b, numbers() + row * length_);
            written_ = row + rows;
        } else if (!summed_ && rows == rows_) {
            add_to<ToZero>(run, weights, b, partial_);
        } else {
            if (!summed_) std::memset(partial_, 0, sizeof(T) * rows_ * columns_);
            add_to<ToC>(run, weights, b, partial_ + row * columns_);
        }
        summed_ = true;
    }

    // Where to add to the partial sum, rows of whole vectors; null where there is no result.
    T* sums() {
        if (!result_) return nullptr;
        if (!summed_) std::memset(partial_, 0, sizeof(T) * keys<T> * columns_);
        summed_ = true;
        return partial_;
    }

    // The partial sum to the result: the first chunk writes (zeros where it saw nothing), the others add.
    void write(bool first, bool last) {
        if (!result_) return;
        if (alone_ || (first && !summed_ && (last || !rounds_))) return write_zeros(rows_);
        if (!rounds_) return add_partial(first, numbers());
        if (!last) return add_partial(first, sums_ + first_);
        if (!summed_) std::memset(partial_, 0, sizeof(T) * rows_ * columns_);
        const T *sums = sums_ + first_, factor = factor_[0];
        T* partial = partial_;
        for (long k = 0; k < rows_; ++k, sums += length_, partial += columns_) {
            if (first) {
                for (long i = 0; i < length_; ++i) partial[i] *= factor;
            } else {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) partial[i] = sums[i] + factor * partial[i];
            }
        }
        narrow_rows<T>(type_, partial_, columns_, rows_, length_, nullptr, result_, first_);
    }

private:
    T* numbers() const { return static_cast<T*>(result_) + first_; }  // of a result in the compute type

    void write_zeros(long end) {
        const std::int64_t size = size_of(type_), at = first_ + written_ * length_;
        if (written_ < end) std::memset(static_cast<char*>(result_) + at * size, 0, size * (end - written_) * length_);
    }

    // The partial sum to sums in the compute type, or added to what earlier chunks have left there.
    void add_partial(bool first, T* to) {
        if (!summed_ && !first) return;
        if (!summed_) std::memset(partial_, 0, sizeof(T) * rows_ * columns_);
        const T *partial = partial_, factor = factor_[0];
        for (long k = 0; k < rows_; ++k, to += length_, partial += columns_) {
            if (first) {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) to[i] = factor * partial[i];
            } else {
#pragma GCC ivdep
                for (long i = 0; i < length_; ++i) to[i] += factor * partial[i];
            }
        }
    }

    template <class To>
    void add_to(const KeyRun& run, ScoreTile<T> weights, const T* b, T* to) {
        const Matrix<const T, block<T>> a{weights.at(run.keys.a, run.q0)};
        for (long c = 0; c < columns_; c += strip<T>) {
            const long width = std::min<long>(strip<T>, columns_ - c);
            product<T, Order::RowMajor, To>(static_cast<int>(width / lanes<T>), run.keys.b - run.keys.a, run.q1 - run.q0, a,
                                            Matrix<const T>{b + c * block<T> + run.q0 * width, width},
                                            Matrix<T>{to + c, columns_}, factor_);
        }
    }

    Type type_;
    bool rounds_;  // the result is of fewer bits than the sums
    long length_, columns_, rows_ = 0, written_ = 0;
    std::int64_t first_ = 0;  // where the rows of the key tile start in the result
    void* result_;
    T *sums_ = nullptr, *partial_, *factor_;  // factor: the same for every row
    bool summed_ = false, alone_ = false;
};

// The gradient of the bias (R5) or its tangent (H8): Omega summed over the axes that the bias was broadcast along. Sums
// within the score tile come first.
template <class T>
class BiasSum {
public:
    // `omega` is the score tile where the pass leaves Omega. Where every score has a number of its own (`alone`), the result
    // is written, and may hold anything before; else it is added to.
    BiasSum(const Plane& out, bool alone, T* omega, int blocks, Arena& arena)
        : out_(out),
          alone_(alone),
          omega_(omega),
          row_sums_(out && out.s == 0 ? arena.take<T>(blocks * block<T>) : nullptr) {}

    T* omega() const { return omega_; }
    bool along_keys() const { return out_.s == 0; }  // one number for all keys: added up over all key tiles first

    void start(int n) {
        if (row_sums_) std::memset(row_sums_ + n * block<T>, 0, sizeof(T) * block<T>);
    }

    void sum_rows(int n, const Block<T>& q, long rows) {
        for (int lane = 0; lane < q.width; lane += lanes<T>) {
            Vec<T> sum{};
            for (long k = 0; k < rows; ++k) sum += load<T>(omega_ + k * block<T> + lane);
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

    // A key tile that was skipped.
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
                    for (int i = 0; i < W; ++i) m[i] = load<T>(omega_ + (k + i) * block<T> + lane);
                    transpose<T>(m);
                    for (int i = 0; i < W; ++i) {
                        T* row = row_of(q, lane + i) + first + k;
                        store<T>(row, alone_ ? m[i] : load<T>(row) + m[i]);
                    }
                }
                for (; k < n; ++k)
                    for (int i = 0; i < W; ++i) add(row_of(q, lane + i)[first + k], omega_[k * block<T> + lane + i]);
            }
        }
        for (int run; lane < q.count; lane = run) {
            T* row = row_of(q, lane) + first;
            run = end_of_run(q, lane);
            for (long k = 0; k < n; ++k) {
                T sum = 0;
                for (int i = lane; i < run; ++i) sum += omega_[k * block<T> + i];
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
    T *omega_, *row_sums_;
};

}  // namespace attngrad::ATTNGRAD_ISA
