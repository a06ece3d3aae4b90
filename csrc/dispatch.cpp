// The instruction sets that are compiled in, and which of them this machine has.
#include "problem.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attngrad {

extern const Kernels baseline_kernels;
#if defined(__x86_64__)
extern const Kernels amx_kernels, avx512_kernels, avx2_kernels;
extern const Kernels amx_always_kernels, wide_kernels, tiles_kernels, narrow_kernels;

namespace {

// Matrix tiles: the processor has them, the system saves them, and lets this process use them if asked.
bool has_amx() {
#if defined(__linux__)
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const bool tile = d >> 24 & 1, bf16 = d >> 22 & 1;
    constexpr long supported = 0x1021, ask = 0x1023, data = 18;  // ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM, XTILEDATA
    unsigned long features = 0;
    return tile && bf16 && syscall(SYS_arch_prctl, supported, &features) == 0 && (features >> data & 1) &&
           syscall(SYS_arch_prctl, ask, data) == 0;
#else
    return false;
#endif
}

}  // namespace
#endif

const InstructionSet* instruction_sets(int& count) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    static const bool amx = avx512 && has_amx();
    // Best first. The last four are for tests: matrix tiles at any length, on any machine; 512-bit and 128-bit code on AVX2.
    static const InstructionSet sets[] = {
        {&amx_kernels, amx},        {&avx512_kernels, avx512}, {&avx2_kernels, avx2}, {&baseline_kernels, true},
        {&amx_always_kernels, amx}, {&tiles_kernels, avx2},    {&wide_kernels, avx2}, {&narrow_kernels, avx2},
    };
#else
    static const InstructionSet sets[] = {{&baseline_kernels, true}};
#endif
    count = sizeof sets / sizeof *sets;
    return sets;
}

}  // namespace attngrad
