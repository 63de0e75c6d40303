// Common headers of tests, compiled once. Each test still includes the headers that it uses.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "test/support/catch.h"
