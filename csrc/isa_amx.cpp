#define ATTNGRAD_ISA amx
#define ATTNGRAD_BASE avx512_kernels
#define ATTNGRAD_VECTOR_BYTES 64
#define ATTNGRAD_KEYS 192
#include "matrix_kernels.hpp"

namespace attngrad {
extern const Kernels amx_kernels, amx_always_kernels;
constinit const Kernels amx_kernels = amx::with_tiles<false>("amx");
constinit const Kernels amx_always_kernels = amx::with_tiles<true>("amx-always");
}  // namespace attngrad
