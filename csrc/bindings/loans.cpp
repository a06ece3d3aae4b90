// Workers from elsewhere, and for others: a framework's for the passes, and ours for NumPy's BLAS.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bind.hpp"
#include "bindings/gil.hpp"

namespace nb = nanobind;

namespace attngrad {
namespace {

template <class Function>
Function* at(std::uintptr_t address) {
    return reinterpret_cast<Function*>(address);
}

void set_openmp_at(std::uintptr_t parallel, std::uintptr_t fork_call, std::uintptr_t in_parallel, std::uintptr_t max_threads) {
    OpenMp runtime;
    runtime.parallel = at<std::remove_pointer_t<decltype(runtime.parallel)>>(parallel);
    runtime.fork_call = at<std::remove_pointer_t<decltype(runtime.fork_call)>>(fork_call);
    runtime.in_parallel = at<int()>(in_parallel);
    runtime.max_threads = at<int()>(max_threads);
    set_openmp(runtime);
}

void force_workers(const std::string& name) {
    if (name.empty()) {
        g_force = Force::none;
    } else if (name == "own" || name == "openmp") {
        g_force = name == "own" ? Force::own : Force::openmp;
    } else {
        throw nb::value_error("attngrad._native.force_workers: 'own', 'openmp' or ''.");
    }
}

// The passes of this thread may use so many workers of the OpenMP runtime, the thread itself among them; 0: none of them.
void borrow(int threads) { t_loan = threads > 0 ? Loan{Lender::openmp, threads} : Loan{}; }

nb::dict worker_runs() {
    nb::dict runs;
    constexpr const char* names[lenders] = {"alone", "own", "openmp"};
    for (int i = 0; i < lenders; ++i) runs[names[i]] = runs_by(static_cast<Lender>(i)).load();
    return runs;
}

// What OpenBLAS calls to have its jobs done: openblas_threads_callback.
void run_blas(int, void (*job)(int, void*, int), int count, std::size_t size, void* data, int more) {
    run_together(count, [&](int i) { job(i, static_cast<char*>(data) + size * static_cast<std::size_t>(i), more); });
}

}  // namespace

void bind_loans(nb::module_& m) {
    m.def("set_openmp", &set_openmp_at, nb::arg("parallel"), nb::arg("fork_call"), nb::arg("in_parallel"),
          nb::arg("max_threads"));
    m.def("force_workers", &force_workers, nb::arg("name"));
    m.def("borrow", &borrow, nb::arg("threads"));
    m.def("worker_runs", &worker_runs);
    m.def("blas_callback", [] { return reinterpret_cast<std::uintptr_t>(&run_blas); });
}

}  // namespace attngrad
