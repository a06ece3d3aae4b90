// The passes of 16-bit numbers on AMX tiles, and those of ATTNGRAD_BASE where there are none. CMakeLists.txt compiles
// this once for each instruction set that has them.
#include "amx/backward.hpp"
#include "amx/forward.hpp"
#include "passes/decode.hpp"
#include "runtime/dispatch.hpp"

ATTNGRAD_DECLARE_TARGET(ATTNGRAD_BASE)
ATTNGRAD_DECLARE_AMX(ATTNGRAD_ISA)

namespace attngrad::ATTNGRAD_ISA {

namespace {

constexpr const Passes& base = ATTNGRAD_BASE::float32_passes;

// Whether AMX tiles are worth their packing: short heads are faster without.
bool are_long(const Problem& p) { return p.S >= (p.type == Type::bf16 ? 128 : 256) * (p.banded() ? 2 : 1); }

template <bool always>
void run_forward(const Problem& p, const ForwardResult& r, ParallelCall& parallel) {
    if ((always || are_long(p)) && p.B * p.Hq * p.T > 0 && (r.row_max || !few_queries<float>(p))) {
        if (p.type == Type::bf16) return matrix_forward<BFloat16>(p, r, parallel);
        if (p.type == Type::f16) return matrix_forward<Half>(p, r, parallel);
    }
    base.forward(p, r, parallel);
}
template <bool always>
void run_backward(const Problem& p, const BackwardProblem& g, ParallelCall& parallel) {
    if (always || are_long(p)) {
        if (p.type == Type::bf16) return matrix_backward<BFloat16>(p, g, parallel);
        if (p.type == Type::f16) return matrix_backward<Half>(p, g, parallel);
    }
    base.backward(p, g, parallel);
}
void run_forward_tangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, ParallelCall& parallel) {
    base.forward_tangent(p, t, r, parallel);
}
void run_backward_tangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, ParallelCall& parallel) {
    base.backward_tangent(p, t, g, parallel);
}

template <bool always>
constexpr Passes passes{run_forward<always>, run_backward<always>, run_forward_tangent, run_backward_tangent};

}  // namespace

// Constants: no code of this instruction set may run when a process starts, on any machine.
constinit const Passes float32_passes = passes<false>;
constinit const Passes amx_always_passes = passes<true>;

}  // namespace attngrad::ATTNGRAD_ISA
