// The instruction sets that are compiled in.
#pragma once

#include <vector>

#include "runtime/problem.hpp"

namespace attngrad {

struct InstructionSet {
    const Kernels* kernels;
    bool available;  // on this machine
};

// Best first. Whoever appends to it (the module of the test-only sets does) does so before any other thread reads it.
std::vector<InstructionSet>& instruction_sets();

}  // namespace attngrad

// What targets/ defines for an instruction set.
#define ATTNGRAD_DECLARE_TARGET(isa)                    \
    namespace attngrad::isa {                           \
    extern const Passes float64_passes, float32_passes; \
    extern const Tools tools;                           \
    }
// And for one with AMX tiles: for long heads of 16-bit numbers; for heads of any length, which the tests use.
#define ATTNGRAD_DECLARE_AMX(isa)                          \
    namespace attngrad::isa {                              \
    extern const Passes float32_passes, amx_always_passes; \
    }
