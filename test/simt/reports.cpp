#include "test/simt/reports.h"

#include "test/simt/fault.h"
#include "test/simt/sanitizers.h"

namespace simt {

void count_sanitizer_reports() {
    if (__asan_set_error_report_callback)
        __asan_set_error_report_callback([](const char* report) {
            const std::string text(report);
            const size_t begin = text.find("AddressSanitizer");
            note_fault(begin == std::string::npos ? text : text.substr(begin, text.find('\n', begin) - begin));
        });
}

}  // namespace simt

// Called by ThreadSanitizer for each race it reports.
extern "C" void __tsan_on_report(const void*) {
    simt::Quiet quiet;
    simt::note_fault("data race, see ThreadSanitizer's report");
}

// Reports are distinguished only by their stacks, because shared memory has the same addresses in every kernel. The
// exit code is main()'s, which counts faults: races that a test plants are not failures.
extern "C" const char* __tsan_default_options() {
    return "suppress_equal_addresses=0:report_signal_unsafe=0:history_size=1:halt_on_error=0:exitcode=0";
}
extern "C" const char* __asan_default_options() {
    return "halt_on_error=0:detect_stack_use_after_return=0:detect_leaks=0:allow_user_segv_handler=1";
}
