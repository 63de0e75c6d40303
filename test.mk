# Test programs, the simulated GPU, benchmarks and probes. Included by the Makefile.
TEST_ROOMS   := $(addprefix test/,support reference kernels model data data/tokenizer training commands runtime/*)
TEST_SOURCES := $(wildcard $(TEST_ROOMS:=/*.cpp))
REFERENCE    := $(wildcard test/reference/reference*.cpp)
# The cases that every device must pass.
SEAM_TESTS   := $(wildcard test/kernels/test_ops_*.cpp) \
                $(addprefix test/kernels/test_,comm.cpp device.cpp stopwatch.cpp)
TEST_MAIN    := test/support/main.cpp test/support/run_tests.cpp
OPS_TESTS    := $(SEAM_TESTS) $(REFERENCE) $(wildcard test/model/test_model*.cpp) \
                test/support/allocations.cpp $(TEST_MAIN)
BENCH        := $(filter-out dev/bench_matmul%,$(wildcard dev/bench*.cpp))
BENCH_MATMUL := $(addprefix dev/bench_,matmul.cpp report.cpp timing.cpp workloads.cpp)
PROBE        := $(wildcard test/ptx_probe/*.cu) kernels/cuda/hopper/tensor_map.cu
# The faulty file system of test/faults is built if libfuse3 is found.
FUSE_FLAGS  := -DFUSE_USE_VERSION=31 -lfuse3
FUSE        := $(call calls,fuse3/fuse.h,fuse_version(),$(FUSE_FLAGS))

# Catch2 3 is a library, Catch2 2 is one header.
CATCH_3    := $(wildcard $(addsuffix /catch2/catch_all.hpp,$(DEPS:=/include) /usr/include /usr/local/include))
CATCH_LIBS := $(if $(CATCH_3),-lCatch2)

CPU_PROGRAMS := train_gpt_cpu test_cpu test_pool_tsan test_corpora bench_cpu test_simt test_simt_tsan test_simt_asan \
                train_gpt_simt train_gpt_simt_dlopen bench_simt bench_matmul_simt ptx_probe_simt ptx_probe_text \
                exchange_cpu exchange_simt inject.so crash_states $(if $(filter 1,$(FUSE)),faulty_fs)
GPU_PROGRAMS := train_gpt test_cuda bench_cuda bench_matmul_cuda ptx_probe_cuda
KIT_PROGRAMS := $(GPU_PROGRAMS) train_gpt_cpu ptx_probe_simt
PROGRAMS     := $(addprefix $(BUILD)/,$(CPU_PROGRAMS) $(if $(NVCC),$(GPU_PROGRAMS)))

$(BUILD)/test_cpu: $(call object,$(TEST_SOURCES)) $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS) $(CATCH_LIBS)
$(BUILD)/test_cuda: $(call object,$(OPS_TESTS)) $(GPU_CODE) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o %.so,$^) $(GPU_LIBS) $(CATCH_LIBS)
$(BUILD)/bench_cpu: $(call object,$(BENCH)) $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS)
$(BUILD)/bench_cuda: $(call object,$(BENCH)) $(GPU_CODE) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o %.so,$^) $(GPU_LIBS)
$(BUILD)/bench_matmul_cuda: $(call object,$(BENCH_MATMUL) dev/bench_matmul.cu) $(GPU_CODE) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o %.so,$^) $(GPU_LIBS)

# The simulated GPU: the CUDA sources compiled as C++ against test/simt, with the same test cases as the CPU's ops. The
# simulator is not under test: it has no sanitizers and is linked first, so that the linker keeps its inline functions.
# The same holds for cases without kernels of their own. Misaligned vectors are always checked (simt/alignment.cpp).
SIMT_FLAGS   := -std=c++20 -march=$(MARCH) -fno-math-errno -g1 -I. -Itest/simt/include -MMD -MP \
                $(if $(DEPS),-isystem $(DEPS)/include) $(WARNINGS) -Wno-unknown-pragmas \
                -Wno-unused-const-variable -DCUDA_ARCHITECTURES='"90a, simulated"'
SIMT_CORE    := $(patsubst %,$(BUILD)/simt_core/%.o,$(filter-out test/simt/test_% test/simt/main.cpp, \
                  $(wildcard test/simt/*.cpp)))
SIMT_CASES   := $(filter test/kernels/test_ops_%,$(SEAM_TESTS))
SIMT_PRODUCT := $(wildcard test/simt/test_matmul_*.cpp)
SIMT_TESTED  := $(CUDA_SOURCES) $(filter-out $(SIMT_PRODUCT),$(wildcard test/simt/test_*.cpp)) \
                $(filter-out $(SIMT_CASES),$(SEAM_TESTS))
simt_objects  = $(SIMT_CORE) $(BUILD)/simt_core/test/simt/main.cpp.o $(SIMT_TESTED:%=$(BUILD)/$(1)/%.o) \
                $(SIMT_PRODUCT:%=$(BUILD)/simt/%.o) \
                $(call object,$(SIMT_CASES) $(REFERENCE) test/support/run_tests.cpp $(LAUNCHER_NONE))
SIMT_LAUNCHER := $(if $(filter 1,$(MPI)),kernels/ranks/launcher_mpi.cpp,$(LAUNCHER_NONE))

$(BUILD)/test_simt: $(call simt_objects,simt)
	$(CXX) -o $@ $^ $(CATCH_LIBS)
$(BUILD)/test_simt_tsan: $(call simt_objects,simt_tsan)
	$(CXX) -fsanitize=thread -o $@ $^ $(CATCH_LIBS)
$(BUILD)/test_simt_asan: $(call simt_objects,simt_asan)
	$(CXX) -fsanitize=address,undefined -o $@ $^ $(CATCH_LIBS)
# Programs that run on the simulated GPU.
$(BUILD)/train_gpt_simt: $(BUILD)/train_gpt.cu.o
$(BUILD)/exchange_simt: $(call object,test/program/exchange.cpp)
$(BUILD)/bench_simt: $(call object,$(BENCH))
$(BUILD)/bench_matmul_simt: $(call object,$(BENCH_MATMUL)) $(BUILD)/simt/dev/bench_matmul.cu.o
$(addprefix $(BUILD)/,train_gpt_simt exchange_simt bench_simt bench_matmul_simt): $(SIMT_CORE) \
  $(CUDA_SOURCES:%=$(BUILD)/simt/%.o) $(HOST) $(call object,$(SIMT_LAUNCHER)) $(BUILD)/features
	$(CXX) -fopenmp -o $@ $(filter %.o,$^) $(if $(filter 1,$(MPI)),$(MPI_LIBS)) $(LIBS)
# This one loads a stand-in for NCCL as the GPU trainer loads NCCL.
STAND_IN     := test/simt/nccl_stand_in.cpp test/simt/nccl_operation.cpp
$(BUILD)/stand_in/libnccl.so.2: $(STAND_IN)
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) -O2 -fPIC -shared -Wl,-soname,libnccl.so.2 -o $@ $(filter %.cpp,$^)
$(BUILD)/train_gpt_simt_dlopen: $(filter-out $(STAND_IN:%=$(BUILD)/simt_core/%.o),$(SIMT_CORE)) \
  $(patsubst %,$(BUILD)/simt/%.o,$(CUDA_SOURCES) $(NCCL_LIBRARY)) $(BUILD)/train_gpt.cu.o $(HOST) \
  $(call object,$(LAUNCHER_NONE)) | $(BUILD)/stand_in/libnccl.so.2
	$(CXX) -fopenmp -rdynamic -o $@ $(filter %.o,$^) $(LIBS)

# The thread pool and its tests under ThreadSanitizer, which cannot follow OpenMP's threads.
POOL_TSAN := $(patsubst %,$(BUILD)/tsan/%.o,kernels/cpu/pool.cpp test/kernels/test_pool.cpp)
$(BUILD)/test_pool_tsan: $(POOL_TSAN) $(call object,$(TEST_MAIN))
	$(CXX) -fsanitize=thread -fopenmp -o $@ $^ $(CATCH_LIBS)
$(BUILD)/tsan/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(POOL_TSAN): OPT = -O1 -fsanitize=thread

# Code that reads untrusted files and messages, with sanitizers: in clang's fuzzer, and in the replay of its corpora. It
# is linked first, so that the linker keeps its inline functions.
PARSERS := $(wildcard test/fuzz/*.cpp $(addprefix data/,$(addsuffix /*.cpp,evaluation shards text tokenizer))) \
  $(addsuffix .cpp,$(addprefix training/models/,hf_config llmc_files) $(addprefix commands/,report_page run_records) \
  $(addprefix runtime/,checkpoint/checkpoint checkpoint/manifest checkpoint/safetensors checkpoint/shard \
  cluster/connection config/config config/model_options config/options io/files io/json io/mapped_file))
parsers_and_rest = $(patsubst %,$(BUILD)/$(1)/%.o,$(filter-out test/fuzz/$(2).cpp,$(PARSERS))) \
  $(call object,$(filter-out $(PARSERS),$(HOST_SOURCES)) $(CPU_SOURCES))
SANITIZED := -fsanitize=address,undefined -fno-sanitize-recover=undefined -D_GLIBCXX_ASSERTIONS
WRAPPED   := -Wl,--wrap=mmap,--wrap=munmap
$(BUILD)/test_corpora: $(call parsers_and_rest,replay,fuzzer) $(call object,$(TEST_MAIN))
	$(CXX) $(SANITIZED) -fopenmp $(WRAPPED) -o $@ $^ $(CPU_LIBS) $(CATCH_LIBS)
# Mutators are no parsers: they have no sanitizers and are linked last.
MUTATIONS := $(BUILD)/fuzzed/test/fuzz/mutations.cpp.o
$(BUILD)/fuzzed/fuzzer: $(filter-out $(MUTATIONS),$(call parsers_and_rest,fuzzed,replay)) $(MUTATIONS)
	clang++ $(SANITIZED) -fsanitize=fuzzer $(WRAPPED) -o $@ $^ $(CPU_LIBS) -lgomp
# The fuzzer also has the three that the replay leaves out. They take a fifth of the time to compile, and the address
# sanitizer reports null pointers too.
$(BUILD)/replay/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(SANITIZED) -fno-sanitize=null,object-size,vptr -Wno-maybe-uninitialized -Og -c -o $@ $<
IGNORED := test/fuzz/ignored.txt
FUZZED  := $(SANITIZED) -fsanitize=fuzzer-no-link -fsanitize-ignorelist=$(IGNORED) \
  -fsanitize-coverage-ignorelist=$(IGNORED)
$(MUTATIONS): FUZZED :=
$(BUILD)/fuzzed/%.cpp.o: %.cpp $(IGNORED)
	@mkdir -p $(@D)
	CCACHE_EXTRAFILES=$(IGNORED) clang++ $(filter-out -fopenmp,$(CXXFLAGS)) $(FUZZED) -O2 -c -o $@ $<

# Fault injection for runs of the trainer (test/faults), and the states that a power cut can leave.
FAULT_RULES := test/faults/rules.cpp
$(BUILD)/inject.so: test/faults/inject.cpp $(FAULT_RULES) test/faults/rules.h
	$(CXX) $(CXXFLAGS) -MF $@.d -fPIC -shared -o $@ $(filter %.cpp,$^) -ldl
$(BUILD)/faulty_fs: test/faults/faulty_fs.cpp $(FAULT_RULES) test/faults/rules.h
	$(CXX) $(CXXFLAGS) -MF $@.d -o $@ $(filter %.cpp,$^) $(FUSE_FLAGS) -lpthread
$(BUILD)/crash_states: $(call object,test/faults/crash_states.cpp) $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS)

# Ranks that exchange messages (test_exchange).
$(BUILD)/exchange_cpu: $(call object,test/program/exchange.cpp) $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS)

# Each wrapper of ptx.cuh with fixed inputs: on a GPU and, with its C++ twin, on the simulator.
$(BUILD)/ptx_probe_cuda: $(call object,$(PROBE))
	$(CXX) $(CXXFLAGS) -o $@ $^ $(CUDA_LIBS)
$(BUILD)/ptx_probe_simt: $(SIMT_CORE) $(PROBE:%=$(BUILD)/simt/%.o)
	$(CXX) -o $@ $^ $(LINK_RPATH)

# The same with the wrappers' inline PTX executed by test/ptx_probe/ptx_isa*.h.
PTX_TEXT := $(BUILD)/ptx_text
$(BUILD)/ptx_probe_text: $(SIMT_CORE) $(PROBE:%=$(BUILD)/simt_text/%.o)
	$(CXX) -o $@ $^ $(LINK_RPATH)
$(PTX_TEXT)/simt/ptx_twins.h: kernels/cuda/ptx.cuh
$(PTX_TEXT)/simt/hopper_twins.h: kernels/cuda/hopper/ptx_hopper.cuh kernels/cuda/hopper/ptx_wgmma.cuh
$(PTX_TEXT)/simt/%.h: test/ptx_probe/translate_ptx.py
	$< $(word 2,$^) $@
$(PROBE:%=$(BUILD)/simt_text/%.o): $(addprefix $(PTX_TEXT)/simt/,ptx_twins.h hopper_twins.h)
$(PROBE:%=$(BUILD)/simt_text/%.o): SIMT_FLAGS := -I$(PTX_TEXT) $(SIMT_FLAGS)

# Common headers are compiled once per set of options. g++ and clang use NAME.gch in place of NAME.
precompile = @mkdir -p $(@D); cp $< $(@:.gch=); $(CXX) $(1) -x c++-header -o $@ $<
define simt_rules
$(BUILD)/$(1)/precompiled.h.gch: test/simt/precompiled.h; $$(call precompile,$$(SIMT_FLAGS) $(2))
$(BUILD)/$(1)/%.o: % $(BUILD)/$(1)/precompiled.h.gch
	@mkdir -p $$(@D); $$(CXX) $$(SIMT_FLAGS) $(2) -include $(BUILD)/$(1)/precompiled.h -c -x c++ -o $$@ $$<
endef
$(eval $(call simt_rules,simt_core,-O2))
$(eval $(call simt_rules,simt,-O2 -fsanitize=alignment))
$(eval $(call simt_rules,simt_tsan,-O1 -fsanitize=thread))
$(eval $(call simt_rules,simt_asan,-Og -fsanitize=address -fsanitize=undefined -fsanitize-recover=address \
                                   -Wno-maybe-uninitialized))
$(BUILD)/simt_text/%.o: %
	@mkdir -p $(@D); $(CXX) $(SIMT_FLAGS) -O1 -c -x c++ -o $@ $<

# wgmma and setmaxnreg exist only in sm_90a.
$(call object,test/ptx_probe/hopper.cu test/ptx_probe/tensor_copies.cu): GENCODE = -gencode=arch=compute_90a,code=sm_90a
# ref:: has loops; the other code of tests and benchmarks runs once. g++ compiles it with -Og in 2/3 of the time of -O1.
TEST_OBJECTS := $(call object,$(filter-out test/reference/%,$(TEST_SOURCES)))
PRECOMPILED  := $(BUILD)/test/precompiled.h
$(TEST_OBJECTS) $(PRECOMPILED).gch $(call object,$(BENCH) $(BENCH_MATMUL)): OPT = -Og
PRECOMPILED_USERS := $(filter-out %/run_tests.cpp.o,$(TEST_OBJECTS))  # that one configures Catch2
$(PRECOMPILED_USERS): private EXTRA += -include $(PRECOMPILED)
$(PRECOMPILED_USERS): $(PRECOMPILED).gch
$(PRECOMPILED).gch: test/support/precompiled.h; $(call precompile,$(CXXFLAGS))

programs: $(PROGRAMS)  ## all programs that this machine can build: trainers, tests, benchmarks, probes
gpu-programs: $(addprefix $(BUILD)/,$(GPU_PROGRAMS))  ## those that need nvcc, for every GPU of ARCH
test:   ## install missing packages and run every test
	scripts/test.sh
interop: $(BUILD)/train_gpt_cpu  ## by hand: tests with real libraries from PyPI; NAMES= of test/interop
	python3 test/interop $(NAMES)
grids: $(BUILD)/train_gpt_cpu $(BUILD)/train_gpt_simt  ## by hand: all grids, models and levels of the tests of grids
	LONG=1 python3 test/program test_grid test_grid_torch test_pipeline test_context \
	    test_simulated_ranks.SimulatedRanks.test_grids_have_the_bits_of_one_rank
fuzz:  ## by hand, for hours: fuzz the parsers; FUZZERS="manifest ...", RUNS=, MINUTES=
	scripts/setup.sh fuzz
	$(MAKE) $(BUILD)/fuzzed/fuzzer
	dev/fuzz.py $(BUILD)/fuzzed/fuzzer $(if $(RUNS),--runs $(RUNS)) $(if $(MINUTES),--minutes $(MINUTES)) $(FUZZERS)
FAULT_TOOLS := $(addprefix $(BUILD)/,train_gpt_cpu inject.so crash_states $(if $(filter 1,$(FUSE)),faulty_fs))
faults: $(FAULT_TOOLS)  ## by hand, for hours: all fault campaigns; SEED=, NAMES= of test/faults
	python3 test/faults --long $(if $(SEED),--seed $(SEED)) $(NAMES)
soak: $(FAULT_TOOLS)  ## by hand, as root: random faults for MINUTES=60; SEED=, OUT= markdown
	python3 test/faults/soak.py --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out "$(OUT)")
bench: $(BUILD)/bench_cpu  ## milliseconds per op and per step on this machine
	$(BUILD)/bench_cpu
# Programs of an earlier build are removed. A program that cannot be built costs only its own stages.
gpu-check:  ## test and benchmark on this GPU: PART="measure prove sanitize", OUT=, LIMIT= s, STAGES=
	rm -f $(KIT_PROGRAMS:%=$(BUILD)/%)
	-$(MAKE) -k -j$$(nproc) ARCH=native $(KIT_PROGRAMS:%=$(BUILD)/%)
	scripts/gpu_check.py $(PART) --programs $(BUILD) $(if $(OUT),--out "$(OUT)") $(if $(LIMIT),--limit $(LIMIT)) \
	    $(if $(STAGES),--stages $(STAGES))
KIT_SETTINGS = BUILD=$(BUILD)_kit ARCH="80 90a" PTX=80 MARCH=x86-64-v3 MPI=0 DEPS= RPATH='$$$$ORIGIN/lib' SHARED=1 \
		NVCC_EXTRA=-compress-mode=size
gpu-kit:  ## build/gpu_kit.tgz: prebuilt programs for a GPU machine with only the driver and python3
	$(MAKE) $(KIT_SETTINGS) $(KIT_PROGRAMS:%=$(BUILD)_kit/%)
	scripts/pack_gpu_kit.py $(BUILD)_kit $(BUILD)/gpu_kit.tgz $(KIT_PROGRAMS)
# What nvcc compiles.
gpu-objects: $(NVCC_OBJECTS)
gpu-kit-objects:; $(MAKE) $(KIT_SETTINGS) gpu-objects
# Those whose code differs between architectures.
arch-objects: $(filter %sm90.cu.o %sm90_passes.cu.o $(BUILD)/kernels/cuda/hopper/% %/hopper.cu.o,$(NVCC_OBJECTS))
portability:  ## by hand, as root: build and test with the next Debian's g++ and clang, in a chroot
	dev/try_compilers.sh $(filter-out %_tsan %_asan,$(CPU_PROGRAMS))
busy-cores: $(BUILD)/train_gpt_cpu  ## step time on busy cores: AGAINST= trainer, TORCH= python
	dev/busy_cores.py $(AGAINST) $< $(if $(TORCH),--torch $(TORCH))
flakiness: programs  ## by hand, for hours: repeat tests on busy cores
	dev/repeat_tests.py --times 200 $(BUILD)/test_simt --seed 1
	dev/repeat_tests.py --times 10 --at-once 1 python3 test/program
try-deb: deb  ## by hand, as root: install the package in a fresh Debian, train, remove it
	dev/try_deb.sh $(BUILD)
.PHONY: programs gpu-programs test interop grids fuzz faults soak bench gpu-check gpu-kit gpu-objects gpu-kit-objects \
        arch-objects portability busy-cores flakiness try-deb
