// The pool, its tickets and the kept memory without Python: many threads at once, for ThreadSanitizer (make sanitize-thread).
// Every call sums numbers in an order that the tickets keep, in memory that it fills with marks of its own; exit status 1
// where a sum differs or a mark is somebody else's. Then the same on the workers of libgomp, which are not instrumented.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime/buffers.hpp"
#include "runtime/thread_pool.hpp"

using namespace attngrad;

namespace {

constexpr int tasks = 40, cells = 5;

// Floating-point sums depend on their order.
double term(std::int64_t task, int cell) { return 1.0 / (1.0 + static_cast<double>(task) * 3.7 + cell); }

bool call(int threads, std::size_t bytes, unsigned char mark, const Loan& loan = {}) {
    const Buffer scratch = take_scratch(bytes), result = take_buffer(bytes);
    std::memset(scratch.data, mark, bytes);
    std::memset(result.data, mark, bytes);
    std::vector<double> sums(cells, 0.0), expected(cells, 0.0);
    for (int cell = 0; cell < cells; ++cell)
        for (int task = 0; task < tasks; ++task) expected[cell] += term(task, cell);
    ParallelCall parallel(threads, [] { return false; }, loan);
    Tickets tickets(cells);
    parallel.run(tasks, threads, [&](std::int64_t task, int) {
        for (int cell = 0; cell < cells; ++cell) {
            tickets.wait(cell, static_cast<std::int32_t>(task), parallel);
            sums[cell] += term(task, cell);
            tickets.pass(cell, static_cast<std::int32_t>(task));
        }
    });
    bool right = sums == expected;
    for (const Buffer& b : {scratch, result})
        for (std::size_t i = 0; i < bytes; i += 97) right = right && static_cast<unsigned char*>(b.data)[i] == mark;
    give_scratch(scratch);
    give_buffer(result);
    return right;
}

bool many(int callers, int calls) {
    std::vector<char> right(callers, 1);
    std::vector<std::thread> threads;
    for (int n = 0; n < callers; ++n)
        threads.emplace_back([&, n] {
            for (int i = 0; i < calls; ++i)
                if (!call(1 + (n + i) % 6, 1000 + 37777 * static_cast<std::size_t>((n * 7 + i) % 11), 1 + n)) right[n] = 0;
        });
    for (auto& t : threads) t.join();
    for (const char r : right)
        if (!r) return false;
    return true;
}

// The same on the workers of OpenMP, of which a child has none.
bool borrowed(int calls) {
    void* gomp = dlopen("libgomp.so.1", RTLD_NOW);
    if (!gomp) return false;
    OpenMp runtime;
    runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(dlsym(gomp, "GOMP_parallel"));
    runtime.in_parallel = reinterpret_cast<int (*)()>(dlsym(gomp, "omp_in_parallel"));
    set_openmp(runtime);
    bool right = true;
    for (int i = 0; i < calls; ++i) right = call(4, 100000, 7, {Lender::openmp, 4}) && right;
    return right && runs_by(Lender::openmp) > 0;
}

}  // namespace

int main(int argc, char** argv) {
    const int calls = argc > 1 ? std::atoi(argv[1]) : 300;
    bool right = borrowed(calls) && many(8, calls);
    const pid_t child = fork();  // the pool is left behind
    if (child == 0) _exit(call(4, 100000, 9, {Lender::openmp, 4}) ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    right = right && status == 0 && many(3, calls / 10);
    std::printf("%d calls on borrowed workers, %d from 8 threads: %s\n", calls, 8 * calls, right ? "right" : "wrong");
    return right ? 0 : 1;
}
