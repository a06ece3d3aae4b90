// The instruction sets that are compiled in, and which of them this machine has.
#include "problem.hpp"

namespace attngrad {

extern const Kernels baseline_kernels;
#if defined(__x86_64__)
extern const Kernels avx512_kernels, avx2_kernels, wide_kernels, narrow_kernels;
#endif

const InstructionSet* instruction_sets(int& count) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    // Best first. The last two run 512-bit and 128-bit code on AVX2, so that tests reach it on any machine.
    static const InstructionSet sets[] = {
        {&avx512_kernels, avx512}, {&avx2_kernels, avx2}, {&baseline_kernels, true},
        {&wide_kernels, avx2},     {&narrow_kernels, avx2},
    };
#else
    static const InstructionSet sets[] = {{&baseline_kernels, true}};
#endif
    count = sizeof sets / sizeof *sets;
    return sets;
}

}  // namespace attngrad
