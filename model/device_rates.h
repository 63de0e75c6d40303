// What a device can do at most: the rates that ops are compared with (Williams, Waterman, Patterson, "Roofline", CACM
// 52(4), 2009).
#pragma once

#include "kernels/numeric.h"

struct DeviceRates {
    double flops_per_s = 0;  // of matrix products
    double bytes_per_s = 0;  // read or written
};

// Measures this device for about half a second: the fastest of some square products in this precision and of some
// copies. Takes 128 MiB of the device's memory meanwhile.
DeviceRates measure_device_rates(Dtype precision);
