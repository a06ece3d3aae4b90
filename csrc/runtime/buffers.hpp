// The buffer cache: memory of freed results, kept for the next call. Fresh pages cost a fault each, which for mid-sized results
// takes longer than computing them; a block that a freed array leaves behind has its pages already.
#pragma once

#include <cstddef>

namespace attngrad {

struct Buffer {
    void* data;
    std::size_t capacity;
};

Buffer take_buffer(std::size_t bytes);  // throws std::bad_alloc
void give_buffer(Buffer buffer) noexcept;

// Memory for one call; large blocks come from the buffer cache, small ones from malloc: they are not worth its lock.
class Memory {
public:
    explicit Memory(std::size_t bytes);  // throws std::bad_alloc
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    char* data() const { return static_cast<char*>(block_.data); }

private:
    Buffer block_;
};

// Memory that a call works in. Any block that is large enough will do: so there are as many as calls at once, and no more,
// whatever their sizes. From malloc they would come out of an arena for each thread, which grows for as long as sizes vary.
Buffer take_scratch(std::size_t bytes);  // throws std::bad_alloc
void give_scratch(Buffer buffer) noexcept;

}  // namespace attngrad
