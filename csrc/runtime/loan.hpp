// Workers that the process already has, lent to the calls of one thread: those of an OpenMP runtime. A framework's workers
// spin for milliseconds after its own work; a second pool would fight them for the cores.
#pragma once

#include <cstdint>
#include <functional>

namespace attngrad {

// A runtime by the addresses of its functions: GOMP_parallel (libgomp, and the compatible layer of libomp and libiomp5), or
// else __kmpc_fork_call; omp_in_parallel and omp_get_max_threads.
struct OpenMp {
    void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;
    void (*fork_call)(void* location, std::int32_t count, void (*)(std::int32_t*, std::int32_t*, ...), ...) = nullptr;
    int (*in_parallel)() = nullptr, (*max_threads)() = nullptr;
};

// Who runs the tasks of a call beside its own thread.
enum class Lender : std::uint8_t { nobody, own, openmp };
constexpr int lenders = 3;

struct Loan {
    Lender from = Lender::own;
    int threads = 0;  // at most, the caller's among them: as many as the lender has; 0: no limit
};

void set_openmp(const OpenMp& runtime);  // before any call borrows from it
Loan loan_of_openmp();                   // of as many threads as it would use itself

// Who can run the tasks of a call on this thread with this loan: what the lender cannot survive is not asked of it.
Lender lender_of(const Loan& loan);

// job(0) on this thread and job(1), job(2), ... to at most `helpers`, on as many others as come; returns when all have
// returned. OpenMP is asked for all of its `team`: a smaller one would end the other threads of the team.
void run_on_openmp(int team, int helpers, const std::function<void(int)>& job);

}  // namespace attngrad
