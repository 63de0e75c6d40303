// The number of operator new calls of the program, to test that code does not allocate.
#pragma once

long allocations();
