#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <mutex>

#include "runtime/io/files.h"

namespace {

// The currently mapped files. A signal handler must not wait for a lock, so it walks a list that only grows; the entry
// of an unmapped file is reused.
class Mappings {
public:
    void add(const void* begin, size_t bytes, const std::string& path) {
        const std::lock_guard lock(mutex_);
        Entry* entry = first_.load();
        while (entry && entry->begin.load()) entry = entry->next;
        const bool is_new = !entry;
        if (is_new) entry = new Entry{.next = first_.load()};
        entry->bytes = bytes;
        entry->path = path;
        entry->begin.store(static_cast<const std::byte*>(begin));
        if (is_new) first_.store(entry);
    }

    void remove(const void* begin) {
        const std::lock_guard lock(mutex_);
        for (Entry* entry = first_.load(); entry; entry = entry->next)
            if (entry->begin.load() == begin) return entry->begin.store(nullptr);
    }

    // Async-signal-safe. If the address belongs to a mapped file, prints an error and exits the process; else returns.
    void end_process_for(const void* address) const {
        for (const Entry* entry = first_.load(); entry; entry = entry->next) {
            const std::byte* begin = entry->begin.load();
            const auto* at = static_cast<const std::byte*>(address);
            if (!begin || at < begin || at >= begin + entry->bytes) continue;
            char digits[32];
            const char* end = std::to_chars(digits, std::end(digits), size_t(at - begin)).ptr;
            print("train_gpt: cannot read ");
            print(entry->path);
            print(" at offset ");
            print({digits, size_t(end - digits)});
            print(": the disk failed, or the file was truncated while it was in use\n");
            ::_exit(int(Exit::io));
        }
    }

private:
    struct Entry {
        std::atomic<const std::byte*> begin = nullptr;  // null: free
        size_t bytes = 0;
        std::string path = {};
        Entry* next = nullptr;
    };

    static void print(std::string_view text) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    }

    std::mutex mutex_;  // guards add() and remove()
    std::atomic<Entry*> first_ = nullptr;
};

Mappings& mappings() {
    static Mappings all;
    return all;
}

void on_unreadable_page(int signal, siginfo_t* info, void*) {
    mappings().end_process_for(info->si_addr);
    // Not in a mapped file: the instruction runs again, and the signal kills the process as if there were no handler.
    std::signal(signal, SIG_DFL);
}

bool handle_unreadable_pages() {
    mappings();
    struct sigaction action {};
    action.sa_sigaction = on_unreadable_page;
    action.sa_flags = SA_SIGINFO;
    return ::sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const InputFile file(path);
    const size_t size = size_ = file.size();
    if (size == 0) return;                                                       // mmap fails for an empty file
    [[maybe_unused]] static const bool are_handled = handle_unreadable_pages();  // once
    void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, *file.descriptor_, 0);
    if (memory == MAP_FAILED)
        fail(errno == ENOMEM ? Exit::os : Exit::io, "cannot map %s: %s", path, std::strerror(errno));
    mappings().add(memory, size, path);
    data_ = {static_cast<const std::byte*>(memory), [memory, size](const std::byte*) {
                 mappings().remove(memory);
                 ::munmap(memory, size);
             }};
}
