// How often the program has called operator new, so that a test can show that something allocates nothing.
#pragma once

long allocations();
