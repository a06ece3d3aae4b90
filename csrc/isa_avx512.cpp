#define ATTNGRAD_ISA avx512
#define ATTNGRAD_ISA_NAME "avx512"
#define ATTNGRAD_VECTOR_BYTES 64
#include "kernels.hpp"

namespace attngrad {
extern const Kernels avx512_kernels;
constinit const Kernels avx512_kernels = avx512::kernels;
}  // namespace attngrad
