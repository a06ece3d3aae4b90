// From Python arguments to a Problem: arrays, and the options by name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "runtime/problem.hpp"

namespace attngrad {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

Type type_of(const Array& x);  // by its dtype; uint16 stands for the bits of bfloat16. TypeError for any other
inline Type compute_type_of(Type type) { return type == Type::f64 ? Type::f64 : Type::f32; }

inline const void* data_of(const Array& x) { return x.is_valid() ? x.data() : nullptr; }
inline void* data_of(const Output& x) { return x.is_valid() ? x.data() : nullptr; }

inline Rows rows_of(const Array& x) {
    if (!x.is_valid()) return {};
    return {x.data(), x.stride(0), x.stride(1), x.stride(2)};
}
Plane plane_of(const Array& x, Type type);

// A problem and what it points to.
struct OwnedProblem {
    Problem p;
    std::vector<std::int64_t> offsets;
    std::vector<Array> alive;

    OwnedProblem() = default;
    OwnedProblem(const OwnedProblem&) = delete;

    // `fields` has the options that differ from their defaults, by name; p has shapes and type already. An unknown name is
    // a TypeError of `function`; so is one that takes an array, unless `arrays` may be given.
    void set_fields(const char* function, const nb::dict& fields, bool arrays);
};

}  // namespace attngrad
