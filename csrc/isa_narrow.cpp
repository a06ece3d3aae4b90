#define ATTNGRAD_ISA narrow
#define ATTNGRAD_ISA_NAME "avx2-128"
#define ATTNGRAD_VECTOR_BYTES 16
#include "kernels.hpp"

namespace attngrad {
extern const Kernels narrow_kernels;
constinit const Kernels narrow_kernels = narrow::kernels;
}  // namespace attngrad
