// Turns the findings of ThreadSanitizer and AddressSanitizer into faults like the others; their reports on stderr have
// the source lines.
#pragma once

namespace simt {

void count_sanitizer_reports();

}  // namespace simt
