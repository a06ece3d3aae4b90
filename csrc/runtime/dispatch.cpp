// The instruction sets that are compiled in, and which of them this machine has.
#include "runtime/dispatch.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

ATTNGRAD_DECLARE_TARGET(baseline)
#if defined(__x86_64__)
ATTNGRAD_DECLARE_TARGET(avx2)
ATTNGRAD_DECLARE_TARGET(avx512)
ATTNGRAD_DECLARE_AMX(amx)
#endif

namespace attngrad {
namespace {

constexpr Kernels baseline_kernels{"baseline", &baseline::float64_passes, &baseline::float32_passes, &baseline::tools};
#if defined(__x86_64__)
constexpr Kernels avx2_kernels{"avx2", &avx2::float64_passes, &avx2::float32_passes, &avx2::tools};
constexpr Kernels avx512_kernels{"avx512", &avx512::float64_passes, &avx512::float32_passes, &avx512::tools};
constexpr Kernels amx_kernels{"amx", &avx512::float64_passes, &amx::float32_passes, &avx512::tools};

// AMX tiles: the processor has them, the system saves them, and lets this process use them if asked.
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

#endif

std::vector<InstructionSet> compiled_in() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool amx = avx512 && has_amx();
    return {{&amx_kernels, amx}, {&avx512_kernels, avx512}, {&avx2_kernels, avx2}, {&baseline_kernels, true}};
#else
    return {{&baseline_kernels, true}};
#endif
}

}  // namespace

std::vector<InstructionSet>& instruction_sets() {
    static std::vector<InstructionSet> sets = compiled_in();
    return sets;
}

}  // namespace attngrad
