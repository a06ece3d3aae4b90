// A thread pool whose workers take numbered tasks in order, and tickets that order their sums.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace attngrad {

int default_threads();  // ATTNGRAD_NUM_THREADS, else the processors this process may run on

// One call's use of the thread pool.
class ParallelCall {
public:
    // `poll` is called on the calling thread every now and then; it returns true to cancel. Where it forks, the call is
    // cancelled in the child, which has no workers.
    ParallelCall(int threads, std::function<bool()> poll) : threads_(threads), poll_(std::move(poll)) {}

    // Run work(task, worker) for every task, on up to `threads` workers numbered from 0. Tasks start in order: when a
    // task starts, all before it have started. So a task may wait for an earlier one.
    // `useful` is the number of workers that the work keeps busy; where it is small, only workers that are awake take part.
    // `independent`: tasks do not wait for one another. Then each worker has a range of its own to begin with, the same in
    // every call, so that it finds in its cache what it had there before; and takes several neighbours at once.
    void run(std::int64_t tasks, int useful, const std::function<void(std::int64_t, int)>& work, bool independent = false);

    int workers(std::int64_t tasks, int useful) const;
    bool cancelled() const { return cancel_.load(std::memory_order_relaxed); }
    void cancel() { cancel_.store(true, std::memory_order_relaxed); }

private:
    int threads_;
    std::function<bool()> poll_;
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
