// Running a pass without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>

#include "runtime/problem.hpp"
#include "runtime/thread_pool.hpp"

namespace attngrad {

// Set from any thread while others compute: a call reads each once.
inline std::atomic<const Kernels*> g_kernels{nullptr};
inline std::atomic<int> g_threads{1};

// Who lends workers to the calls of this thread; and to those of every thread, where a user forces it.
inline thread_local Loan t_loan;
enum class Force : int { none, own, openmp };
inline std::atomic<Force> g_force{Force::none};

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

inline Loan loan_of_call(const Loan& asked) {
    const Force force = g_force;
    if (force == Force::own || finalizing()) return {Lender::own, asked.threads};
    if (force == Force::openmp && asked.from == Lender::own) return loan_of_openmp();
    return asked;
}

// RAII: releases the GIL. CPython ends a thread that asks for it while the interpreter shuts down, by unwinding its stack:
// what the workers still read would go, and a destructor may not be unwound. Such a thread, which must be a daemon, sleeps
// instead until the process ends.
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

// work(kernels, parallel) without the GIL, with the workers `asked` for. Signals are handled now and then; what their handlers
// raise is raised here.
template <class Work>
void run(Work work, const Loan& asked = t_loan) {
    bool cancelled = false;
    {
        const int threads = g_threads;
        const Loan loan = loan_of_call(asked);
        WithoutGil without;
        ParallelCall parallel(threads, [&] { return without.signalled(); }, loan);
        work(*g_kernels.load(), parallel);
        cancelled = parallel.cancelled();
    }
    if (!cancelled) return;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError,
                        "attngrad: a signal handler forked in the middle of this call, whose other "
                        "threads are in the parent process. Call it again.");
    throw nanobind::python_error();
}

}  // namespace attngrad
