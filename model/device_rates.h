// The peak rates of a device, to which ops are compared (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009).
#pragma once

#include "kernels/numeric.h"

struct DeviceRates {
    double flops_per_s = 0;  // of GEMMs
    double bytes_per_s = 0;  // read or written
};

// Measures this device for about half a second: returns the fastest of several square GEMMs in this precision and of
// several copies. Uses 128 MiB of device memory during the measurement.
DeviceRates measure_device_rates(Dtype precision);
