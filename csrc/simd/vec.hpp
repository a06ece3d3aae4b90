// SIMD by compiler vector types: the only header that knows how wide a vector is. No intrinsics.
//
// A translation unit that includes this defines ATTNGRAD_ISA (its namespace) and ATTNGRAD_VECTOR_BYTES before; the
// same source then compiles for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#define ATTNGRAD_INLINE inline __attribute__((always_inline))
#define ATTNGRAD_LAMBDA __attribute__((always_inline))

namespace attngrad::ATTNGRAD_ISA {

template <class T>
struct VecTypes;
template <>
struct VecTypes<float> {
    typedef float Vec __attribute__((vector_size(ATTNGRAD_VECTOR_BYTES)));
    typedef std::int32_t Int __attribute__((vector_size(ATTNGRAD_VECTOR_BYTES)));
    using Scalar = std::int32_t;
};
template <>
struct VecTypes<double> {
    typedef double Vec __attribute__((vector_size(ATTNGRAD_VECTOR_BYTES)));
    typedef std::int64_t Int __attribute__((vector_size(ATTNGRAD_VECTOR_BYTES)));
    using Scalar = std::int64_t;
};

template <class T>
using Vec = typename VecTypes<T>::Vec;
template <class T>
using Int = typename VecTypes<T>::Int;

template <class T>
constexpr int lanes = ATTNGRAD_VECTOR_BYTES / static_cast<int>(sizeof(T));

// Vector registers that an inner loop may fill.
#if ATTNGRAD_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int registers = 32;
#else
constexpr int registers = 16;
#endif

template <class T>
ATTNGRAD_INLINE Vec<T> broadcast(T x) {
    return x - Vec<T>{};
}
template <class T>
ATTNGRAD_INLINE Vec<T> load(const T* p) {  // any alignment
    Vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
ATTNGRAD_INLINE void store(T* p, Vec<T> v) {
    std::memcpy(p, &v, sizeof v);
}
template <class T>
ATTNGRAD_INLINE Int<T> load_lanes(const typename VecTypes<T>::Scalar* p) {
    Int<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T, int... lane>
ATTNGRAD_INLINE Int<T> lane_bits(std::integer_sequence<int, lane...>) {
    return Int<T>{(typename VecTypes<T>::Scalar{1} << lane)...};
}
template <class T>
ATTNGRAD_INLINE Int<T> from_bits(std::uint16_t bits) {  // a lane mask from one bit per lane
    const Int<T> all = Int<T>{} + static_cast<typename VecTypes<T>::Scalar>(bits);
    return (all & lane_bits<T>(std::make_integer_sequence<int, lanes<T>>{})) != 0;
}
// The larger of two; NaN in `a` gives `b`.
template <class V>
ATTNGRAD_INLINE V vmax(V a, V b) {
    return a > b ? a : b;
}

// The first `count` lanes.
template <class T>
ATTNGRAD_INLINE void store_some(T* p, Vec<T> v, int count) {
    if (count >= lanes<T>) return store<T>(p, v);
    for (int i = 0; i < count; ++i) p[i] = v[i];
}

// --- exp2, log and tanh ---------------------------------------------------------------------------------------------

// 2^x - 1 = 2^n (1 + q) - 1 with n = round(x), q = 2^(x - n) - 1 = r P(r); P fits (2^r - 1)/r on [-1/2, 1/2] to 5e-9
// (float) and 8e-18 (double).
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
    // x + magic has round(x) + 127 in its low bits: 1.5 * 2^23 makes room, 127 is the bias of the exponent.
    static constexpr float low = -126.0f, magic = 12582912.0f + 127.0f;
    static constexpr int shift = 23;
    static constexpr int degree = 5;
    static constexpr float c[degree + 1] = {0.69314718802622878106f,   0.24022650760568126945f,   0.055503571142190778186f,
                                            0.0096180825572778514913f, 0.0013390863364671234381f, 0.00015453162945120690177f};
};
template <>
struct Exp2<double> {
    static constexpr double low = -1022.0, magic = 6755399441055744.0 + 1023.0;  // likewise, from 1.5 * 2^52
    static constexpr int shift = 52;
    static constexpr int degree = 10;
    static constexpr double c[degree + 1] = {0.69314718055994530942,     0.2402265069591009822,    0.055504108664821594339,
                                             0.0096181291076068885273,   0.001333355814641693531,  0.00015403530441736050155,
                                             0.000015252733829836118394, 1.3215442587921689653e-6, 1.0178062445845773521e-7,
                                             7.0725859492692236999e-9,   4.4549605981865183938e-10};
};

template <class T>
struct Split {
    Vec<T> power, q;  // 2^n and 2^r - 1
};

template <class T>
ATTNGRAD_INLINE Split<T> split_exp2(Vec<T> x) {
    using E = Exp2<T>;
    const Vec<T> shifted = x + E::magic;
    const Vec<T> r = x - (shifted - E::magic);
    Vec<T> p = broadcast<T>(E::c[E::degree]);
#pragma GCC unroll 16
    for (int i = E::degree - 1; i >= 0; --i) p = p * r + E::c[i];
    Int<T> bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= static_cast<typename VecTypes<T>::Scalar>(E::shift);
    Split<T> out;
    std::memcpy(&out.power, &bits, sizeof bits);
    out.q = p * r;
    return out;
}

// 2^x for x below the overflow threshold; NaN stays NaN. Below 2^low it is exactly 0, -inf included, where `zero` asks
// for that (masked scores do), else 2^low.
template <class T, bool zero = true>
ATTNGRAD_INLINE Vec<T> exp2(Vec<T> x) {
    const Vec<T> low = broadcast<T>(Exp2<T>::low);
    const Split<T> e = split_exp2<T>(x < low ? low : x);
    const Vec<T> y = e.power + e.power * e.q;
    if constexpr (zero) return x < low ? Vec<T>{} : y;
    return y;
}

// The natural logarithm of a normal number: x = 2^n m with 3/4 <= m < 3/2, and log m = 2 atanh(s) with
// s = (m - 1) / (m + 1), by its series. NaN stays NaN.
template <class T>
ATTNGRAD_INLINE Vec<T> log(Vec<T> x) {
    using Scalar = typename VecTypes<T>::Scalar;
    constexpr Scalar one = (sizeof(T) == 4 ? Scalar{127} : Scalar{1023}) << Exp2<T>::shift;
    constexpr int terms = sizeof(T) == 4 ? 6 : 11;
    Int<T> bits;
    std::memcpy(&bits, &x, sizeof bits);
    const Int<T> n = (bits - one + (Scalar{1} << (Exp2<T>::shift - 1))) >> static_cast<Scalar>(Exp2<T>::shift);
    bits -= n << static_cast<Scalar>(Exp2<T>::shift);
    Vec<T> m;
    std::memcpy(&m, &bits, sizeof m);
    const Vec<T> s = (m - static_cast<T>(1)) / (m + static_cast<T>(1)), z = s * s;
    Vec<T> sum = broadcast<T>(static_cast<T>(2.0 / (2 * terms - 1)));
#pragma GCC unroll 16
    for (int i = terms - 2; i >= 0; --i) sum = sum * z + static_cast<T>(2.0 / (2 * i + 1));
    const Vec<T> y = sum * s + __builtin_convertvector(n, Vec<T>) * static_cast<T>(0.693147180559945309417L);
    return x == x ? y : x;
}

// tanh(x) and its slope 1 - tanh(x)^2, neither by a difference that cancels: with m = exp(2|x|) - 1 = 2^n q + (2^n - 1),
// |tanh| = m / (m + 2) and the slope is 4 (m + 1) / (m + 2)^2. Beyond the limit, where m would leave the range, the slope
// is 0: what it is multiplied by may be huge.
template <class T>
struct Tanh {
    Vec<T> value, slope;
};
template <class T>
ATTNGRAD_INLINE Tanh<T> tanh(Vec<T> x) {
    constexpr T two_log2e = static_cast<T>(2.88539008177792681471984936200378427L);
    const Vec<T> limit = broadcast<T>(sizeof(T) == 4 ? 43 : 350);
    const Vec<T> size = x < Vec<T>{} ? -x : x, y = size > limit ? limit : size;
    const Split<T> e = split_exp2<T>(y * two_log2e);
    const Vec<T> m = e.power * e.q + (e.power - static_cast<T>(1)), u = static_cast<T>(1) / (m + static_cast<T>(2));
    const Vec<T> t = m * u;
    const Vec<T> slope = static_cast<T>(4) * ((m + static_cast<T>(1)) * u) * u;
    return {x < Vec<T>{} ? -t : t, size > limit ? Vec<T>{} : slope};
}

}  // namespace attngrad::ATTNGRAD_ISA
