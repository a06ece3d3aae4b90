#include "runtime/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace attngrad {

namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
constexpr auto spin_time = std::chrono::microseconds(200);

std::atomic<int> g_forks{0};

// Workers that sleep until a call has work for them. A worker spins for a while before it sleeps, so
// that calls in quick succession do not pay for waking it. The caller works too, and when nothing is left it closes the
// job: it waits for workers that have joined, never for one that is still waking up.
class ThreadPool {
public:
    std::mutex in_use;  // one call at a time; a second one runs on its own thread alone

    // Whether workers are spinning, or would be after a call as recent as the last one. Under in_use.
    bool awake() {
        const auto now = Clock::now();
        const bool recent = now - last_asked_ < spin_time;
        last_asked_ = now;
        return recent || spinning_.load(std::memory_order_relaxed) > 0;
    }

    // Whether there are so many workers, or could be made. Under in_use.
    bool has(int helpers) {
        if (size_ < helpers) grow(helpers);
        return size_ >= helpers;
    }

    void run(int helpers, const std::function<void(int)>& job) {
        const int before = g_forks.load();
        has(helpers);
        {
            std::lock_guard lock(mutex_);
            job_ = &job;
            wanted_ = helpers;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job(0);
        if (g_forks.load() != before) return;  // a child that a signal handler made: the workers are in the parent
        {
            std::lock_guard lock(mutex_);
            job_ = nullptr;
        }
        for (int spins = 0; joined_.load(std::memory_order_acquire) > 0; ++spins) {
            if (spins < 2000) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
    }

private:
    // Start threads until there are so many, or the system gives no more: the caller does what they would have done.
    // Signals are for the other threads, which may be waiting for them.
    void grow(int helpers) {
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        try {
            while (size_ < helpers) {
                std::thread([this, id = size_ + 1, seen = generation_.load()] { serve(id, seen); }).detach();
                ++size_;
            }
        } catch (const std::system_error&) {
        }
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
    }

    // Wait for a call without sleeping: some 10 us of busy waiting, then for longer than a framework takes from one pass
    // to the next (50 to 100 us; `spin_time`), leaving the processor to any other thread that wants it.
    void spin(std::uint64_t seen) {
        spinning_.fetch_add(1, std::memory_order_relaxed);
        const auto idle = [&] { return generation_.load(std::memory_order_acquire) == seen; };
        for (int spins = 0; spins < 1000 && idle(); ++spins) relax();
        for (const auto end = Clock::now() + spin_time; idle() && Clock::now() < end;) std::this_thread::yield();
        spinning_.fetch_sub(1, std::memory_order_relaxed);
    }

    void serve(int id, std::uint64_t seen) {
        for (;;) {
            spin(seen);
            const std::function<void(int)>* job = nullptr;
            {
                // Job, number and generation belong together: a worker that slept through a call must not mix two.
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                if (job_ && id <= wanted_) {
                    job = job_;
                    joined_.fetch_add(1, std::memory_order_relaxed);
                }
            }
            if (job) {
                (*job)(id);
                joined_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    int size_ = 0;  // these two under in_use
    Clock::time_point last_asked_{};
    std::atomic<std::uint64_t> generation_{0};
    std::atomic<int> joined_{0}, spinning_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* job_ = nullptr;  // these two under mutex_
    int wanted_ = 0;
};

// Sleeping workers are not woken for one call of less: measured, what 2 workers save of some 100 us is what waking one
// costs. For calls in quick succession they are: they will spin for the next.
constexpr int enough_to_wake = 16;

ThreadPool* g_pool = nullptr;
std::mutex g_pool_mutex;

// Threads do not survive a fork: the child starts with a new pool. The old one is left alone, its mutexes unknown.
[[maybe_unused]] const int registered = pthread_atfork([] { g_pool_mutex.lock(); }, [] { g_pool_mutex.unlock(); },
                                                       [] {
                                                           g_pool_mutex.unlock();
                                                           g_pool = nullptr;
                                                           ++g_forks;
                                                       });

ThreadPool& pool() {
    std::lock_guard lock(g_pool_mutex);
    if (!g_pool) g_pool = new ThreadPool;
    return *g_pool;
}

std::atomic<std::int64_t> g_runs[lenders];

}  // namespace

int fork_count() { return g_forks.load(); }

std::atomic<std::int64_t>& runs_by(Lender lender) { return g_runs[static_cast<int>(lender)]; }

int default_threads() {
    if (const char* text = std::getenv("ATTNGRAD_NUM_THREADS")) {
        const int n = std::atoi(text);
        if (n > 0) return n;
    }
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

int ParallelCall::workers(std::int64_t tasks, int useful) const {
    return static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>({threads_, tasks, useful})));
}

namespace {

// A range of tasks, taken from the front.
struct alignas(64) Range {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
};

}  // namespace

void ParallelCall::run(std::int64_t tasks, int useful, const std::function<void(std::int64_t, int)>& work, bool independent) {
    const int n = workers(tasks, useful), parts = independent ? n : 1;
    // Small enough that nobody waits long for the last one.
    const std::int64_t most = std::min(tasks / (16 * n), tasks / (2 * std::max(useful, 1)));
    const std::int64_t batch = independent && n > 1 ? std::clamp<std::int64_t>(most, 1, 16) : 1;
    std::vector<Range> ranges(parts);
    for (int i = 0; i < parts; ++i) {
        ranges[i].next.store(tasks * i / parts, std::memory_order_relaxed);
        ranges[i].end = tasks * (i + 1) / parts;
    }
    const int before = g_forks.load();
    Lender lender = Lender::nobody;
    std::exception_ptr thrown;
    std::atomic<bool> threw{false};
    const std::function<void(int)> take = [&](int worker) {
        auto asked = Clock::now();
        for (int i = 0; i < parts; ++i) {  // its own range, then what is left of the others
            Range& range = ranges[(worker + i) % parts];
            for (std::int64_t first; !cancelled() && (first = range.next.fetch_add(batch)) < range.end;) {
                const std::int64_t end = std::min(first + batch, range.end);
                for (std::int64_t task = first; task < end && !cancelled(); ++task) {
                    try {
                        work(task, worker);
                    } catch (...) {
                        if (!threw.exchange(true)) thrown = std::current_exception();
                        cancel();
                        return;
                    }
                    if (worker == 0 && poll_ && Clock::now() - asked > std::chrono::milliseconds(50)) {
                        if (poll_() || (lender != Lender::nobody && g_forks.load() != before)) cancel();
                        asked = Clock::now();
                    }
                }
            }
        }
    };
    if (n > 1) lender = lender_of(loan_);
    std::unique_lock<std::mutex> lock;
    if (lender == Lender::own) {
        ThreadPool& shared = pool();
        lock = std::unique_lock(shared.in_use, std::try_to_lock);
        if (!lock.owns_lock() || !(useful >= enough_to_wake || shared.awake())) lender = Lender::nobody;
        if (lender == Lender::own) shared.run(n - 1, take);
    } else if (lender == Lender::openmp) {
        run_on_openmp(loan_.threads, n - 1, take);  // however small: the framework's own work has just used them
    }
    if (lender == Lender::nobody) take(0);
    runs_by(lender).fetch_add(1, std::memory_order_relaxed);
    if (thrown) std::rethrow_exception(thrown);
}

void run_together(int count, const std::function<void(int)>& job) {
    std::atomic<int> left{count - 1};
    const auto counted = [&](int worker) {
        job(worker);
        if (worker > 0) left.fetch_sub(1, std::memory_order_release);
    };
    ThreadPool& shared = pool();
    std::unique_lock lock(shared.in_use, std::try_to_lock);
    if (lock.owns_lock() && shared.has(count - 1)) {
        return shared.run(count - 1, [&](int worker) {
            counted(worker);
            // A pool does not wait for workers that are waking up: this call does.
            for (int spins = 0; worker == 0 && left.load(std::memory_order_acquire) > 0; ++spins) {
                if (spins < 2000) {
                    relax();
                } else {
                    std::this_thread::yield();
                }
            }
        });
    }
    std::vector<std::jthread> helpers;  // another call has the pool, and may be waiting for this thread
    for (int worker = 1; worker < count; ++worker) helpers.emplace_back(counted, worker);
    counted(0);
}

Tickets::Tickets(std::int64_t count) : next_(count ? new std::atomic<std::int32_t>[count] : nullptr) {
    for (std::int64_t i = 0; i < count; ++i) next_[i].store(0, std::memory_order_relaxed);
}

void Tickets::pass(std::int64_t i, std::int32_t rank) { next_[i].store(rank + 1, std::memory_order_release); }

void Tickets::wait(std::int64_t i, std::int32_t rank, const ParallelCall& parallel) const {
    for (int spins = 0; next_[i].load(std::memory_order_acquire) != rank && !parallel.cancelled(); ++spins) {
        if (spins < 2000) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

}  // namespace attngrad
