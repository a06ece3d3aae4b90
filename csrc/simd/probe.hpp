// What the machine can do: multiply-adds from registers, and reading memory. The yardsticks of the benchmarks.
#pragma once

#include "simd/vec.hpp"

namespace attngrad::ATTNGRAD_ISA {

// `rounds` rounds of independent multiply-adds on full registers; the number of floating-point operations done.
template <class T>
double multiply_add(std::int64_t rounds) {
    constexpr int N = registers == 32 ? 24 : 12;
    Vec<T> acc[N];
    for (int i = 0; i < N; ++i) acc[i] = broadcast<T>(static_cast<T>(1e-3) * (i + 1));
    const Vec<T> x = broadcast<T>(static_cast<T>(1.0 - 1e-6)), y = broadcast<T>(static_cast<T>(1e-6));
    for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
        for (int i = 0; i < N; ++i) acc[i] = acc[i] * x + y;
    }
    volatile T sink = 0;
    for (int i = 0; i < N; ++i) sink = sink + acc[i][0];
    return 2.0 * N * lanes<T> * static_cast<double>(rounds);
}

// Read an array once.
inline double read_memory(const float* data, std::int64_t n) {
    constexpr int W = lanes<float>;
    Vec<float> a{}, b{}, c{}, d{};
    std::int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        a += load<float>(data + i);
        b += load<float>(data + i + W);
        c += load<float>(data + i + 2 * W);
        d += load<float>(data + i + 3 * W);
    }
    volatile float sink = (a + b + c + d)[0];
    (void)sink;
    return static_cast<double>(i) * sizeof(float);
}

}  // namespace attngrad::ATTNGRAD_ISA
