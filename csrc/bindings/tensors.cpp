// Passes over a framework's tensors, read where they lie by DLPack's C exchange API. For a small problem, arrays made of the
// tensors cost more than the pass; and in a model, where attention's own code has left the caches, so do the attributes of
// tensors read through Python.
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

// DLPackExchangeAPI of DLPack 1, which a framework has as `__dlpack_c_exchange_api__` of its tensor type.
struct Exchange {
    std::uint32_t major, minor;
    const Exchange* older;
    void *allocate, *own, *give;
    int (*read)(void* tensor, nb::dlpack::dltensor* out);  // 0, or -1 with a Python exception; may be missing
    void* stream;
};
const Exchange* g_exchange = nullptr;

// Whether tensors can be read by it.
bool set_exchange(const nb::capsule& api) {
    const auto* given = static_cast<const Exchange*>(api.data("dlpack_exchange_api"));
    while (given && given->major != 1) given = given->older;
    g_exchange = given && given->read ? given : nullptr;
    return g_exchange;
}

struct Tensor {
    Rows rows;
    std::array<std::int64_t, 4> shape{};
    int axes = 0;
    Type type{};

    // Whether x is on the CPU, of a dtype of ours, with three or four axes (`missing`: fewer by so many), none empty or too
    // long, and with the last contiguous.
    bool read(nb::handle x, int missing = 0) {
        nb::dlpack::dltensor t;
        if (!g_exchange || g_exchange->read(x.ptr(), &t)) {
            PyErr_Clear();  // not strided: the way over arrays says what is wrong
            return false;
        }
        axes = t.ndim + missing;
        if (t.device.device_type != nb::device::cpu::value || (axes != 3 && axes != 4) || !t.strides || !known(t.dtype))
            return false;
        shape.fill(1);
        std::int64_t step[4] = {};
        for (int i = 4 - axes, from = 0; from < t.ndim; ++i, ++from) {
            shape[i] = t.shape[from];
            step[i] = t.strides[from];
            if (shape[i] < 1 || shape[i] >= std::int64_t{1} << 31) return false;
        }
        rows = {static_cast<const char*>(t.data) + t.byte_offset, step[0], step[1], step[2]};
        return t.data && (missing || shape[3] == 1 || step[3] == 1);
    }

private:
    bool known(const nb::dlpack::dtype& d) {
        using Code = nb::dlpack::dtype_code;
        const auto code = static_cast<Code>(d.code);
        if (d.lanes != 1) return false;
        if (code == Code::Float && d.bits == 64) return type = Type::f64, true;
        if (code == Code::Float && d.bits == 32) return type = Type::f32, true;
        if (code == Code::Float && d.bits == 16) return type = Type::f16, true;
        return code == Code::Bfloat && d.bits == 16 ? type = Type::bf16, true : false;
    }
};

struct TensorProblem : OwnedProblem {
    bool batched = false;

    // False where dtypes, shapes or strides do not fit.
    bool read(const char* function, nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields) {
        Tensor x, y, z;
        if (!x.read(q) || !y.read(k) || !z.read(v)) return false;
        if (x.axes != y.axes || x.axes != z.axes || x.type != y.type || x.type != z.type) return false;
        const bool fit = y.shape[0] == x.shape[0] && z.shape[0] == x.shape[0] && z.shape[1] == y.shape[1] &&
                         x.shape[1] % y.shape[1] == 0 && z.shape[2] == y.shape[2] && y.shape[3] == x.shape[3];
        if (!fit) return false;
        batched = x.axes == 4;
        p.type = x.type;
        std::tie(p.B, p.Hq, p.T, p.D) = std::tie(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
        std::tie(p.Hk, p.S, p.E) = std::tie(y.shape[1], y.shape[2], z.shape[3]);
        std::tie(p.q, p.k, p.v) = std::tie(x.rows, y.rows, z.rows);
        set_fields(function, fields, false);
        return true;
    }
    std::int64_t rows() const { return p.B * p.Hq * p.T; }
    std::size_t number() const { return p.type == Type::f64 ? 8 : 4; }  // bytes of the compute type
    std::array<std::int64_t, 4> out_shape() const { return {p.B, p.Hq, p.T, p.E}; }
};

// What a forward pass leaves for its backward pass, in one block: out, row_max and inv_row_sum in the compute type.
struct Residuals {
    std::array<std::int64_t, 4> shape;  // of out
    Type type;
    bool batched;  // or the first axis is not there
    std::size_t number, rows;
    Memory memory;

    explicit Residuals(const TensorProblem& x)
        : shape(x.out_shape()),
          type(x.p.type),
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

// Where a result or a cotangent of one number per row, or None, lies: contiguous, which the caller sees to.
void* data_of(nb::handle x, int missing = 0) {
    Tensor t;
    if (x.is_none() || !t.read(x, missing)) return nullptr;
    return const_cast<void*>(t.rows.data);
}

// out as the kernels write it; false where they cannot.
bool read(nb::handle x, const TensorProblem& problem, ResultRows& result) {
    Tensor out;
    if (!out.read(x) || out.shape != problem.out_shape() || out.type != problem.p.type) return false;
    const auto& [b, h, t, e] = out.shape;
    const Rows& rows = out.rows;
    result = const_cast<void*>(rows.data);
    if ((t == 1 || rows.row == e) && (h == 1 || rows.h == t * e) && (b == 1 || rows.b == h * t * e)) return true;  // contiguous
    result.b = rows.b;
    result.h = rows.h;
    result.row = std::max<std::int64_t>(1, rows.row);
    return true;
}

Loan openmp(int threads) { return threads > 0 ? Loan{Lender::openmp, threads} : Loan{}; }

// What was saved, or None where it was not to be; False where dtypes, shapes or strides do not fit.
nb::object forward_of_tensors(nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields, nb::handle out, nb::handle lse,
                              bool save, int threads) {
    TensorProblem x;
    ForwardResult r;
    if (!x.read("attngrad._native.forward_of_tensors", q, k, v, fields) || !read(out, x, r.out)) return nb::bool_(false);
    Memory rows(lse.is_none() ? x.number() * static_cast<std::size_t>(x.rows()) : 0);  // for an lse that nobody wants
    r.lse = lse.is_none() ? rows.data() : data_of(lse, 1);
    nb::object saved = nb::none();
    if (save) {
        auto* s = new Residuals(x);
        saved = enclose(s);
        r = {r.out, s->out(), r.lse, s->row_max(), s->inv_row_sum()};
    }
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(x.p.type).forward(x.p, r, parallel); },
        openmp(threads));
    return saved;
}

// dlse, dq, dk and dv are contiguous; false where the tensors are not those of the forward pass.
bool backward_of_tensors(const nb::capsule& saved, nb::handle q, nb::handle k, nb::handle v, const nb::dict& fields,
                         nb::handle dout, nb::handle dlse, nb::handle dq, nb::handle dk, nb::handle dv, int threads) {
    Residuals& s = open(saved);
    TensorProblem x;
    Tensor d;
    if (!x.read("attngrad._native.backward_of_tensors", q, k, v, fields)) return false;
    if (s.shape != x.out_shape() || s.batched != x.batched || s.type != x.p.type) return false;
    if (!dout.is_none() && !(d.read(dout) && d.shape == s.shape && d.type == s.type)) return false;
    Memory delta(x.number() * static_cast<std::size_t>(x.rows()));
    const BackwardProblem g{d.rows,      data_of(dlse, 1), s.out(), s.row_max(), s.inv_row_sum(), data_of(dq), data_of(dk),
                            data_of(dv), delta.data(),     {},      false};
    run([&](const Kernels& kernels, ParallelCall& parallel) { kernels.passes(x.p.type).backward(x.p, g, parallel); },
        openmp(threads));
    return true;
}

}  // namespace

void bind_tensors(nb::module_& m) {
    m.def("set_exchange", &set_exchange, nb::arg("api"));
    m.def("forward_of_tensors", &forward_of_tensors, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("fields"),
          nb::arg("out"), nb::arg("lse").none(), nb::arg("save"), nb::arg("threads"));
    m.def("backward_of_tensors", &backward_of_tensors, nb::arg("saved"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
          nb::arg("fields"), nb::arg("dout").none(), nb::arg("dlse").none(), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"),
          nb::arg("threads"));
    m.def("residuals_of", &residuals_of, nb::arg("saved"));
}

}  // namespace attngrad
