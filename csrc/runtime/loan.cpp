#include "runtime/loan.hpp"

#include <pthread.h>
#include <setjmp.h>
#include <unistd.h>

#include <atomic>

#include "runtime/thread_pool.hpp"

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace attngrad {

namespace {

OpenMp g_openmp;

bool on_main_thread() {
#if defined(__linux__)
    thread_local const bool main = syscall(SYS_gettid) == getpid();
    return main;
#elif defined(__APPLE__)
    return pthread_main_np() != 0;
#else
    return false;
#endif
}

// A parallel region. The runtime may give fewer threads than asked for: those that come take their numbers. Its barriers are
// not instrumented: `open` and `done` say for ThreadSanitizer, too, what happens before what.
struct Region {
    const std::function<void(int)>& job;
    const int helpers;
    const int forks = fork_count();
    const pthread_t caller = pthread_self();
    std::atomic<int> next{1}, done{0};
    std::atomic<bool> open{false};
    jmp_buf out;

    void enter() {
        if (!open.load(std::memory_order_acquire)) return;
        const int worker = pthread_equal(pthread_self(), caller) ? 0 : next.fetch_add(1, std::memory_order_relaxed);
        if (worker <= helpers) job(worker);
        // In a child that a signal handler made, the rest of the team is in the parent: the region would wait for it forever.
        if (worker == 0 && fork_count() != forks) longjmp(out, 1);
        done.fetch_add(1, std::memory_order_release);
    }
    static void of_gomp(void* region) { static_cast<Region*>(region)->enter(); }
    static void of_kmpc(std::int32_t*, std::int32_t*, void* region) { of_gomp(region); }
};

}  // namespace

void set_openmp(const OpenMp& runtime) { g_openmp = runtime; }

Loan loan_of_openmp() { return {Lender::openmp, g_openmp.max_threads()}; }

Lender lender_of(const Loan& loan) {
    if (loan.from != Lender::openmp) return loan.from;
    if (g_openmp.in_parallel && g_openmp.in_parallel()) return Lender::nobody;
    // A team belongs to the thread that began it, and none survives a fork. Torch computes on the main thread; elsewhere a
    // team of its own would be started for every thread.
    const bool usable = (g_openmp.parallel || g_openmp.fork_call) && fork_count() == 0 && on_main_thread();
    return usable ? Lender::openmp : Lender::own;
}

void run_on_openmp(int team, int helpers, const std::function<void(int)>& job) {
    Region region{job, helpers};
    if (setjmp(region.out)) return;
    region.open.store(true, std::memory_order_release);
    if (g_openmp.parallel) {
        g_openmp.parallel(&Region::of_gomp, &region, static_cast<unsigned>(team), 0);
    } else {
        struct {
            std::int32_t zero = 0, flags = 2, more[2] = {};  // 2: KMP_IDENT_KMPC
            const char* source = ";attngrad;attngrad;0;0;;";
        } location;
        const auto task = reinterpret_cast<void (*)(std::int32_t*, std::int32_t*, ...)>(&Region::of_kmpc);
        g_openmp.fork_call(&location, 1, task, &region);
    }
    (void)region.done.load(std::memory_order_acquire);
}

}  // namespace attngrad
