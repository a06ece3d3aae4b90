#include "buffers.hpp"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace attngrad {

namespace {

constexpr std::size_t kept_at_most = std::size_t{128} << 20;

struct Shelf {
    std::mutex mutex;
    std::vector<Buffer> kept;
    std::size_t bytes = 0;
};

// Never destroyed: arrays may be freed after the module is.
Shelf& shelf() {
    static Shelf* const the_shelf = [] {
        auto* made = new Shelf;
        made->kept.reserve(256);  // giving back must not allocate
        return made;
    }();
    return *the_shelf;
}

// No other thread is in the middle of it when a process forks: the child, which has this thread alone, can go on.
[[maybe_unused]] const int registered = pthread_atfork([] { shelf().mutex.lock(); }, [] { shelf().mutex.unlock(); },
                                                       [] { shelf().mutex.unlock(); });

// Sizes come in steps of an eighth, so that similar calls share blocks.
std::size_t rounded(std::size_t bytes) {
    const std::size_t step = std::max<std::size_t>(4096, std::bit_floor(bytes) / 8);
    return (bytes + step - 1) / step * step;
}

}  // namespace

Buffer take_buffer(std::size_t bytes) {
    const std::size_t capacity = rounded(bytes);
    {
        Shelf& s = shelf();
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
    Shelf& s = shelf();
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

}  // namespace attngrad
