#define ATTNGRAD_ISA baseline
#define ATTNGRAD_ISA_NAME "baseline"
#define ATTNGRAD_VECTOR_BYTES 16
#include "kernels.hpp"

namespace attngrad {
extern const Kernels baseline_kernels;
constinit const Kernels baseline_kernels = baseline::kernels;
}  // namespace attngrad
