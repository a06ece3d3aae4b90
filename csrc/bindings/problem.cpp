#include "bindings/problem.hpp"

#include <nanobind/stl/array.h>

#include <array>
#include <string>
#include <string_view>

namespace attngrad {

Type type_of(const Array& x) {
    using Code = nb::dlpack::dtype_code;
    const nb::dlpack::dtype d = x.dtype();
    if (d.lanes == 1 && d.code == static_cast<std::uint8_t>(Code::Float)) {
        if (d.bits == 32) return Type::f32;
        if (d.bits == 64) return Type::f64;
        if (d.bits == 16) return Type::f16;
    }
    if (d.lanes == 1 && d.code == static_cast<std::uint8_t>(Code::UInt) && d.bits == 16) return Type::bf16;
    throw nb::type_error("attngrad._native: arrays must be of float64, float32, float16 or uint16 (the bits of bfloat16).");
}

Plane plane_of(const Array& x, Type type) {
    if (!x.is_valid()) return {};
    const auto stride = [&](int axis) { return x.shape(axis) == 1 ? std::int64_t{0} : x.stride(axis); };
    return {x.data(), type, stride(0), stride(1), stride(2), stride(3)};
}

namespace {

// The value of one field, and where it goes.
struct Given {
    OwnedProblem& to;
    const char* function;
    std::string_view name;
    nb::handle value;

    [[noreturn]] void fail(const char* rule) const {
        const std::string text = std::string(function) + ": field '" + std::string(name) + "' must be " + rule + "; got " +
                                 nb::type_name(value.type()).c_str() + ".";
        throw nb::type_error(text.c_str());
    }
    template <class X>
    X as(const char* rule, bool convert = true) const {
        X x{};
        if (!nb::try_cast(value, x, convert)) fail(rule);
        return x;
    }
    // The data of an array such as X, which is kept alive.
    template <class X>
    X array(const char* rule) const {
        X x = as<X>(rule, false);
        to.alive.emplace_back(x);
        return x;
    }
};

template <auto member>
void number(const Given& given) {
    auto& x = given.to.p.*member;
    x = given.as<std::remove_reference_t<decltype(x)>>("a number in range");
}

template <auto member>
void flag(const Given& given) {
    given.to.p.*member = given.as<bool>("True or False");
}

void window(const Given& given) {
    constexpr const char* rule = "a pair of int or None";
    const auto pair = given.as<nb::tuple>(rule, false);
    if (pair.size() != 2) given.fail(rule);
    std::int64_t* ends[] = {&given.to.p.left, &given.to.p.right};
    for (int i = 0; i < 2; ++i) {
        const nb::handle end = pair[i];
        if (!end.is_none() && !nb::try_cast(end, *ends[i])) given.fail(rule);
    }
}

void offset(const Given& given) {
    OwnedProblem& to = given.to;
    if (std::int64_t same; nb::try_cast(given.value, same, false)) return to.offsets.assign(to.p.B, same);
    constexpr const char* rule = "an int or a contiguous int64 array (B,)";
    const auto each = given.as<nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(rule, false);
    if (static_cast<std::int64_t>(each.size()) != to.p.B) given.fail(rule);
    to.offsets.assign(each.data(), each.data() + to.p.B);
}

void origin(const Given& given) {
    const auto [b, h, i, j] = given.as<std::array<std::int64_t, 4>>("four ints");
    given.to.p.origin = {b, h, i, j};
}

void mask(const Given& given) {
    using Mask = nb::ndarray<const bool, nb::ndim<4>, nb::device::cpu>;
    given.to.p.mask = plane_of(Array(given.array<Mask>("a bool array of four axes")), Type::f32);
}

void bias(const Given& given) {
    const Array x(given.array<nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>>("an array of four axes"));
    given.to.p.bias = plane_of(x, type_of(x));
    if (compute_type_of(type_of(x)) != compute_type_of(given.to.p.type)) given.fail("of a type that is computed with like q");
}

void sinks(const Given& given) {
    const Array x(given.array<nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>>("an array (Hq,)"));
    given.to.p.sinks = x.data();
    if (type_of(x) != compute_type_of(given.to.p.type)) given.fail("of the compute type");
}

template <auto member>
void segments(const Given& given) {
    using Ids = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    given.to.p.*member = given.array<Ids>("a contiguous int32 array (B, length)").data();
}

struct Field {
    std::string_view name;
    void (*set)(const Given&);
    bool array = false;
};

// Every option of a call. The first ones are looked up the fastest.
constexpr Field fields_by_name[] = {
    {"scale", number<&Problem::scale>},
    {"causal", flag<&Problem::causal>},
    {"softcap", number<&Problem::softcap>},
    {"window", window},
    {"offset", offset},
    {"dropout", number<&Problem::dropout>},
    {"seed", number<&Problem::seed>},
    {"origin", origin},
    {"natural", flag<&Problem::natural>},
    {"mask", mask, true},
    {"bias", bias, true},
    {"sinks", sinks, true},
    {"q_segments", segments<&Problem::q_segments>, true},
    {"k_segments", segments<&Problem::k_segments>, true},
};

const Field& field_of(const char* function, nb::handle key) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(key.ptr()) ? PyUnicode_AsUTF8AndSize(key.ptr(), &size) : nullptr;
    if (!text && PyErr_Occurred()) throw nb::python_error();
    const std::string_view name(text ? text : "", static_cast<std::size_t>(size));
    for (const Field& field : fields_by_name)
        if (field.name == name) return field;
    throw nb::type_error((std::string(function) + ": unknown field " + nb::repr(key).c_str() + ".").c_str());
}

}  // namespace

void OwnedProblem::set_fields(const char* function, const nb::dict& fields, bool arrays) {
    for (const auto [key, value] : fields) {
        const Field& field = field_of(function, key);
        if (field.array && !arrays)
            throw nb::type_error((std::string(function) + ": field " + nb::repr(key).c_str() + " takes an array.").c_str());
        field.set({*this, function, field.name, value});
    }
    if (!(p.dropout >= 0 && p.dropout < 1))
        throw nb::value_error((std::string(function) + ": dropout must be in [0, 1).").c_str());
    if (!p.banded()) return;
    if (offsets.empty()) offsets.assign(p.B, p.S - p.T);
    p.offset = offsets.data();
}

}  // namespace attngrad
