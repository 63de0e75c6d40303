// A library for LD_PRELOAD: REFUSE=allocation:N or thread:N makes the process's N-th allocation or thread creation
// fail, and with a "+" after the number all later ones too. With COUNT_CALLS set, the process prints on stderr how many
// such calls it made when it exits.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// The C library's functions, under the names that it uses internally.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {

struct Plan {
    const char* kind = "";
    long first = 0;
    bool persists = false;
    std::atomic<long> calls = 0;
};

Plan& plan() {
    static Plan instance;
    return instance;
}

bool is_refused(const char* kind) {
    Plan& p = plan();
    if (std::strcmp(p.kind, kind) != 0) return false;
    const long call = ++p.calls;
    return p.persists ? call >= p.first : call == p.first;
}

void* allocated(void* (*allocate)(size_t, size_t), size_t a, size_t b) {
    if (!is_refused("allocation")) return allocate(a, b);
    errno = ENOMEM;
    return nullptr;
}

[[gnu::constructor]] void begin() {
    const char* const wanted = std::getenv("REFUSE");
    if (!wanted) return;
    const char* const colon = std::strchr(wanted, ':');
    plan().first = std::atol(colon + 1);
    plan().persists = std::strchr(colon, '+') != nullptr;
    plan().kind = *wanted == 't' ? "thread" : "allocation";
}

[[gnu::destructor]] void end() {
    if (std::getenv("COUNT_CALLS")) std::fprintf(stderr, "%ld calls\n", plan().calls.load());
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) {
    return allocated([](size_t, size_t size) { return __libc_malloc(size); }, 0, bytes);
}

void* calloc(size_t count, size_t bytes) { return allocated(__libc_calloc, count, bytes); }

void* realloc(void* memory, size_t bytes) {
    if (!is_refused("allocation")) return __libc_realloc(memory, bytes);
    errno = ENOMEM;
    return nullptr;
}

void* aligned_alloc(size_t alignment, size_t bytes) { return allocated(__libc_memalign, alignment, bytes); }

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
    void* const block = aligned_alloc(alignment, bytes);
    if (!block) return ENOMEM;
    *memory = block;
    return 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
    static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    return is_refused("thread") ? EAGAIN : create(thread, attributes, body, argument);
}

}  // extern "C"
