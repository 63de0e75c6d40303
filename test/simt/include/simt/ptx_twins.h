// Includes the twins of kernels/cuda's inline PTX: on the include path of the simulated build only.
#pragma once

#include "test/simt/ptx_twins.h"
