// What most tests include, compiled once. A test still includes what it uses.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "test/support/catch.h"
