// A module of instruction sets that nobody needs but the tests: code for 512-bit and 128-bit vectors and for AMX tiles
// that runs on any machine with AVX2; and AMX for heads of any length. It has a copy of all that is shipped, so that
// switching it on compiles none of that again; `_native.add_isas` takes its capsule.
#include <nanobind/nanobind.h>

#include <string_view>

#include "runtime/dispatch.hpp"

namespace nb = nanobind;

ATTNGRAD_DECLARE_TARGET(avx512)
ATTNGRAD_DECLARE_TARGET(avx2_512)
ATTNGRAD_DECLARE_TARGET(avx2_128)
ATTNGRAD_DECLARE_AMX(amx)
ATTNGRAD_DECLARE_AMX(avx2_tiles)

namespace attngrad {
namespace {

constexpr Kernels amx_always{"amx-always", &avx512::float64_passes, &amx::amx_always_passes, &avx512::tools};
constexpr Kernels avx2_tiles_kernels{"avx2-tiles", &avx2_512::float64_passes, &avx2_tiles::amx_always_passes, &avx2_512::tools};
constexpr Kernels avx2_512_kernels{"avx2-512", &avx2_512::float64_passes, &avx2_512::float32_passes, &avx2_512::tools};
constexpr Kernels avx2_128_kernels{"avx2-128", &avx2_128::float64_passes, &avx2_128::float32_passes, &avx2_128::tools};

bool available(std::string_view name) {
    for (const InstructionSet& set : instruction_sets())
        if (set.kernels->name == name) return set.available;
    return false;
}

std::vector<InstructionSet> test_only_sets() {
    const bool amx = available("amx"), avx2 = available("avx2");
    return {{&amx_always, amx}, {&avx2_tiles_kernels, avx2}, {&avx2_512_kernels, avx2}, {&avx2_128_kernels, avx2}};
}

}  // namespace
}  // namespace attngrad

NB_MODULE(_test_only, m) {
    static const auto sets = attngrad::test_only_sets();
    m.attr("isas") = nb::capsule(&sets, "attngrad.instruction_sets");
}
