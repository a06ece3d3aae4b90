// Passes over tensors by address. For a small problem, arrays made of a framework's tensors cost more than the pass. So these
// read what `data_ptr()`, `shape` and `stride()` of a tensor say, and take the addresses of results as numbers. Results are
// contiguous; out may have other strides, its features contiguous.
#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>

#include "bindings/bind.hpp"
#include "bindings/gil.hpp"
#include "bindings/problem.hpp"
#include "runtime/buffers.hpp"

namespace attngrad {
namespace {

struct Tensor {
    Rows rows;
    std::array<std::int64_t, 4> shape{};
    bool batched = false;

    // Whether x has three or four axes, none empty or too long, with features contiguous.
    bool read(nb::handle x) {
        const nb::tuple sizes(x.attr("shape")), strides(x.attr("stride")());
        batched = sizes.size() == 4;
        if (!batched && sizes.size() != 3) return false;
        shape[0] = 1;
        std::int64_t step[4] = {};
        for (int i = batched ? 0 : 1, from = 0; i < 4; ++i, ++from) {
            shape[i] = nb::cast<std::int64_t>(sizes[from]);
            step[i] = nb::cast<std::int64_t>(strides[from]);
            if (shape[i] < 1 || shape[i] >= std::int64_t{1} << 31) return false;
        }
        rows = {reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(x.attr("data_ptr")())), step[0], step[1], step[2]};
        return rows.data && (shape[3] == 1 || step[3] == 1);
    }
};

struct TensorProblem : OwnedProblem {
    bool batched = false;

    // False where shapes or strides do not fit.
    bool read(const char* function, int type, nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields) {
        Tensor x, y, z;
        if (!x.read(q) || !y.read(k) || !z.read(v)) return false;
        if (x.batched != y.batched || x.batched != z.batched) return false;
        const bool fit = y.shape[0] == x.shape[0] && z.shape[0] == x.shape[0] && z.shape[1] == y.shape[1] &&
                         x.shape[1] % y.shape[1] == 0 && z.shape[2] == y.shape[2] && y.shape[3] == x.shape[3];
        if (!fit) return false;
        batched = x.batched;
        p.type = static_cast<Type>(type);
        std::tie(p.B, p.Hq, p.T, p.D) = std::tie(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
        std::tie(p.Hk, p.S, p.E) = std::tie(y.shape[1], y.shape[2], z.shape[3]);
        std::tie(p.q, p.k, p.v) = std::tie(x.rows, y.rows, z.rows);
        set_fields(function, fields, false);
        return true;
    }
    std::int64_t rows() const { return p.B * p.Hq * p.T; }
    std::size_t number() const { return p.type == Type::f64 ? 8 : 4; }  // bytes of the compute type
};

// What a forward pass leaves for its backward pass, in one block: out, row_max and inv_row_sum in the compute type.
struct Residuals {
    std::array<std::int64_t, 4> shape;  // of out
    bool batched;                       // or the first axis is not there
    std::size_t number, rows;
    Memory memory;

    explicit Residuals(const TensorProblem& x)
        : shape{x.p.B, x.p.Hq, x.p.T, x.p.E},
          batched(x.batched),
          number(x.number()),
          rows(static_cast<std::size_t>(x.rows())),
          memory(number * rows * static_cast<std::size_t>(x.p.E + 2)) {}

    char* out() { return memory.data(); }
    char* row_max() { return out() + number * rows * static_cast<std::size_t>(shape[3]); }
    char* inv_row_sum() { return row_max() + number * rows; }
};

constexpr const char* residuals_name = "attngrad.Residuals";

// A capsule, not a class: nanobind would report an instance that is alive when Python exits, as one on a graph may be, as a
// leak.
nb::capsule enclose(Residuals* s) {
    return {s, residuals_name, [](void* p) noexcept { delete static_cast<Residuals*>(p); }};
}
Residuals& open(const nb::capsule& saved) { return *static_cast<Residuals*>(saved.data(residuals_name)); }

// Copies of out, row_max and inv_row_sum, for a pass that takes arrays.
nb::tuple residuals_of(const nb::capsule& saved) {
    Residuals& s = open(saved);
    const std::size_t first = s.batched ? 0 : 1;
    const auto array = [&](char* from, std::size_t end) {
        std::size_t size[4], ndim = 0, bytes = s.number;
        for (std::size_t i = first; i < end; ++i) bytes *= size[ndim++] = static_cast<std::size_t>(s.shape[i]);
        auto* memory = new Memory(bytes);
        std::memcpy(memory->data(), from, bytes);
        nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<Memory*>(p); });
        const nb::dlpack::dtype type = s.number == 8 ? nb::dtype<double>() : nb::dtype<float>();
        return nb::cast(nb::ndarray<nb::numpy>(memory->data(), ndim, size, owner, nullptr, type));
    };
    return nb::make_tuple(array(s.out(), 4), array(s.row_max(), 3), array(s.inv_row_sum(), 3));
}

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// out: its address, then its strides unless it is contiguous. False where these are not as many as its axes.
bool read(const nb::tuple& x, bool batched, ResultRows& result) {
    if (!x.size()) return false;
    result = at(nb::cast<std::uintptr_t>(x[0]));
    const std::size_t axes = x.size() - 1;
    if (!axes) return true;
    if (axes != (batched ? 4 : 3)) return false;
    if (batched) result.b = nb::cast<std::int64_t>(x[1]);
    result.h = nb::cast<std::int64_t>(x[axes - 2]);
    result.row = std::max<std::int64_t>(1, nb::cast<std::int64_t>(x[axes - 1]));
    return true;
}

// What was saved, or None where it was not to be; False where shapes or strides do not fit. `lse` may be 0.
nb::object forward_by_address(int type, nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields, const nb::tuple& out,
                              std::uintptr_t lse, bool save) {
    TensorProblem x;
    ForwardResult r;
    if (!x.read("attngrad._native.forward_by_address", type, q, k, v, fields)) return nb::bool_(false);
    if (!read(out, x.batched, r.out)) return nb::bool_(false);
    Memory rows(lse ? 0 : x.number() * static_cast<std::size_t>(x.rows()));  // for an lse that nobody wants
    r.lse = lse ? at(lse) : rows.data();
    nb::object saved = nb::none();
    if (save) {
        auto* s = new Residuals(x);
        saved = enclose(s);
        r = {r.out, s->out(), r.lse, s->row_max(), s->inv_row_sum()};
    }
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(x.p.type).forward(x.p, r, parallel); });
    return saved;
}

// dlse, dq, dk and dv are contiguous; false where the tensors are not those of the forward pass.
bool backward_by_address(const nb::capsule& saved, int type, nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields,
                         nb::handle dout, std::uintptr_t dlse, std::uintptr_t dq, std::uintptr_t dk, std::uintptr_t dv) {
    Residuals& s = open(saved);
    TensorProblem x;
    Tensor d;
    if (!x.read("attngrad._native.backward_by_address", type, q, k, v, fields)) return false;
    if (s.shape != std::array{x.p.B, x.p.Hq, x.p.T, x.p.E} || s.batched != x.batched) return false;
    if (!dout.is_none() && !(d.read(dout) && d.shape == s.shape)) return false;
    Memory delta(x.number() * static_cast<std::size_t>(x.rows()));
    const BackwardProblem g{d.rows, at(dlse),     s.out(), s.row_max(), s.inv_row_sum(), at(dq), at(dk),
                            at(dv), delta.data(), {},      false};
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(x.p.type).backward(x.p, g, parallel); });
    return true;
}

}  // namespace

void bind_by_address(nb::module_& m) {
    m.def("forward_by_address", &forward_by_address, nb::arg("type"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
          nb::arg("fields"), nb::arg("out"), nb::arg("lse"), nb::arg("save"));
    m.def("backward_by_address", &backward_by_address, nb::arg("saved"), nb::arg("type"), nb::arg("q"), nb::arg("k"),
          nb::arg("v"), nb::arg("fields"), nb::arg("dout").none(), nb::arg("dlse"), nb::arg("dq"), nb::arg("dk"),
          nb::arg("dv"));
    m.def("residuals_of", &residuals_of, nb::arg("saved"));
}

}  // namespace attngrad
