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

// `always`: at any length, for tests to reach all that the tiles do.
template <bool always>
inline Kernels with_tiles(const char* name) {
    Kernels x = ATTNGRAD_BASE;
    x.name = name;
    x.forward = run_forward<always>;
    x.backward = run_backward<always>;
    return x;
}

}  // namespace attngrad::ATTNGRAD_ISA
