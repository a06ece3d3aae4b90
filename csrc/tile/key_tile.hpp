// A tile of rows of k or v, or of their tangents: read where it lies, or widened; and the two products that it enters.
#pragma once

#include "tile/product.hpp"
#include "tile/scores.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class T>
class KeyTile {
public:
    // `whole`: rows of whole vectors, as combine() needs them; zero past the end.
    KeyTile(Type type, long length, bool whole, Cutter& cut)
        : type_(type),
          length_(length),
          columns_(whole ? padded<T>(length) : length),
          whole_(whole),
          buffer_(whole || type != compute_type<T> ? cut.template take<T>(keys<T> * columns_) : nullptr) {}

    // Rows k0 .. k1 of one head.
    void load(const Rows& x, std::int64_t b, std::int64_t head, long k0, long k1) {
        k0_ = k0;
        // combine() reads the tile again and again: it must not lie at a stride that the cache cannot hold.
        if (type_ == compute_type<T> && (!whole_ || x.row == columns_)) {
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

    // out[key][lane] = sum over features of row[key][feature] * lanes[feature][lane], for the keys of the span. A long sum
    // is a sum of shorter ones: large scores need the digits.
    template <class To>
    ATTNGRAD_INLINE void dots(int vectors, Span span, const T* lanes, T* out) const {
        const T* rows = rows_ + (span.a - k0_) * stride_;
        const long n = span.b - span.a, parts = std::max(1L, (length_ + 31) / 32), step = (length_ + parts - 1) / parts;
        product<T, Order::RowMajor, To>(vectors, n, std::min(step, length_), rows, stride_, lanes, block<T>, out, block<T>);
        for (long i = step; i < length_; i += step)
            product<T, Order::RowMajor, ToC>(vectors, n, std::min(step, length_ - i), rows + i, stride_, lanes + i * block<T>,
                                             block<T>, out, block<T>);
    }
    // out[lane][feature] = sum over the keys of the span of weights[key][lane] * row[key][feature], for `count` lanes; rows of
    // `out` are whole vectors. The features go in strips of about the same width, as few as the registers allow.
    template <class To>
    ATTNGRAD_INLINE void combine(int count, Span span, const T* weights, T* out, const T* factor = nullptr) const {
        constexpr bool scaled = std::is_same_v<To, ScaledToZero>;  // scaled when all is added
        const long strips = (columns_ + strip<T> - 1) / strip<T>;
        const long wide = strips ? padded<T>((columns_ + strips - 1) / strips) : 1;
        // Rows wider than a strip lie at a stride: half a tile of them is what the first cache can hold.
        const long n = span.b - span.a, half = strips > 1 ? std::min<long>(n, keys<T> / 2) : n;
        const T* rows = rows_ + (span.a - k0_) * stride_;
        for (long c = 0; c < columns_; c += wide) {
            const int vectors = static_cast<int>(std::min(wide, columns_ - c) / lanes<T>);
            const auto part = [&]<class How>(How, long k, long depth) {
                product<T, Order::ColMajor, How>(vectors, count, depth, weights + k * block<T>, block<T>,
                                                 rows + k * stride_ + c, stride_, out + c, columns_, factor);
            };
            if (half == n) {
                part(To{}, 0, n);
            } else {
                part(std::conditional_t<scaled, ToZero, To>{}, 0, half);
                part(std::conditional_t<scaled, ScaledToC, ToC>{}, half, n - half);
            }
        }
    }

private:
    Type type_;
    long length_, columns_, k0_ = 0, stride_ = 0;
    bool whole_;
    T* buffer_;
    const T* rows_ = nullptr;
};

// out[key][lane] = a . x + b . y, either of which may be missing (null): a tangent of a product. `lane` is the first lane.
template <class T>
inline void sum_of_dots(int vectors, Span span, int lane, const KeyTile<T>* a, const T* x, const KeyTile<T>* b, const T* y,
                        T* out) {
    if (a) a->template dots<ToZero>(vectors, span, x + lane, out);
    if (a && b) b->template dots<ToC>(vectors, span, y + lane, out);
    if (!a && b) b->template dots<ToZero>(vectors, span, y + lane, out);
    if (a || b) return;
    for (long k = 0; k < span.b - span.a; ++k)
        for (int v = 0; v < vectors; ++v) store<T>(out + k * block<T> + v * lanes<T>, Vec<T>{});
}

}  // namespace attngrad::ATTNGRAD_ISA
