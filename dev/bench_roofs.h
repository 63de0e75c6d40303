// Measured peak rates of this machine, which ops are compared with (Williams, Waterman, Patterson, "Roofline", CACM
// 52(4), 2009).
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "kernels/numeric.h"

struct Roofs {
    double copy_bytes_per_s = 0;          // device-to-device copy, bytes read plus bytes written; 0: unknown
    std::map<Dtype, double> flops_per_s;  // the fastest of several large square GEMMs

    bool has(Dtype precision) const { return copy_bytes_per_s > 0 && flops_per_s.count(precision); }
    // The roofline time of an op.
    double ms(double flops, double bytes, Dtype precision) const;
};

// Adds the roofs of a precision, each measured for `seconds`; calls measured() after each.
void measure_roofs(Roofs& roofs, Dtype precision, double seconds, const std::function<void()>& measured);

// {"copy_gb_per_s", "bf16_tflops", ...}; keys of unknown roofs are absent.
nlohmann::ordered_json json_of(const Roofs& roofs);

// Reads the roofs from a benchmark's JSON file. Fails with Exit::no_input or Exit::data if it has none.
Roofs read_roofs(const std::string& path);
