// Memory of a step's buffers: it begins at a cache line (vectors and tiles that cross one take twice as long), and what
// there is much of lies on large pages (on small ones, wherever these happen to be, it may be in its own way in a cache).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace lf {

const size_t LARGE = 2 << 20, MUCH = LARGE / 32, LINE = 64;

inline char* large_pages(size_t bytes) {
    void* made = ::operator new(bytes, std::align_val_t(LARGE));
#ifdef __linux__
    madvise(made, bytes, MADV_HUGEPAGE);
#endif
    return static_cast<char*>(made);
}

// Buffers that share a large page, since one for each would be mostly empty. A page's first line counts its buffers, and
// itself while it is the one that is being filled; the last one frees it.
class SharedPages {
  public:
    char* take(size_t bytes) {
        bytes = (bytes + LINE - 1) / LINE * LINE;
        std::lock_guard<std::mutex> hold(guard_);
        if (!page_ || used_ + bytes > LARGE) {
            if (page_) drop(page_);
            page_ = large_pages(LARGE);
            count(page_) = 1;
            used_ = LINE;
        }
        char* taken = page_ + used_;
        used_ += bytes;
        count(page_)++;
        return taken;
    }

    void give(void* taken) {
        std::lock_guard<std::mutex> hold(guard_);
        drop(reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(taken) / LARGE * LARGE));
    }

    static bool fits(size_t bytes) { return bytes <= LARGE - LINE; }

  private:
    static size_t& count(char* page) { return *reinterpret_cast<size_t*>(page); }

    static void drop(char* page) {
        if (!--count(page)) ::operator delete(page, std::align_val_t(LARGE));
    }

    std::mutex guard_;
    char* page_ = nullptr;
    size_t used_ = 0;
};

inline SharedPages& shared_pages() {
    static SharedPages* pages = new SharedPages;  // never destroyed: buffers may outlive it otherwise
    return *pages;
}

template <class T>
struct Aligned {
    typedef T value_type;
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(made(n * sizeof(T))); }
    void deallocate(T* p, size_t n) {
        const size_t bytes = n * sizeof(T);
        if (bytes < MUCH) ::operator delete(p, std::align_val_t(LINE));
        else if (SharedPages::fits(bytes)) shared_pages().give(p);
        else ::operator delete(p, std::align_val_t(LARGE));
    }
    template <class U>
    bool operator==(const Aligned<U>&) const { return true; }
    template <class U>
    bool operator!=(const Aligned<U>&) const { return false; }

  private:
    static void* made(size_t bytes) {
        if (bytes < MUCH) return ::operator new(bytes, std::align_val_t(LINE));
        if (SharedPages::fits(bytes)) return shared_pages().take(bytes);
        return large_pages((bytes + LARGE - 1) / LARGE * LARGE);
    }
};

template <class T>
using Buffer = std::vector<T, Aligned<T>>;

template <class T>
inline void fit(Buffer<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

}  // namespace lf
