// The passes of float32, float16 and bfloat16 for one instruction set: CMakeLists.txt compiles this once for each.
#include "passes/kernels.hpp"
#include "simd/probe.hpp"

ATTNGRAD_DECLARE_TARGET(ATTNGRAD_ISA)

namespace attngrad::ATTNGRAD_ISA {

namespace {

void narrow_any(Type type, const void* in, void* out, std::int64_t n, ParallelCall& parallel) {
    narrow_array<float>(type, static_cast<const float*>(in), out, n, parallel);
}

}  // namespace

constinit const Passes float32_passes = passes_in<float>;
constinit const Tools tools{narrow_any, multiply_add<float>, multiply_add<double>, read_memory};

}  // namespace attngrad::ATTNGRAD_ISA
