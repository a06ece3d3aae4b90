// All passes for one instruction set. Each isa_*.cpp includes this once, in its own namespace.
#pragma once

#include "backward.hpp"

namespace attngrad::ATTNGRAD_ISA {

inline void run_forward(const Problem& p, const ForwardResult& r, Team& team) {
    switch (p.type) {
        case Type::f64: return forward<double>(p, r, team);
        case Type::f32: return forward<float>(p, r, team);
        case Type::f16: return forward<Half>(p, r, team);
        case Type::bf16: return forward<BFloat16>(p, r, team);
    }
}

inline void run_backward(const Problem& p, const BackwardProblem& g, Team& team) {
    switch (p.type) {
        case Type::f64: return backward<double>(p, g, team);
        case Type::f32: return backward<float>(p, g, team);
        case Type::f16: return backward<Half>(p, g, team);
        case Type::bf16: return backward<BFloat16>(p, g, team);
    }
}

inline constexpr Kernels kernels{ATTNGRAD_ISA_NAME, ATTNGRAD_VECTOR_BYTES, run_forward, run_backward};

}  // namespace attngrad::ATTNGRAD_ISA
