#define ATTNGRAD_ISA avx2
#define ATTNGRAD_ISA_NAME "avx2"
#define ATTNGRAD_VECTOR_BYTES 32
#include "kernels.hpp"

namespace attngrad {
extern const Kernels avx2_kernels;
constinit const Kernels avx2_kernels = avx2::kernels;
}  // namespace attngrad
