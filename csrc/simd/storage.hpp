// How numbers are stored: double, float, IEEE half, bfloat16; and their conversion to what is computed in.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/problem.hpp"
#include "simd/vec.hpp"

namespace attngrad {

struct Half {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};

}  // namespace attngrad

namespace attngrad::ATTNGRAD_ISA {

// The storage type that is computed with as it is.
template <class T>
constexpr Type compute_type = sizeof(T) == 8 ? Type::f64 : Type::f32;

// f.operator()<S>() for the storage type, one of those that are computed with in T.
template <class T, class F>
ATTNGRAD_INLINE void with_storage(Type type, F f) {
    if constexpr (sizeof(T) == 8) {
        f.template operator()<double>();
    } else {
        switch (type) {
            case Type::f16: return f.template operator()<Half>();
            case Type::bf16: return f.template operator()<BFloat16>();
            default: return f.template operator()<float>();
        }
    }
}

ATTNGRAD_INLINE float bits_to_float(std::uint32_t b) {
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}
ATTNGRAD_INLINE std::uint32_t float_to_bits(float f) {
    std::uint32_t b;
    std::memcpy(&b, &f, 4);
    return b;
}

ATTNGRAD_INLINE double widen(double x) { return x; }
ATTNGRAD_INLINE float widen(float x) { return x; }
ATTNGRAD_INLINE float widen(BFloat16 x) { return bits_to_float(std::uint32_t{x.bits} << 16); }
ATTNGRAD_INLINE float widen(Half x) {
    const std::uint32_t magnitude = std::uint32_t{x.bits & 0x7fffu} << 13, sign = std::uint32_t{x.bits & 0x8000u} << 16;
    // Scaling by 2^112 moves the exponent bias and normalises subnormals; infinities and NaN need their exponent back.
    const float scaled = bits_to_float(magnitude) * 0x1p112f;
    const std::uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return bits_to_float(float_to_bits(scaled) | sign | special);
}

ATTNGRAD_INLINE void narrow(double x, double& out) { out = x; }
ATTNGRAD_INLINE void narrow(float x, float& out) { out = x; }
ATTNGRAD_INLINE void narrow(float x, BFloat16& out) {  // to nearest, ties to even; NaN stays NaN
    const std::uint32_t b = float_to_bits(x);
    const std::uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (b >> 16) | 0x40u;
    out.bits = static_cast<std::uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
ATTNGRAD_INLINE void narrow(float x, Half& out) {
    const std::uint32_t b = float_to_bits(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
    // Normal: rebias and round to nearest even. Subnormal: let the addition of 2^-1 do the rounding.
    const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const std::uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    out.bits = static_cast<std::uint16_t>((magnitude >= 0x477ff000u ? large : finite) | sign);
}

}  // namespace attngrad::ATTNGRAD_ISA
