// The only file that knows Python. Arguments come checked; outputs are allocated by the caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/buffers.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/philox.hpp"
#include "runtime/thread_pool.hpp"

namespace nb = nanobind;
using namespace attngrad;

namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;
using Mask = nb::ndarray<bool, nb::shape<-1, -1, -1, -1>, nb::c_contig, nb::device::cpu>;

// Set from any thread while others compute: a call reads each once.
std::atomic<const Kernels*> g_kernels{nullptr};
std::atomic<int> g_threads{1};

// The GIL, given away for as long as this lives. CPython ends a thread that asks for it while the interpreter shuts down,
// by unwinding its stack: what the workers still read would go, and a destructor may not be unwound. Such a thread, which
// must be a daemon, sleeps instead until the process ends.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() { restore(); }
    WithoutGil(const WithoutGil&) = delete;

    // Whether a signal handler raised; the handlers run now.
    bool signalled() {
        restore();
        const bool raised = PyErr_CheckSignals() != 0;
        state_ = PyEval_SaveThread();
        return raised;
    }

private:
    void restore() noexcept {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

    PyThreadState* state_;
};

void keep_mask(Mask out, std::uint64_t seed, std::uint32_t threshold, std::int64_t b0, std::int64_t h0, std::int64_t i0,
               std::int64_t j0) {
    const auto batches = static_cast<std::int64_t>(out.shape(0)), heads = static_cast<std::int64_t>(out.shape(1));
    const auto queries = static_cast<std::int64_t>(out.shape(2)), keys = static_cast<std::int64_t>(out.shape(3));
    bool* row = out.data();
    WithoutGil without;
    for (std::int64_t b = 0; b < batches; ++b)
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t i = 0; i < queries; ++i, row += keys)
                keep_row(row, keys, {b0 + b, h0 + h, i0 + i, j0}, seed, threshold);
}

// Bytes for a result, which go back to the shelf when the array is freed.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> buffer(std::size_t bytes) {
    auto* owned = new Buffer(take_buffer(bytes));
    nb::capsule owner(owned, [](void* p) noexcept {
        auto* b = static_cast<Buffer*>(p);
        give_buffer(*b);
        delete b;
    });
    return {owned->data, {bytes}, owner};
}

Rows rows_of(const Array& x) {
    if (!x.is_valid()) return {};
    return {x.data(), x.stride(0), x.stride(1), x.stride(2)};
}

Plane plane_of(const Array& x, Type type) {
    if (!x.is_valid()) return {};
    const auto stride = [&](int axis) { return x.shape(axis) == 1 ? std::int64_t{0} : x.stride(axis); };
    return {x.data(), type, stride(0), stride(1), stride(2), stride(3)};
}

const void* data_of(const Array& x) { return x.is_valid() ? x.data() : nullptr; }
void* data_of(const Output& x) { return x.is_valid() ? x.data() : nullptr; }

// The options of a call, as one Python object that outlives it; arrays are kept alive here.
struct Call {
    Problem p;
    std::vector<std::int64_t> offsets;
    std::vector<Array> alive;

    Call(int type, Array q, Array k, Array v, double scale, double softcap, bool causal, std::int64_t left, std::int64_t right,
         std::int64_t offset, Array offset_array, Array mask, Array bias, int bias_type, Array sinks, Array q_segments,
         Array k_segments, double dropout, std::uint32_t threshold, std::uint64_t seed, std::array<std::int64_t, 4> origin) {
        p.type = static_cast<Type>(type);
        p.B = q.shape(0);
        p.Hq = q.shape(1);
        p.T = q.shape(2);
        p.D = q.shape(3);
        p.Hk = k.shape(1);
        p.S = k.shape(2);
        p.E = v.shape(3);
        p.q = rows_of(q);
        p.k = rows_of(k);
        p.v = rows_of(v);
        p.scale = scale;
        p.softcap = softcap;
        p.causal = causal;
        p.left = left;
        p.right = right;
        if (p.banded()) {
            if (offset_array.is_valid()) {
                const auto* first = static_cast<const std::int64_t*>(offset_array.data());
                offsets.assign(first, first + p.B);
            } else {
                offsets.assign(p.B, offset);
            }
            p.offset = offsets.data();
        }
        p.mask = plane_of(mask, Type::f32);
        p.bias = plane_of(bias, static_cast<Type>(bias_type));
        p.sinks = data_of(sinks);
        p.q_segments = static_cast<const std::int32_t*>(data_of(q_segments));
        p.k_segments = static_cast<const std::int32_t*>(data_of(k_segments));
        p.dropout = dropout;
        p.threshold = threshold;
        p.seed = seed;
        p.origin = {origin[0], origin[1], origin[2], origin[3]};
        for (auto& x : {q, k, v, mask, bias, sinks, q_segments, k_segments})
            if (x.is_valid()) alive.push_back(x);
    }
    Call(const Call&) = delete;
};

// Run without the GIL; look for signals now and then, and raise what they raise.
template <class Work>
void run(Work work) {
    bool cancelled = false;
    {
        WithoutGil without;
        Team team(g_threads, [&] { return without.signalled(); });
        work(*g_kernels.load(), team);
        cancelled = team.cancelled();
    }
    if (!cancelled) return;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError,
                        "attngrad: a signal handler forked in the middle of this call, whose other "
                        "threads are in the parent process. Call it again.");
    throw nb::python_error();
}

// Whether a plane has a number for every score. Then the caller need not have zeroed it.
bool has_every_score(const Problem& p, const Array& plane) {
    const std::int64_t scores[4] = {p.B, p.Hq, p.T, p.S};
    for (int axis = 0; axis < 4; ++axis)
        if (static_cast<std::int64_t>(plane.shape(axis)) != scores[axis]) return false;
    return p.S > 1;
}

ForwardResult forward_result(const Output& out, const Output& wide_out, const Output& lse, const Output& top,
                             const Output& inverse) {
    return {data_of(out), data_of(wide_out), data_of(lse), data_of(top), data_of(inverse)};
}

void forward(const Call& call, Output out, Output wide_out, Output lse, Output top, Output inverse) {
    const ForwardResult r = forward_result(out, wide_out, lse, top, inverse);
    run([&](const Kernels& kernels, Team& team) { kernels.passes(call.p.type).forward(call.p, r, team); });
}

// The directions of forward mode; arrays are kept alive here, as in Call.
struct Directions {
    Tangents t;
    std::vector<Array> alive;

    Directions(Array q, Array k, Array v, Array bias, int bias_type, Array sinks) {
        t.q = rows_of(q);
        t.k = rows_of(k);
        t.v = rows_of(v);
        t.bias = plane_of(bias, static_cast<Type>(bias_type));
        t.sinks = data_of(sinks);
        for (auto& x : {q, k, v, bias, sinks})
            if (x.is_valid()) alive.push_back(x);
    }
    Directions(const Directions&) = delete;
};

void forward_tangent(const Call& call, const Directions& directions, Output out, Output wide_out, Output lse, Output top,
                     Output inverse, Output out_dot, Output wide_out_dot, Output lse_dot, Output shift, Output mean) {
    const ForwardTangentResult r{forward_result(out, wide_out, lse, top, inverse),
                                 data_of(out_dot),
                                 data_of(wide_out_dot),
                                 data_of(lse_dot),
                                 data_of(shift),
                                 data_of(mean)};
    run([&](const Kernels& kernels, Team& team) {
        kernels.passes(call.p.type).forward_tangent(call.p, directions.t, r, team);
    });
}

BackwardProblem backward_problem(const Call& call, const Array& dout, const Array& dlse, const Array& out, const Array& top,
                                 const Array& inverse, const Output& dq, const Output& dk, const Output& dv,
                                 const Output& delta, const Array& dbias) {
    const Plane plane = plane_of(dbias, Type::f32);
    return {rows_of(dout),
            data_of(dlse),
            data_of(out),
            data_of(top),
            data_of(inverse),
            data_of(dq),
            data_of(dk),
            data_of(dv),
            data_of(delta),
            plane,
            plane && has_every_score(call.p, dbias)};
}

void backward(const Call& call, Array dout, Array dlse, Array out, Array top, Array inverse, Output dq, Output dk, Output dv,
              Output delta, Array dbias) {
    const BackwardProblem g = backward_problem(call, dout, dlse, out, top, inverse, dq, dk, dv, delta, dbias);
    run([&](const Kernels& kernels, Team& team) { kernels.passes(call.p.type).backward(call.p, g, team); });
}

void backward_tangent(const Call& call, const Directions& directions, Array dout, Array dlse, Array out, Array top,
                      Array inverse, Output dq, Output dk, Output dv, Output delta, Array dbias, Array dout_dot, Array dlse_dot,
                      Array out_dot, Array shift, Array mean, Output dq_dot, Output dk_dot, Output dv_dot, Output delta_dot,
                      Array dbias_dot) {
    const BackwardTangentProblem g{backward_problem(call, dout, dlse, out, top, inverse, dq, dk, dv, delta, dbias),
                                   rows_of(dout_dot),
                                   data_of(dlse_dot),
                                   data_of(out_dot),
                                   data_of(shift),
                                   data_of(mean),
                                   data_of(dq_dot),
                                   data_of(dk_dot),
                                   data_of(dv_dot),
                                   data_of(delta_dot),
                                   plane_of(dbias_dot, Type::f32)};
    run([&](const Kernels& kernels, Team& team) {
        kernels.passes(call.p.type).backward_tangent(call.p, directions.t, g, team);
    });
}

// --- tensors by address --------------------------------------------------------------------------------------------------
// For a small problem, arrays made of a framework's tensors cost more than the pass. So these read what `data_ptr()`,
// `shape` and `stride()` of a tensor say, and take the addresses of contiguous results as numbers.

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

// The options that are numbers.
using Numbers = std::tuple<double, double, bool, std::int64_t, std::int64_t>;

// q, k and v with the default offset; false where they are not plainly fit for one another.
struct PlainProblem {
    Problem p;
    bool batched = false;
    std::vector<std::int64_t> offsets;

    bool read(int type, nb::handle q, nb::handle k, nb::handle v, const Numbers& numbers) {
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
        std::tie(p.scale, p.softcap, p.causal, p.left, p.right) = numbers;
        if (p.banded()) {
            offsets.assign(p.B, p.S - p.T);
            p.offset = offsets.data();
        }
        return true;
    }
    std::int64_t rows() const { return p.B * p.Hq * p.T; }
    std::size_t number() const { return p.type == Type::f64 ? 8 : 4; }  // bytes of the compute type
};

// What a plain forward pass leaves for its backward pass, one after the other: out, top and inverse in the compute type.
struct PlainSaved {
    std::array<std::int64_t, 4> shape;  // of out
    bool batched;                       // or the first axis is not there
    std::size_t number, rows;
    Memory memory;

    explicit PlainSaved(const PlainProblem& x)
        : shape{x.p.B, x.p.Hq, x.p.T, x.p.E},
          batched(x.batched),
          number(x.number()),
          rows(static_cast<std::size_t>(x.rows())),
          memory(number * rows * static_cast<std::size_t>(x.p.E + 2)) {}

    char* out() { return memory.data(); }
    char* top() { return out() + number * rows * static_cast<std::size_t>(shape[3]); }
    char* inverse() { return top() + number * rows; }
};

// It travels as a capsule: an instance of a class that is alive when Python exits, as one on a graph may be, would have
// nanobind speak of leaks.
nb::capsule enclose(PlainSaved* s) {
    return {s, "attngrad.PlainSaved", [](void* p) noexcept { delete static_cast<PlainSaved*>(p); }};
}

// Copies of the three, for a pass that takes arrays.
nb::tuple plain_parts(const nb::capsule& saved) {
    auto& s = *static_cast<PlainSaved*>(saved.data("attngrad.PlainSaved"));
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
    return nb::make_tuple(array(s.out(), 4), array(s.top(), 3), array(s.inverse(), 3));
}

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// What was saved, or None where it was not to be; False where the tensors are not plainly fit. `lse` may be 0.
nb::object plain_forward(int type, nb::handle q, nb::handle k, nb::handle v, const Numbers& numbers, std::uintptr_t out,
                         std::uintptr_t lse, bool save) {
    PlainProblem x;
    if (!x.read(type, q, k, v, numbers)) return nb::bool_(false);
    Memory rows(lse ? 0 : x.number() * static_cast<std::size_t>(x.rows()));  // for an lse that nobody wants
    ForwardResult r{at(out), nullptr, lse ? at(lse) : rows.data(), nullptr, nullptr};
    nb::object saved = nb::none();
    if (save) {
        auto* s = new PlainSaved(x);
        saved = enclose(s);
        r = {at(out), s->out(), r.lse, s->top(), s->inverse()};
    }
    run([&](const Kernels& kernels, Team& team) { kernels.passes(x.p.type).forward(x.p, r, team); });
    return saved;
}

// dlse, dq, dk and dv are contiguous; false where the tensors are not those of the forward pass.
bool plain_backward(const nb::capsule& saved, int type, nb::handle q, nb::handle k, nb::handle v, const Numbers& numbers,
                    nb::handle dout, std::uintptr_t dlse, std::uintptr_t dq, std::uintptr_t dk, std::uintptr_t dv) {
    auto& s = *static_cast<PlainSaved*>(saved.data("attngrad.PlainSaved"));
    PlainProblem x;
    Tensor d;
    if (!x.read(type, q, k, v, numbers) || s.shape != std::array{x.p.B, x.p.Hq, x.p.T, x.p.E} || s.batched != x.batched)
        return false;
    if (!dout.is_none() && !(d.read(dout) && d.shape == s.shape)) return false;
    Memory delta(x.number() * static_cast<std::size_t>(x.rows()));
    const BackwardProblem g{d.rows, at(dlse), s.out(), s.top(), s.inverse(), at(dq), at(dk), at(dv), delta.data(), {}, false};
    run([&](const Kernels& kernels, Team& team) { kernels.passes(x.p.type).backward(x.p, g, team); });
    return true;
}

void narrow(int type, Array in, Output out) {
    run([&](const Kernels& kernels, Team& team) {
        kernels.tools->narrow(static_cast<Type>(type), in.data(), out.data(), static_cast<std::int64_t>(in.size()), team);
    });
}

// Operations a second of multiply-adds on all threads, and bytes a second read from a large array.
constexpr int worth_all = 4096;  // sleeping workers are woken, too

double fma_rate(bool f64, std::int64_t rounds) {
    const int threads = g_threads;
    const Tools& tools = *g_kernels.load()->tools;
    WithoutGil without;
    Team team(threads, {});
    const auto start = std::chrono::steady_clock::now();
    std::atomic<std::int64_t> done{0};
    team.run(threads, worth_all, [&](std::int64_t, int) {
        done += static_cast<std::int64_t>((f64 ? tools.multiply_add_f64 : tools.multiply_add_f32)(rounds));
    });
    return static_cast<double>(done) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double read_rate(nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
    const float* first = data.data();
    const int threads = g_threads;
    const Tools& tools = *g_kernels.load()->tools;
    const auto part = static_cast<std::int64_t>(data.size()) / threads;
    WithoutGil without;
    Team team(threads, {});
    const auto start = std::chrono::steady_clock::now();
    std::atomic<std::int64_t> done{0};
    team.run(threads, worth_all,
             [&](std::int64_t task, int) { done += static_cast<std::int64_t>(tools.read_memory(first + task * part, part)); });
    return static_cast<double>(done) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

nb::list isa_names() {
    nb::list names;
    for (const InstructionSet& set : instruction_sets())
        if (set.available) names.append(set.kernels->name);
    return names;
}

void set_isa(const std::string& name) {
    for (const InstructionSet& set : instruction_sets())
        if (set.available && name == set.kernels->name) {
            g_kernels = set.kernels;
            return;
        }
    throw nb::value_error(("no such instruction set on this machine: " + name).c_str());
}

// The sets of another module, which were compiled from the same headers.
void add_isas(const nb::capsule& sets) {
    const auto& more = *static_cast<const std::vector<InstructionSet>*>(sets.data("attngrad.instruction_sets"));
    instruction_sets().insert(instruction_sets().end(), more.begin(), more.end());
}

}  // namespace

NB_MODULE(_native, m) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main())  // where it would wait for the GIL of the main one forever
        throw nb::import_error("attngrad: cannot be imported in a sub-interpreter. Import it in the main interpreter.");
    nb::set_leak_warnings(false);  // what daemon threads work on when the interpreter ends is never freed
    for (const InstructionSet& set : instruction_sets()) {
        if (!set.available) continue;
        g_kernels = set.kernels;
        break;
    }
    g_threads = default_threads();

    m.attr("compiler") = __VERSION__;
    m.def("isa_names", &isa_names);
    m.def("isa", [] { return g_kernels.load()->name; });
    m.def("set_isa", &set_isa);
    m.def("add_isas", &add_isas, nb::arg("sets"));
    m.def("set_num_threads", [](int n) { g_threads = n; });
    m.def("get_num_threads", [] { return g_threads.load(); });
    m.def("buffer", &buffer, nb::arg("bytes"));
    m.def("narrow", &narrow, nb::arg("kind"), nb::arg("wide").noconvert(), nb::arg("out").noconvert());
    m.def("plain_forward", &plain_forward, nb::arg("kind"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("numbers"),
          nb::arg("out"), nb::arg("lse"), nb::arg("save"));
    m.def("plain_parts", &plain_parts, nb::arg("saved"));
    m.def("plain_backward", &plain_backward, nb::arg("saved"), nb::arg("kind"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
          nb::arg("numbers"), nb::arg("dout").none(), nb::arg("dlse"), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"));
    m.def("fma_rate", &fma_rate, nb::arg("f64"), nb::arg("rounds"));
    m.def("read_rate", &read_rate, nb::arg("data").noconvert());
    m.def("keep_mask", &keep_mask, nb::arg("out").noconvert(), nb::arg("seed"), nb::arg("threshold"), nb::arg("b0"),
          nb::arg("h0"), nb::arg("i0"), nb::arg("j0"));

    const auto none = [](const char* name) { return nb::arg(name).noconvert().none(); };
    nb::class_<Call>(m, "Call")
        .def(nb::init<int, Array, Array, Array, double, double, bool, std::int64_t, std::int64_t, std::int64_t, Array, Array,
                      Array, int, Array, Array, Array, double, std::uint32_t, std::uint64_t, std::array<std::int64_t, 4>>(),
             nb::arg("kind"), nb::arg("q").noconvert(), nb::arg("k").noconvert(), nb::arg("v").noconvert(), nb::arg("scale"),
             nb::arg("softcap") = 0.0, nb::arg("causal") = false, nb::arg("left") = -1, nb::arg("right") = -1,
             nb::arg("offset") = 0, none("offset_array") = nb::none(), none("mask") = nb::none(), none("bias") = nb::none(),
             nb::arg("bias_type") = 1, none("sinks") = nb::none(), none("q_segments") = nb::none(),
             none("k_segments") = nb::none(), nb::arg("dropout") = 0.0, nb::arg("threshold") = 0, nb::arg("seed") = 0,
             nb::arg("origin") = std::array<std::int64_t, 4>{})
        .def("forward", &forward, none("out"), none("wide_out"), none("lse"), none("top"), none("inverse"))
        .def("backward", &backward, none("dout"), none("dlse"), none("out"), none("top"), none("inverse"), none("dq"),
             none("dk"), none("dv"), none("delta"), none("dbias"))
        .def("forward_tangent", &forward_tangent, nb::arg("directions"), none("out"), none("wide_out"), none("lse"),
             none("top"), none("inverse"), none("out_dot"), none("wide_out_dot"), none("lse_dot"), none("shift"), none("mean"))
        .def("backward_tangent", &backward_tangent, nb::arg("directions"), none("dout"), none("dlse"), none("out"), none("top"),
             none("inverse"), none("dq"), none("dk"), none("dv"), none("delta"), none("dbias"), none("dout_dot"),
             none("dlse_dot"), none("out_dot"), none("shift"), none("mean"), none("dq_dot"), none("dk_dot"), none("dv_dot"),
             none("delta_dot"), none("dbias_dot"));
    nb::class_<Directions>(m, "Directions")
        .def(nb::init<Array, Array, Array, Array, int, Array>(), none("q"), none("k"), none("v"), none("bias"),
             nb::arg("bias_type"), none("sinks"));
}
