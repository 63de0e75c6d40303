// Includes the twins of kernels/cuda's inline PTX for sm_90: on the include path of the simulated build only.
#pragma once

#include "test/simt/hopper_twins.h"
