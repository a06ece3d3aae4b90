#define ATTNGRAD_ISA wide
#define ATTNGRAD_ISA_NAME "avx2-512"
#define ATTNGRAD_VECTOR_BYTES 64
#include "kernels.hpp"

namespace attngrad {
extern const Kernels wide_kernels;
constinit const Kernels wide_kernels = wide::kernels;
}  // namespace attngrad
