// What the passes are surrounded by: memory for results, dropout masks, rounding, probes of the machine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>

#include "bindings/bind.hpp"
#include "bindings/gil.hpp"
#include "bindings/problem.hpp"
#include "runtime/buffers.hpp"
#include "runtime/philox.hpp"

namespace attngrad {
namespace {

using Mask = nb::ndarray<bool, nb::shape<-1, -1, -1, -1>, nb::c_contig, nb::device::cpu>;

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

// Bytes for a result, which go back to the buffer cache when the array is freed.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> buffer(std::size_t bytes) {
    auto* owned = new Buffer(take_buffer(bytes));
    nb::capsule owner(owned, [](void* p) noexcept {
        auto* b = static_cast<Buffer*>(p);
        give_buffer(*b);
        delete b;
    });
    return {owned->data, {bytes}, owner};
}

// float32 sums, rounded to the type of `out`.
void narrow(const Array& wide, const Output& out) {
    const Type type = type_of(Array(out));
    run([&](const Kernels& kernels, ParallelCall& parallel) {
        kernels.tools->narrow(type, wide.data(), out.data(), static_cast<std::int64_t>(wide.size()), parallel);
    });
}

constexpr int all_workers = 4096;  // sleeping workers are woken, too

// What all threads do in a second of `work`, which returns how much it did.
template <class Work>
double rate_of(int threads, Work work) {
    WithoutGil without;
    ParallelCall parallel(threads, {});
    const auto start = std::chrono::steady_clock::now();
    std::atomic<std::int64_t> done{0};
    parallel.run(threads, all_workers, [&](std::int64_t task, int) { done += static_cast<std::int64_t>(work(task)); });
    return static_cast<double>(done) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Operations per second of multiply-adds.
double fma_rate(bool f64, std::int64_t rounds) {
    const Tools& tools = *g_kernels.load()->tools;
    return rate_of(g_threads, [&](std::int64_t) { return (f64 ? tools.multiply_add_f64 : tools.multiply_add_f32)(rounds); });
}

// Bytes per second read from a large array.
double read_rate(nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
    const int threads = g_threads;
    const float* first = data.data();
    const Tools& tools = *g_kernels.load()->tools;
    const auto part = static_cast<std::int64_t>(data.size()) / threads;
    return rate_of(threads, [&](std::int64_t task) { return tools.read_memory(first + task * part, part); });
}

}  // namespace

void bind_tools(nb::module_& m) {
    m.def("buffer", &buffer, nb::arg("bytes"));
    m.def("narrow", &narrow, nb::arg("wide").noconvert(), nb::arg("out").noconvert());
    m.def("fma_rate", &fma_rate, nb::arg("f64"), nb::arg("rounds"));
    m.def("read_rate", &read_rate, nb::arg("data").noconvert());
    m.def("keep_mask", &keep_mask, nb::arg("out").noconvert(), nb::arg("seed"), nb::arg("threshold"), nb::arg("b0"),
          nb::arg("h0"), nb::arg("i0"), nb::arg("j0"));
}

}  // namespace attngrad
