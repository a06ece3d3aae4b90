// What every unit relies on. CMakeLists.txt says the same in words before anything is compiled.
#pragma once

#include <bit>
#include <limits>

#if !defined(__GNUC__)
#error "attngrad needs the vector extensions of GCC or Clang"
#endif
static_assert(sizeof(void*) == 8 && sizeof(long) == 8, "attngrad needs a 64-bit system whose long has 64 bits");
static_assert(std::endian::native == std::endian::little, "attngrad needs a little-endian processor");
static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559,
              "attngrad needs IEEE floating-point numbers");
