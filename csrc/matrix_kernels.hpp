// The passes of 16-bit numbers on matrix tiles, and all others as ATTNGRAD_BASE has them. Each isa_*.cpp that has tiles
// includes this once, in its own namespace.
#pragma once

#include "decode.hpp"
#include "matrix_backward.hpp"
#include "matrix_forward.hpp"

namespace attngrad {
extern const Kernels ATTNGRAD_BASE;
}

namespace attngrad::ATTNGRAD_ISA {

// Whether the tiles are worth their packing: short heads are faster without.
inline bool are_long(const Problem& p) { return p.S >= (p.type == Type::bf16 ? 128 : 256) * (p.banded() ? 2 : 1); }

template <bool always>
inline void run_forward(const Problem& p, const ForwardResult& r, Team& team) {
    if ((always || are_long(p)) && p.B * p.Hq * p.T > 0 && (r.top || !few_queries<float>(p))) {
        if (p.type == Type::bf16) return matrix_forward<BFloat16>(p, r, team);
        if (p.type == Type::f16) return matrix_forward<Half>(p, r, team);
    }
    ATTNGRAD_BASE.forward(p, r, team);
}
template <bool always>
inline void run_backward(const Problem& p, const BackwardProblem& g, Team& team) {
    if (always || are_long(p)) {
        if (p.type == Type::bf16) return matrix_backward<BFloat16>(p, g, team);
        if (p.type == Type::f16) return matrix_backward<Half>(p, g, team);
    }
    ATTNGRAD_BASE.backward(p, g, team);
}

inline void run_forward_tangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, Team& team) {
    ATTNGRAD_BASE.forward_tangent(p, t, r, team);
}
inline void run_backward_tangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, Team& team) {
    ATTNGRAD_BASE.backward_tangent(p, t, g, team);
}
inline void run_narrow(Type type, const void* in, void* out, std::int64_t n, Team& team) {
    ATTNGRAD_BASE.narrow(type, in, out, n, team);
}
inline double multiply_add_f32(std::int64_t rounds) { return ATTNGRAD_BASE.multiply_add_f32(rounds); }
inline double multiply_add_f64(std::int64_t rounds) { return ATTNGRAD_BASE.multiply_add_f64(rounds); }
inline double read_floats(const float* data, std::int64_t n) { return ATTNGRAD_BASE.read_memory(data, n); }

// `always`: at any length, for tests to reach all that the tiles do. A constant: no code of this instruction set may run when a
// process starts, on any machine.
template <bool always>
constexpr Kernels with_tiles(const char* name) {
    return {name,
            ATTNGRAD_VECTOR_BYTES,
            run_forward<always>,
            run_backward<always>,
            run_forward_tangent,
            run_backward_tangent,
            run_narrow,
            multiply_add_f32,
            multiply_add_f64,
            read_floats};
}

}  // namespace attngrad::ATTNGRAD_ISA
