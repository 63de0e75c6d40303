// The sanitizers' interfaces as weak symbols, which are null in a program built without the sanitizer.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __tsan_read_range(void* address, size_t bytes);
[[gnu::weak]] void __tsan_write_range(void* address, size_t bytes);
[[gnu::weak]] void __tsan_ignore_thread_begin();
[[gnu::weak]] void __tsan_ignore_thread_end();
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* address, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
[[gnu::weak]] void __asan_set_error_report_callback(void (*callback)(const char*));
// The device's address of device memory; null in a program without a simulated device.
[[gnu::weak]] const void* simt_on_device(const void* address);
}

namespace simt {

inline bool tsan() { return __tsan_create_fiber != nullptr; }
inline bool asan() { return __asan_poison_memory_region != nullptr; }

// Excludes the simulator's own reads and writes from checking.
class Quiet {
public:
    static inline int depth = 0;  // how many the running thread has, under the race detector

    Quiet() {
        if (tsan()) __tsan_ignore_thread_begin(), depth++;
    }
    ~Quiet() {
        if (tsan()) depth--, __tsan_ignore_thread_end();
    }
    Quiet(const Quiet&) = delete;
    Quiet& operator=(const Quiet&) = delete;
};

// Everything before release(x) happens before everything after acquire(x).
inline void acquire_order(void* address) {
    if (tsan()) __tsan_acquire(address);
}
inline void release_order(void* address) {
    if (tsan()) __tsan_release(address);
}

// Reports accesses by uninstrumented code to the race detector. Call them outside Quiet.
inline void saw_read(const void* address, size_t bytes) {
    if (tsan()) __tsan_read_range(const_cast<void*>(address), bytes);
}
inline void saw_write(void* address, size_t bytes) {
    if (tsan()) __tsan_write_range(address, bytes);
}

inline void poison(const void* address, size_t bytes) {
    if (asan()) __asan_poison_memory_region(address, bytes);
}
inline void unpoison(const void* address, size_t bytes) {
    if (asan()) __asan_unpoison_memory_region(address, bytes);
}

}  // namespace simt
