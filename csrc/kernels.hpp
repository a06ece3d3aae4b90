// All passes for one instruction set. Each isa_*.cpp includes this once, in its own namespace.
#pragma once

#include "backward.hpp"
#include "decode.hpp"
#include "probe.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class S>
inline void any_forward(const Problem& p, const ForwardResult& r, Team& team) {
    if (p.B * p.Hq * p.T == 0) return;
    // A backward pass will rebuild the scores with queries in the lanes: its forward must round them alike.
    if (few_queries<Compute<S>>(p) && !r.top) return decode<S>(p, r, team);
    forward<S>(p, r, team);
}

inline void run_forward(const Problem& p, const ForwardResult& r, Team& team) {
    switch (p.type) {
        case Type::f64: return any_forward<double>(p, r, team);
        case Type::f32: return any_forward<float>(p, r, team);
        case Type::f16: return any_forward<Half>(p, r, team);
        case Type::bf16: return any_forward<BFloat16>(p, r, team);
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

inline void run_narrow(Type type, const void* in, void* out, std::int64_t n, Team& team) {
    const auto* wide = static_cast<const float*>(in);
    if (type == Type::f16) narrow_array<Half>(wide, static_cast<Half*>(out), n, team);
    if (type == Type::bf16) narrow_array<BFloat16>(wide, static_cast<BFloat16*>(out), n, team);
}

inline constexpr Kernels kernels{ATTNGRAD_ISA_NAME, ATTNGRAD_VECTOR_BYTES, run_forward,          run_backward,
                                 run_narrow,        multiply_add<float>,   multiply_add<double>, read_memory};

}  // namespace attngrad::ATTNGRAD_ISA
