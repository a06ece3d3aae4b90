// All passes for one instruction set. Each isa_*.cpp includes this once, in its own namespace.
#pragma once

#include "backward.hpp"
#include "backward_tangent.hpp"
#include "decode.hpp"
#include "forward_tangent.hpp"
#include "probe.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class S>
inline void any_forward(const Problem& p, const ForwardResult& r, Team& team) {
    if (p.B * p.Hq * p.T == 0) return;
    // A backward pass will rebuild the scores with queries in the lanes: its forward must round them alike.
    if (few_queries<Compute<S>>(p) && !r.top) return decode<S>(p, r, team);
    forward<S>(p, r, team);
}

// f.operator()<S>() for the storage type.
template <class F>
inline void with_type(Type type, F f) {
    switch (type) {
        case Type::f64: return f.template operator()<double>();
        case Type::f32: return f.template operator()<float>();
        case Type::f16: return f.template operator()<Half>();
        case Type::bf16: return f.template operator()<BFloat16>();
    }
}

inline void run_forward(const Problem& p, const ForwardResult& r, Team& team) {
    with_type(p.type, [&]<class S>() { any_forward<S>(p, r, team); });
}
inline void run_backward(const Problem& p, const BackwardProblem& g, Team& team) {
    with_type(p.type, [&]<class S>() { backward<S>(p, g, team); });
}
inline void run_forward_tangent(const Problem& p, const Tangents& t, const ForwardTangentResult& r, Team& team) {
    with_type(p.type, [&]<class S>() { forward_tangent<S>(p, t, r, team); });
}
inline void run_backward_tangent(const Problem& p, const Tangents& t, const BackwardTangentProblem& g, Team& team) {
    with_type(p.type, [&]<class S>() { backward_tangent<S>(p, t, g, team); });
}

inline void run_narrow(Type type, const void* in, void* out, std::int64_t n, Team& team) {
    const auto* wide = static_cast<const float*>(in);
    if (type == Type::f16) narrow_array<Half>(wide, static_cast<Half*>(out), n, team);
    if (type == Type::bf16) narrow_array<BFloat16>(wide, static_cast<BFloat16*>(out), n, team);
}

inline constexpr Kernels kernels{
    ATTNGRAD_ISA_NAME,    ATTNGRAD_VECTOR_BYTES, run_forward,           run_backward, run_forward_tangent,
    run_backward_tangent, run_narrow,            multiply_add<float>, multiply_add<double>, read_memory};

}  // namespace attngrad::ATTNGRAD_ISA
