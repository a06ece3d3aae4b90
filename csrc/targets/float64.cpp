// The passes of float64 for one instruction set: CMakeLists.txt compiles this once for each.
#include "passes/kernels.hpp"

ATTNGRAD_DECLARE_TARGET(ATTNGRAD_ISA)

namespace attngrad::ATTNGRAD_ISA {

constinit const Passes float64_passes = passes_in<double>;

}  // namespace attngrad::ATTNGRAD_ISA
