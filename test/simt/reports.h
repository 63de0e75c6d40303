// What ThreadSanitizer and AddressSanitizer find becomes faults like the others; their reports on stderr tell the
// lines.
#pragma once

namespace simt {

void count_sanitizer_reports();

}  // namespace simt
