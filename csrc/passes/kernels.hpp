// All passes of one instruction set in one compute type; what the units in targets/ are made of.
#pragma once

#include "passes/backward.hpp"
#include "passes/backward_tangent.hpp"
#include "passes/decode.hpp"
#include "passes/forward_tangent.hpp"
#include "runtime/dispatch.hpp"

namespace attngrad::ATTNGRAD_ISA {

template <class T>
void any_forward(const Problem& p, const ForwardResult& r, ParallelCall& parallel) {
    if (p.B * p.Hq * p.T == 0) return;
    // A backward pass will rebuild the scores with queries in the lanes: its forward must round them identically.
    if (few_queries<T>(p) && !r.row_max) return decode<T>(p, r, parallel);
    forward<T>(p, r, parallel);
}

template <class T>
constexpr Passes passes_in{any_forward<T>, backward<T>, forward_tangent<T>, backward_tangent<T>};

}  // namespace attngrad::ATTNGRAD_ISA
