// A key tile: rows of k or v, or of their tangents, read where they lie, or widened; and the two products that they enter.
#pragma once

#include "tile/product.hpp"
#include "tile/scores.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class T>
class KeyTile {
public:
    // `in_vectors`: rows of whole vectors, as combine() needs them; zero past the end.
    KeyTile(Type type, long length, bool in_vectors, Arena& arena)
        : type_(type),
          length_(length),
          columns_(in_vectors ? padded<T>(length) : length),
          in_vectors_(in_vectors),
          buffer_(in_vectors || type != compute_type<T> ? arena.template take<T>(keys<T> * columns_) : nullptr) {}

    // Rows k0 .. k1 of one head.
    void load(const Rows& x, std::int64_t b, std::int64_t head, long k0, long k1) {
        k0_ = k0;
        // combine() reads the rows again and again: they must not lie at a stride that the cache cannot hold.
        if (type_ == compute_type<T> && (!in_vectors_ || x.row == columns_)) {
            rows_ = row_of<T>(x, b, head, k0);
            stride_ = x.row;
            return;
        }
        widen_rows<T>(type_, row_of(x, type_, b, head, k0), x.row, k1 - k0, length_, columns_, buffer_);
        rows_ = buffer_;
        stride_ = columns_;
    }
    const T* rows() const { return rows_; }
    long stride() const { return stride_; }

    // out[key][lane] = sum over features of row[key][feature] * queries[feature][lane], for the keys and lanes of a part. A
    // long sum is a sum of shorter ones: large scores need the digits.
    template <class To>
    ATTNGRAD_INLINE void dots(const Part& part, const T* queries, ScoreTile<T> out) const {
        const Span span = part.keys;
        const T *rows = row(span.a), *columns = queries + part.lane;
        const Matrix<T, block<T>> to{out.at(span.a, part.lane)};
        const long n = span.b - span.a, parts = std::max(1L, (length_ + 31) / 32), step = (length_ + parts - 1) / parts;
        const auto add = [&]<class How>(How, long i, long depth) ATTNGRAD_LAMBDA {
            product<T, Order::RowMajor, How>(part.vectors, n, depth, Matrix<const T>{rows + i, stride_},
                                             Matrix<const T, block<T>>{columns + i * block<T>}, to);
        };
        add(To{}, 0, std::min(step, length_));
        for (long i = step; i < length_; i += step) add(ToC{}, i, std::min(step, length_ - i));
    }
    // out[lane][feature] = sum over keys of weights[key][lane] * row[key][feature], for the keys and lanes of a part; rows of
    // `out` are whole vectors. The features go in strips of about the same width, as few as the registers allow.
    template <class To>
    ATTNGRAD_INLINE void combine(const Part& part, ScoreTile<T> weights, T* out, const T* factor = nullptr) const {
        constexpr bool scaled = std::is_same_v<To, ScaledToZero>;  // scaled when all is added
        const Span span = part.keys;
        const long strips = (columns_ + strip<T> - 1) / strip<T>;
        const long width = strips ? padded<T>((columns_ + strips - 1) / strips) : 1;
        // Rows wider than a strip lie at a stride: half a key tile of them is what the first cache can hold.
        const long n = span.b - span.a, half = strips > 1 ? std::min<long>(n, keys<T> / 2) : n;
        const T *rows = row(span.a), *from = weights.at(span.a, part.lane);
        const T* factors = factor ? factor + part.lane : nullptr;
        out += part.lane * columns_;
        for (long c = 0; c < columns_; c += width) {
            const int vectors = static_cast<int>(std::min(width, columns_ - c) / lanes<T>);
            const auto add = [&]<class How>(How, long k, long depth) ATTNGRAD_LAMBDA {
                product<T, Order::ColMajor, How>(vectors, part.count, depth, Matrix<const T, block<T>>{from + k * block<T>},
                                                 Matrix<const T>{rows + k * stride_ + c, stride_}, Matrix<T>{out + c, columns_},
                                                 factors);
            };
            if (half == n) {
                add(To{}, 0, n);
            } else {
                add(std::conditional_t<scaled, ToZero, To>{}, 0, half);
                add(std::conditional_t<scaled, ScaledToC, ToC>{}, half, n - half);
            }
        }
    }

private:
    const T* row(long k) const { return rows_ + (k - k0_) * stride_; }

    Type type_;
    long length_, columns_, k0_ = 0, stride_ = 0;
    bool in_vectors_;
    T* buffer_;
    const T* rows_ = nullptr;
};

// out[key][lane] = a . x + b . y, either of which may be missing (null): a tangent of a product.
template <class T>
ATTNGRAD_INLINE void sum_of_dots(const Part& part, const KeyTile<T>* a, const T* x, const KeyTile<T>* b, const T* y,
                                 ScoreTile<T> out) {
    if (a) a->template dots<ToZero>(part, x, out);
    if (a && b) b->template dots<ToC>(part, y, out);
    if (!a && b) b->template dots<ToZero>(part, y, out);
    if (a || b) return;
    for (long k = part.keys.a; k < part.keys.b; ++k)
        for (int v = 0; v < part.vectors; ++v) store<T>(out.at(k, part.lane + v * lanes<T>), Vec<T>{});
}

}  // namespace attngrad::ATTNGRAD_ISA
