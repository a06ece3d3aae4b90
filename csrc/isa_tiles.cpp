#define ATTNGRAD_ISA tiles
#define ATTNGRAD_BASE wide_kernels
#define ATTNGRAD_VECTOR_BYTES 64
#define ATTNGRAD_KEYS 192
#include "matrix_kernels.hpp"

namespace attngrad {
extern const Kernels tiles_kernels;
constinit const Kernels tiles_kernels = tiles::with_tiles<true>("avx2-tiles");
}  // namespace attngrad
