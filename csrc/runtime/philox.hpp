// Philox4x32-10, a counter-based generator (Salmon et al., 2011): the words of a dropout mask.
// src/attngrad/core/philox.py is the readable version; the tests hold both to the published vectors.
#pragma once

#include <array>
#include <cstdint>

namespace attngrad {

using Words = std::array<std::uint32_t, 4>;

// Four words for the counter (key block, query, head, batch) under a 64-bit seed.
inline __attribute__((always_inline)) Words philox(Words c, std::uint64_t seed) {
    auto k0 = static_cast<std::uint32_t>(seed);
    auto k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t left = std::uint64_t{0xD2511F53} * c[0];
        const std::uint64_t right = std::uint64_t{0xCD9E8D57} * c[2];
        c = {static_cast<std::uint32_t>(right >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(right),
             static_cast<std::uint32_t>(left >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(left)};
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c;
}

// Where a block of scores starts in the whole: batch, query head, query, key.
struct Origin {
    std::int64_t b = 0, h = 0, i = 0, j = 0;
};

// A score is kept where its word is at least this: as often as 1 - rate.
inline std::uint32_t keep_threshold(double rate) { return static_cast<std::uint32_t>(rate * 0x1p32); }

// One row of the keep mask: keys origin.j, origin.j + 1, ... of the row at origin.
inline void keep_row(bool* keep, std::int64_t keys, Origin o, std::uint64_t seed, std::uint32_t threshold) {
    Words words{};
    for (std::int64_t n = 0; n < keys; ++n) {
        const std::int64_t j = o.j + n;
        if (n == 0 || j % 4 == 0) {
            words = philox({static_cast<std::uint32_t>(j / 4), static_cast<std::uint32_t>(o.i), static_cast<std::uint32_t>(o.h),
                            static_cast<std::uint32_t>(o.b)},
                           seed);
        }
        keep[n] = words[j % 4] >= threshold;
    }
}

}  // namespace attngrad
