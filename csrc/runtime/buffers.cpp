#include "runtime/buffers.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace attngrad {

namespace {

constexpr std::size_t kept_at_most = std::size_t{128} << 20, scratch_at_most = std::size_t{64} << 20;
constexpr std::size_t small = std::size_t{64} << 10;  // what malloc may have

struct BufferCache {
    std::mutex mutex;
    std::vector<Buffer> kept;
    std::size_t bytes = 0;
    std::vector<Buffer> scratch;  // the largest last
    std::size_t scratch_bytes = 0;
};

// Never destroyed: arrays may be freed after the module is.
BufferCache& cache() {
    static BufferCache* const the_cache = [] {
        auto* made = new BufferCache;
        made->kept.reserve(256);  // giving back must not allocate
        made->scratch.reserve(256);
        return made;
    }();
    return *the_cache;
}

// No other thread is in the middle of it when a process forks: the child, which has this thread alone, can go on.
[[maybe_unused]] const int registered =
    pthread_atfork([] { cache().mutex.lock(); }, [] { cache().mutex.unlock(); }, [] { cache().mutex.unlock(); });

// Sizes come in steps of an eighth, so that similar calls share blocks.
std::size_t rounded(std::size_t bytes) {
    const std::size_t step = std::max<std::size_t>(4096, std::bit_floor(bytes) / 8);
    return (bytes + step - 1) / step * step;
}

Buffer allocated(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    void* data = std::aligned_alloc(64, bytes);
    if (!data && bytes) throw std::bad_alloc();
    return {data, bytes};
}

}  // namespace

Buffer take_buffer(std::size_t bytes) {
    const std::size_t capacity = rounded(bytes);
    {
        BufferCache& s = cache();
        std::lock_guard lock(s.mutex);
        for (std::size_t i = s.kept.size(); i-- > 0;)
            if (s.kept[i].capacity == capacity) {
                const Buffer found = s.kept[i];
                s.kept.erase(s.kept.begin() + static_cast<std::ptrdiff_t>(i));
                s.bytes -= capacity;
                return found;
            }
    }
    void* data = std::aligned_alloc(4096, capacity);
    if (!data) throw std::bad_alloc();
    return {data, capacity};
}

void give_buffer(Buffer buffer) noexcept {
    BufferCache& s = cache();
    {
        std::lock_guard lock(s.mutex);
        if (s.bytes + buffer.capacity <= kept_at_most && s.kept.size() < s.kept.capacity()) {
            s.kept.push_back(buffer);
            s.bytes += buffer.capacity;
            return;
        }
    }
    std::free(buffer.data);
}

Memory::Memory(std::size_t bytes) : block_(bytes <= small ? allocated(bytes) : take_buffer(bytes)) {}

Memory::~Memory() {
    if (block_.capacity <= small) {
        std::free(block_.data);
    } else {
        give_buffer(block_);
    }
}

Buffer take_scratch(std::size_t bytes) {
    if (bytes <= small) return allocated(bytes);
    Buffer found{nullptr, 0};
    {
        BufferCache& s = cache();
        std::lock_guard lock(s.mutex);
        if (!s.scratch.empty()) {
            found = s.scratch.back();
            s.scratch.pop_back();
            s.scratch_bytes -= found.capacity;
        }
    }
    if (found.capacity >= bytes) return found;
    if (found.data) munmap(found.data, found.capacity);  // a larger one takes its place
    const std::size_t capacity = rounded(bytes);
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return {data, capacity};
}

void give_scratch(Buffer buffer) noexcept {
    if (buffer.capacity <= small) return std::free(buffer.data);
    BufferCache& s = cache();
    {
        std::lock_guard lock(s.mutex);
        if (s.scratch_bytes + buffer.capacity <= scratch_at_most && s.scratch.size() < s.scratch.capacity()) {
            const auto smaller = [](const Buffer& a, const Buffer& b) { return a.capacity < b.capacity; };
            s.scratch.insert(std::upper_bound(s.scratch.begin(), s.scratch.end(), buffer, smaller), buffer);
            s.scratch_bytes += buffer.capacity;
            return;
        }
    }
    munmap(buffer.data, buffer.capacity);
}

}  // namespace attngrad
