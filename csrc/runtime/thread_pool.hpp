// Numbered tasks that workers take in order, those of a thread pool or borrowed ones; and tickets that order their sums.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/loan.hpp"

namespace attngrad {

int default_threads();  // ATTNGRAD_NUM_THREADS, else the processors this process may run on
int fork_count();       // of the processes that led to this one, since the module was loaded

// How often each lender has run tasks in parallel, by its number; nobody: how often a call did without helpers.
std::atomic<std::int64_t>& runs_by(Lender lender);

// job(0) on this thread and job(1) to job(count - 1) on others, all at the same time: they may wait for one another.
void run_together(int count, const std::function<void(int)>& job);

// One call's use of workers.
class ParallelCall {
public:
    // `poll` is called on the calling thread every now and then; it returns true to cancel. Where it forks, the call is
    // cancelled in the child, which has no workers.
    ParallelCall(int threads, std::function<bool()> poll, const Loan& loan = {})
        : threads_(loan.threads ? std::min(threads, loan.threads) : threads),
          poll_(std::move(poll)),
          loan_(loan) {}

    // Run work(task, worker) for every task, on up to `threads` workers numbered from 0. Tasks start in order: when a
    // task starts, all before it have started. So a task may wait for an earlier one.
    // `useful` is the number of workers that the work keeps busy; where it is small, own workers that sleep are not woken.
    // What a task throws cancels the call, and is thrown here.
    // `independent`: tasks do not wait for one another. Then each worker has a range of its own to begin with, the same in
    // every call, so that it finds in its cache what it had there before; and takes several neighbours at once.
    void run(std::int64_t tasks, int useful, const std::function<void(std::int64_t, int)>& work, bool independent = false);

    int workers(std::int64_t tasks, int useful) const;
    bool cancelled() const { return cancel_.load(std::memory_order_relaxed); }
    void cancel() { cancel_.store(true, std::memory_order_relaxed); }

private:
    int threads_;
    std::function<bool()> poll_;
    Loan loan_;
    std::atomic<bool> cancel_{false};
};

// Turns at a shared sum, taken in the order of their ranks: what makes sums independent of the number of threads.
class Tickets {
public:
    explicit Tickets(std::int64_t count);
    void wait(std::int64_t i, std::int32_t rank, const ParallelCall& parallel) const;
    void pass(std::int64_t i, std::int32_t rank);

private:
    std::unique_ptr<std::atomic<std::int32_t>[]> next_;
};

}  // namespace attngrad
