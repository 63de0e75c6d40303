// Where kernels/cuda finds the twins of its inline PTX: on the include path of the simulated build only.
#pragma once

#include "test/simt/ptx_twins.h"
