# make help says what there is. Everything is built into build/, nothing is fetched.
CXX      ?= g++
ARCH     ?= native
OPT      ?= -O2
BUILD    ?= build
REVISION := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)

# g++ 12 wrongly warns of std::string's insides at -O3 (GCC bug 105651).
FALSE_ALARMS := -Wno-restrict

CXXFLAGS  = -std=c++20 $(OPT) -march=$(ARCH) -fno-math-errno -fno-trapping-math -fopenmp -g1 -I. -MMD -MP \
            -Wall -Wextra -Wshadow -Werror $(FALSE_ALARMS) $(EXTRA)
LIBS     := -ldnnl -lpcre2-8 -lisal -lxxhash -lpthread

CPU_SOURCES  := $(wildcard kernels/cpu/*.cpp)
HOST_SOURCES := $(wildcard model/*.cpp runtime/*.cpp data/*.cpp)
TEST_SOURCES := $(wildcard test/*.cpp)
object        = $(patsubst %,$(BUILD)/%.o,$(1))
LIBRARY      := $(call object,$(CPU_SOURCES) $(HOST_SOURCES))

# Catch2 3 is a library, Catch2 2 is one header.
CATCH_3    := $(wildcard /usr/include/catch2/catch_all.hpp /usr/local/include/catch2/catch_all.hpp)
CATCH_LIBS := $(if $(CATCH_3),-lCatch2Main -lCatch2)

all: $(BUILD)/train_gpt_cpu  ## the trainer for the CPU
	@echo "built $< only: $(if $(shell command -v nvcc),kernels/cuda holds no kernels yet,nvcc was not found)"

$(BUILD)/train_gpt_cpu: $(BUILD)/train_gpt.cu.o $(LIBRARY)
	$(CXX) $(CXXFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/test_cpu: $(call object,$(TEST_SOURCES)) $(LIBRARY)
	$(CXX) $(CXXFLAGS) -o $@ $^ $(LIBS) $(CATCH_LIBS)

$(BUILD)/bench_cpu: $(BUILD)/dev/bench_cpu.cpp.o $(LIBRARY)
	$(CXX) $(CXXFLAGS) -o $@ $^ $(LIBS)

# The inner loops are written to be unrolled and vectorised; the rest only has to compile quickly.
$(call object,$(CPU_SOURCES)): OPT = -O3

$(BUILD)/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<

$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -DGIT_REVISION='"$(REVISION)"' -c -x c++ -o $@ $<

run:    ## the quickstart: install, build, train on the King James text, print samples
	scripts/quickstart.sh
test:   ## install what is missing and run every test
	scripts/test.sh
check:  ## the rules of the house: who includes whom, sizes of files and functions
	python3 scripts/check_house.py
bench: $(BUILD)/bench_cpu  ## milliseconds per op and per step on this machine
	$(BUILD)/bench_cpu
clean:  ## remove build/
	rm -rf $(BUILD)
help:   ## this list
	@awk -F ':.*## ' '/^[a-z_]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

.PHONY: all run test check bench clean help
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
