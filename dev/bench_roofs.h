// What this machine can do at most, measured: the rates that ops are compared with (Williams, Waterman, Patterson,
// "Roofline", CACM 52(4), 2009).
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "kernels/numeric.h"

struct Roofs {
    double copy_bytes_per_s = 0;          // device-to-device copy, bytes read plus bytes written; 0: not known
    std::map<Dtype, double> flops_per_s;  // the fastest of some large square products

    bool has(Dtype precision) const { return copy_bytes_per_s > 0 && flops_per_s.count(precision); }
    // The least that an op can take.
    double ms(double flops, double bytes, Dtype precision) const;
};

// Adds the roofs of a precision, each measured for `seconds`; measured() is called after each.
void measure_roofs(Roofs& roofs, Dtype precision, double seconds, const std::function<void()>& measured);

// {"copy_gb_per_s", "bf16_tflops", ...}; keys of what is not known are absent.
nlohmann::ordered_json json_of(const Roofs& roofs);

// The roofs in a benchmark's JSON file. Fails with Exit::no_input or Exit::data where it has none.
Roofs read_roofs(const std::string& path);
