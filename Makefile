# make help says what there is. Everything is built into build/, nothing is fetched.
CXX      ?= g++
OPT      ?= -O2
MARCH    ?= native
ARCH     ?= 80 86 89 90 100 120
PTX      ?= $(call ptx_of,$(lastword $(ARCH)))
BUILD    ?= build
# WERROR=1, as the tests set it: warnings, and kernels that spill registers, are errors. Compilers bring new warnings
# every year, and those must not break a user's build.
WERROR   ?=
# DEPS=folder: headers and libraries that make deps-folder put there, instead of the system's.
DEPS     ?=
PREFIX   ?= /usr/local
# RPATH=folder: where the programs look for libraries, instead of in the toolkit's folder: the kit's in $ORIGIN/lib.
RPATH    ?=
# SHARED=1: the GPU programs share one library of host code and kernels, in $(BUILD)/lib, as the kit's do.
SHARED   ?=
# The newest heading of CHANGELOG.md has the same number. An archive without git: make REVISION=...
VERSION  := 0.1.0
REVISION := $(or $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2> /dev/null),unknown)
DATE     := $(or $(shell git log -1 --format=%cs 2> /dev/null),$(shell date -r CHANGELOG.md +%F))
PROGRAM_VERSION := $(VERSION) ($(REVISION)$(DATE:%=, %))

comma    := ,

# g++ 12 wrongly warns of std::string's insides at -O3 (GCC bug 105651). clang does not know that warning, and has one
# for loops that it cannot vectorise. Without AVX-512, g++ notes how wide vectors are passed (psabi).
WARNINGS := -Wall -Wextra -Wshadow $(if $(filter 1,$(WERROR)),-Werror) -Wno-restrict -Wno-unknown-warning-option \
            -Wno-pass-failed -Wno-psabi

CXXFLAGS  = -std=c++20 $(OPT) -march=$(MARCH) -fno-math-errno -fno-trapping-math -fopenmp -g1 -I. -MMD -MP \
            $(if $(SHARED),-fPIC) $(if $(DEPS),-isystem $(DEPS)/include) $(WARNINGS) $(EXTRA)
LINK_RPATH = $(if $(RPATH),-Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)'$(RPATH)')
LIBS      = $(if $(DEPS),-L$(DEPS)/lib -Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)$(abspath $(DEPS))/lib) \
            $(LINK_RPATH) -lpcre2-8 -lisal -lzstd -lsnappy -lxxhash -lsodium -lutf8proc -lpthread -ldl

# What carries collectives between ranks, MPI on CPUs and NCCL on GPUs (there MPI only lets mpirun start them), is found
# by compiling a call of it, and linking MPI's (NCCL is loaded when ranks need it): 1, or 0 as with MPI=0 NCCL=0.
calls        = $(shell printf '\043include <$(1)>\nint main() { $(2); }\n' | \
                 $(CXX) -x c++ - -o /dev/null $(3) > /dev/null 2>&1 && echo 1 || echo 0)
MPI_FLAGS   := $(patsubst -I%,-isystem %,$(shell mpicc --showme:compile 2> /dev/null)) -DOMPI_SKIP_MPICXX
MPI_LIBS    := $(or $(shell mpicc --showme:link 2> /dev/null),-lmpi)
MPI         := $(call calls,mpi.h,MPI_Init(0$(comma) 0),$(MPI_FLAGS) $(MPI_LIBS))

# The GPU trainer is built where nvcc is: for the GPUs named in ARCH, by compute capability, and as PTX for those from
# the capability PTX on.
NVCC        := $(shell command -v nvcc)
CUDA_HOME   := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_LIBS    = -L$(CUDA_HOME)/lib64 $(if $(RPATH),,-Wl$(comma)-rpath$(comma)$(CUDA_HOME)/lib64) \
               -lcublasLt -lcudart $(LIBS)
NCCL_FLAGS   = $(if $(DEPS),-isystem $(DEPS)/include) -isystem $(CUDA_HOME)/include
NCCL        := $(if $(NVCC),$(call calls,nccl.h,ncclGetVersion(0),$(NCCL_FLAGS) -c),0)

COMM_NONE     := kernels/ranks/comm_single.cpp
COMM_MISSING  := $(if $(filter 0,$(MPI)),mpi.h) $(if $(filter 0,$(NCCL)),nccl.h)
LAUNCHER_NONE := kernels/ranks/launcher_none.cpp
LAUNCHER_CUDA := $(if $(filter 11,$(MPI)$(NCCL)),kernels/ranks/launcher_mpi.cpp,$(LAUNCHER_NONE))
COMM_CPU      := $(if $(filter 1,$(MPI)),kernels/cpu/comm_mpi.cpp,$(COMM_NONE)) $(LAUNCHER_NONE)
CPU_SOURCES  := $(filter-out kernels/cpu/comm_%,$(wildcard kernels/cpu/*.cpp)) $(COMM_CPU)
CUDA_SOURCES := $(wildcard kernels/cuda/*.cu)
COMM_CUDA    := kernels/cuda/comm_nccl.cu
NCCL_LIBRARY := kernels/cuda/nccl_library.cpp
HOST_SOURCES := $(wildcard commands/*.cpp model/*.cpp runtime/*/*.cpp data/*.cpp)
TEST_SOURCES := $(wildcard test/*.cpp)
# The cases that hold on every device.
SEAM_TESTS   := $(wildcard test/test_ops_*.cpp) $(addprefix test/test_,comm.cpp device.cpp stopwatch.cpp)
OPS_TESTS    := $(SEAM_TESTS) $(wildcard test/test_model*.cpp test/reference*.cpp) test/allocations.cpp \
                test/main.cpp test/run_tests.cpp
BENCH        := $(filter-out dev/bench_matmul%,$(wildcard dev/bench*.cpp))
BENCH_MATMUL := $(addprefix dev/bench_,matmul.cpp report.cpp timing.cpp workloads.cpp)
PROBE        := $(wildcard test/ptx_probe/*.cu)
object        = $(patsubst %,$(BUILD)/%.o,$(1))
HOST         := $(call object,$(HOST_SOURCES))
CPU          := $(call object,$(CPU_SOURCES))
CUDA         := $(call object,$(filter-out $(COMM_CUDA),$(CUDA_SOURCES)) $(LAUNCHER_CUDA) \
                  $(if $(filter 1,$(NCCL)),$(COMM_CUDA) $(NCCL_LIBRARY),$(COMM_NONE)))
# Code that runs before main() must be in the program itself.
AT_START     := $(call object,runtime/io/cpu_features.cpp)
GPU_CODE     := $(if $(SHARED),$(BUILD)/lib/libtrain_gpt_cuda.so $(AT_START),$(HOST) $(CUDA))
CPU_LIBS      = -ldnnl $(if $(filter 1,$(MPI)),$(MPI_LIBS)) $(LIBS)

# The file system of the campaigns in test/faults is built where libfuse3 is.
FUSE_FLAGS  := -DFUSE_USE_VERSION=31 -lfuse3
FUSE        := $(call calls,fuse3/fuse.h,fuse_version(),$(FUSE_FLAGS))

# Catch2 3 is a library, Catch2 2 is one header.
CATCH_3    := $(wildcard $(addsuffix /catch2/catch_all.hpp,$(DEPS:=/include) /usr/include /usr/local/include))
CATCH_LIBS := $(if $(CATCH_3),-lCatch2)

# Architectures of one generation are compiled to PTX once: half of nvcc's time, and the machine code is the same.
ptx_of     = $(or $(if $(filter 86 87 89,$(1)),80),$(if $(filter 103 120 121,$(1)),100),$(1))
GENCODE   := $(if $(filter native,$(ARCH)),-arch=native,\
               $(foreach arch,$(ARCH),-gencode=arch=compute_$(call ptx_of,$(arch)),code=sm_$(arch)) \
               -gencode=arch=compute_$(PTX),code=compute_$(PTX))
NVCCFLAGS  = -std=c++20 -O3 --expt-relaxed-constexpr -lineinfo -I. $(GENCODE) -Xptxas -v \
             $(if $(filter 1,$(WERROR)),-Werror all-warnings) \
             -Xcompiler -Wall,-Wextra,-Wno-unused-parameter$(if $(SHARED),$(comma)-fPIC) \
             -DCUDA_ARCHITECTURES='"$(strip $(ARCH))"' $(NVCC_EXTRA)
GPU_LIBS  := $(if $(findstring mpi,$(LAUNCHER_CUDA)),$(MPI_LIBS)) $(CUDA_LIBS)

CPU_PROGRAMS := train_gpt_cpu test_cpu test_pool_tsan test_corpora bench_cpu test_simt test_simt_tsan test_simt_asan \
                train_gpt_simt train_gpt_simt_dlopen bench_simt bench_matmul_simt ptx_probe_simt ptx_probe_text \
                inject.so crash_states $(if $(filter 1,$(FUSE)),faulty_fs)
GPU_PROGRAMS := train_gpt test_cuda bench_cuda bench_matmul_cuda ptx_probe_cuda
KIT_PROGRAMS := $(GPU_PROGRAMS) train_gpt_cpu ptx_probe_simt
PROGRAMS     := $(addprefix $(BUILD)/,$(CPU_PROGRAMS) $(if $(NVCC),$(GPU_PROGRAMS)))

TRAINERS  := $(BUILD)/train_gpt_cpu $(if $(and $(NVCC),$(CUDA_SOURCES)),$(BUILD)/train_gpt)
all: $(TRAINERS)  ## the trainer for the CPU and, with nvcc, for GPUs
	@for trainer in $^; do echo; $$trainer --version; done
	@$(if $(NVCC),,echo; echo "nvcc was not found: no trainer for GPUs")

# What the page of `report` consists of is part of its object.
$(call object,commands/report_page.cpp): $(wildcard commands/report/*.* commands/report/uplot/*)

# Linked anew when what is found changes, and main() compiled anew with a new revision.
$(BUILD)/features: CONTENT = MPI=$(MPI) NCCL=$(NCCL)
$(BUILD)/version.txt: CONTENT = $(PROGRAM_VERSION)
$(BUILD)/features $(BUILD)/version.txt: FORCE
	@mkdir -p $(@D); echo "$(CONTENT)" > $@.new; cmp -s $@.new $@ || cp $@.new $@
$(BUILD)/train_gpt.cu.o: $(BUILD)/version.txt
$(BUILD)/train_gpt.cu.o: EXTRA += -DPROGRAM_VERSION='"$(PROGRAM_VERSION)"'
$(call object,kernels/cpu/comm_mpi.cpp kernels/ranks/launcher_mpi.cpp): EXTRA += $(MPI_FLAGS)
$(call object,$(NCCL_LIBRARY)): EXTRA += $(NCCL_FLAGS)
$(call object,$(COMM_NONE)): EXTRA += -DCOMM_MISSING='"$(subst h n,h$(comma) n,$(strip $(COMM_MISSING)))"'
$(call object,$(COMM_NONE)): $(BUILD)/features

$(BUILD)/train_gpt_cpu: $(BUILD)/train_gpt.cu.o $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS)
$(BUILD)/train_gpt: $(BUILD)/train_gpt.cu.o $(GPU_CODE) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o %.so,$^) $(GPU_LIBS)
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

# It needs no rpath: the programs' RPATH is a DT_RPATH, which also holds for the libraries that they load.
$(BUILD)/lib/libtrain_gpt_cuda.so: $(filter-out $(AT_START),$(HOST)) $(CUDA) $(BUILD)/features
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -shared -Wl,-soname,$(@F) -o $@ $(filter %.o,$^) $(filter-out -Wl%,$(GPU_LIBS))

# The simulated GPU: the CUDA sources as C++ against test/simt, and the cases that test the CPU's ops. The simulator is
# not under test: built without sanitizers and linked first, so that its inline functions are the ones that stay. Cases
# that have no kernels of their own are not either: of single ops, for which the CPU's objects are linked last, and of
# products. Misaligned vectors are always looked for; those calls end in test/simt/alignment.cpp.
SIMT_FLAGS   := -std=c++20 -march=$(MARCH) -fno-math-errno -g1 -I. -Itest/simt/include -MMD -MP \
                $(if $(DEPS),-isystem $(DEPS)/include) $(WARNINGS) -Wno-unknown-pragmas \
                -Wno-unused-const-variable -DCUDA_ARCHITECTURES='"simulated"'
SIMT_CORE    := $(patsubst %,$(BUILD)/simt_core/%.o,$(filter-out test/simt/test_% test/simt/main.cpp, \
                  $(wildcard test/simt/*.cpp)))
SIMT_CASES   := $(filter test/test_ops_%,$(SEAM_TESTS))
SIMT_PRODUCT := $(wildcard test/simt/test_matmul_*.cpp)
SIMT_TESTED  := $(CUDA_SOURCES) $(filter-out $(SIMT_PRODUCT),$(wildcard test/simt/test_*.cpp)) \
                $(filter-out $(SIMT_CASES),$(SEAM_TESTS))
simt_objects  = $(SIMT_CORE) $(BUILD)/simt_core/test/simt/main.cpp.o $(SIMT_TESTED:%=$(BUILD)/$(1)/%.o) \
                $(SIMT_PRODUCT:%=$(BUILD)/simt/%.o) \
                $(call object,$(SIMT_CASES) $(wildcard test/reference*.cpp) test/run_tests.cpp $(LAUNCHER_NONE))
SIMT_LAUNCHER := $(if $(filter 1,$(MPI)),kernels/ranks/launcher_mpi.cpp,$(LAUNCHER_NONE))

$(BUILD)/test_simt: $(call simt_objects,simt)
	$(CXX) -o $@ $^ $(CATCH_LIBS)
$(BUILD)/test_simt_tsan: $(call simt_objects,simt_tsan)
	$(CXX) -fsanitize=thread -o $@ $^ $(CATCH_LIBS)
$(BUILD)/test_simt_asan: $(call simt_objects,simt_asan)
	$(CXX) -fsanitize=address,undefined -o $@ $^ $(CATCH_LIBS)
# Programs that take the simulated GPU for a real one.
$(BUILD)/train_gpt_simt: $(BUILD)/train_gpt.cu.o
$(BUILD)/bench_simt: $(call object,$(BENCH))
$(BUILD)/bench_matmul_simt: $(call object,$(BENCH_MATMUL)) $(BUILD)/simt/dev/bench_matmul.cu.o
$(addprefix $(BUILD)/,train_gpt_simt bench_simt bench_matmul_simt): $(SIMT_CORE) $(CUDA_SOURCES:%=$(BUILD)/simt/%.o) \
  $(HOST) $(call object,$(SIMT_LAUNCHER)) $(BUILD)/features
	$(CXX) -fopenmp -o $@ $(filter %.o,$^) $(if $(filter 1,$(MPI)),$(MPI_LIBS)) $(LIBS)
# The same, which loads the stand-in for NCCL as the GPU trainer loads NCCL.
STAND_IN     := test/simt/nccl_stand_in.cpp test/simt/nccl_operation.cpp
$(BUILD)/stand_in/libnccl.so.2: $(STAND_IN)
	@mkdir -p $(@D)
	$(CXX) $(SIMT_FLAGS) -O2 -fPIC -shared -Wl,-soname,libnccl.so.2 -o $@ $(filter %.cpp,$^)
$(BUILD)/train_gpt_simt_dlopen: $(filter-out $(STAND_IN:%=$(BUILD)/simt_core/%.o),$(SIMT_CORE)) \
  $(patsubst %,$(BUILD)/simt/%.o,$(CUDA_SOURCES) $(NCCL_LIBRARY)) $(BUILD)/train_gpt.cu.o $(HOST) \
  $(call object,$(LAUNCHER_NONE)) | $(BUILD)/stand_in/libnccl.so.2
	$(CXX) -fopenmp -rdynamic -o $@ $(filter %.o,$^) $(LIBS)

# The pool of threads and its tests under ThreadSanitizer, which cannot follow OpenMP's own threads.
POOL_TSAN := $(patsubst %,$(BUILD)/tsan/%.o,kernels/cpu/pool.cpp test/test_pool.cpp)
$(BUILD)/test_pool_tsan: $(POOL_TSAN) $(call object,test/main.cpp test/run_tests.cpp)
	$(CXX) -fsanitize=thread -fopenmp -o $@ $^ $(CATCH_LIBS)
$(BUILD)/tsan/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(POOL_TSAN): OPT = -O1 -fsanitize=thread

# What reads files and messages of other origin, under sanitizers: in clang's fuzzer, and in the replay of its corpora.
# It is linked before the rest, so that its inline functions are the ones that stay.
PARSERS := $(wildcard test/fuzz/*.cpp) $(addsuffix .cpp,$(addprefix commands/,hf_config llmc_files report_page \
  run_records) $(addprefix data/,block_checksums byte_source dataset dataset_record encoder eval_file input_paths \
  mixture nfc parquet pretokenizer questions shards text_formats text_input tokenizer tokenizer_files \
  tokenizer_rules) $(addprefix runtime/,checkpoint/checkpoint checkpoint/inspect checkpoint/manifest \
  checkpoint/safetensors checkpoint/shard cluster/connection config/config config/model_options config/options \
  config/schema io/files io/json io/mapped_file logging/event_file))
parsers_and_rest = $(patsubst %,$(BUILD)/$(1)/%.o,$(filter-out test/fuzz/$(2).cpp,$(PARSERS))) \
  $(call object,$(filter-out $(PARSERS),$(HOST_SOURCES)) $(CPU_SOURCES))
SANITIZED := -fsanitize=address,undefined -fno-sanitize-recover=undefined -D_GLIBCXX_ASSERTIONS
WRAPPED   := -Wl,--wrap=mmap,--wrap=munmap
$(BUILD)/test_corpora: $(call parsers_and_rest,replay,fuzzer) $(call object,test/main.cpp test/run_tests.cpp)
	$(CXX) $(SANITIZED) -fopenmp $(WRAPPED) -o $@ $^ $(CPU_LIBS) $(CATCH_LIBS)
# What changes inputs is no parser and has no sanitizers. Linked last, its inline functions are none of those that stay.
MUTATIONS := $(BUILD)/fuzzed/test/fuzz/mutations.cpp.o
$(BUILD)/fuzzed/fuzzer: $(filter-out $(MUTATIONS),$(call parsers_and_rest,fuzzed,replay)) $(MUTATIONS)
	clang++ $(SANITIZED) -fsanitize=fuzzer $(WRAPPED) -o $@ $^ $(CPU_LIBS) -lgomp
$(BUILD)/replay/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) $(SANITIZED) -Wno-maybe-uninitialized -O1 -c -o $@ $<
IGNORED := test/fuzz/ignored.txt
FUZZED  := $(SANITIZED) -fsanitize=fuzzer-no-link -fsanitize-ignorelist=$(IGNORED) \
  -fsanitize-coverage-ignorelist=$(IGNORED)
$(MUTATIONS): FUZZED :=
$(BUILD)/fuzzed/%.cpp.o: %.cpp $(IGNORED)
	@mkdir -p $(@D)
	CCACHE_EXTRAFILES=$(IGNORED) clang++ $(filter-out -fopenmp,$(CXXFLAGS)) $(FUZZED) -O2 -c -o $@ $<

# What injects faults into runs of the trainer (test/faults), and what restores a run as a power cut may leave it.
FAULT_RULES := test/faults/rules.cpp
$(BUILD)/inject.so: test/faults/inject.cpp $(FAULT_RULES) test/faults/rules.h
	$(CXX) $(CXXFLAGS) -MF $@.d -fPIC -shared -o $@ $(filter %.cpp,$^) -ldl
$(BUILD)/faulty_fs: test/faults/faulty_fs.cpp $(FAULT_RULES) test/faults/rules.h
	$(CXX) $(CXXFLAGS) -MF $@.d -o $@ $(filter %.cpp,$^) $(FUSE_FLAGS) -lpthread
$(BUILD)/crash_states: $(call object,test/faults/crash_states.cpp) $(HOST) $(CPU) $(BUILD)/features
	$(CXX) $(CXXFLAGS) -o $@ $(filter %.o,$^) $(CPU_LIBS)

# Each wrapper of ptx.cuh on fixed inputs: on a GPU and, against its twin, on the simulator.
$(BUILD)/ptx_probe_cuda: $(call object,$(PROBE))
	$(CXX) $(CXXFLAGS) -o $@ $^ $(CUDA_LIBS)
$(BUILD)/ptx_probe_simt: $(SIMT_CORE) $(PROBE:%=$(BUILD)/simt/%.o)
	$(CXX) -o $@ $^ $(LINK_RPATH)

# The same with the inline PTX of the wrappers carried out by the statements of test/ptx_probe/ptx_isa*.h.
PTX_TEXT := $(BUILD)/ptx_text
$(BUILD)/ptx_probe_text: $(SIMT_CORE) $(PROBE:%=$(BUILD)/simt_text/%.o)
	$(CXX) -o $@ $^ $(LINK_RPATH)
$(PTX_TEXT)/simt/ptx_twins.h: kernels/cuda/ptx.cuh
$(PTX_TEXT)/simt/hopper_twins.h: test/ptx_probe/ptx_hopper.cuh test/ptx_probe/ptx_wgmma.cuh
$(PTX_TEXT)/simt/%.h: test/ptx_probe/translate_ptx.py
	$< $(word 2,$^) $@
$(PROBE:%=$(BUILD)/simt_text/%.o): $(addprefix $(PTX_TEXT)/simt/,ptx_twins.h hopper_twins.h)
$(PROBE:%=$(BUILD)/simt_text/%.o): SIMT_FLAGS := -I$(PTX_TEXT) $(SIMT_FLAGS)

simt_compile = @mkdir -p $(@D); $(CXX) $(SIMT_FLAGS) $(1) -c -x c++ -o $@ $<
$(BUILD)/simt_core/%.o: %; $(call simt_compile,-O2)
$(BUILD)/simt/%.o: %;      $(call simt_compile,-O2 -fsanitize=alignment)
$(BUILD)/simt_text/%.o: %; $(call simt_compile,-O1)
$(BUILD)/simt_tsan/%.o: %; $(call simt_compile,-O1 -fsanitize=thread -fsanitize=alignment)
$(BUILD)/simt_asan/%.o: %; $(call simt_compile,-O1 -fsanitize=address -fsanitize=undefined -fsanitize-recover=address \
                             -Wno-maybe-uninitialized)

# The inner loops are written to be unrolled and vectorised; the rest only has to compile quickly.
$(CPU): OPT = -O3
# The code of commands and of tests runs once, and is half of what the compiler has to do. ref:: has loops.
$(call object,$(wildcard commands/*.cpp) $(filter-out test/reference%,$(TEST_SOURCES))): OPT = -O1

$(BUILD)/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -x c++ -o $@ $<
# Spills and local memory are findings of check_ptxas.py, which reads what ptxas says.
NVCC_OBJECTS := $(sort $(call object,$(CUDA_SOURCES) $(PROBE) dev/bench_matmul.cu))
$(NVCC_OBJECTS): $(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo nvcc $<
	@set -o pipefail; $(NVCC) $(NVCCFLAGS) -MMD -MP -MT $@ -MF $(@:.o=.d) -c -o $@.part $< 2>&1 \
	    | scripts/check_ptxas.py $(if $(filter 1,$(WERROR)),--werror) $(BUILD)/ptxas/$(subst /,.,$*).tsv && mv $@.part $@
$(NVCC_OBJECTS): SHELL := bash
# wgmma and setmaxnreg exist in the variant of sm_90 only that promises nothing to later GPUs.
$(call object,test/ptx_probe/hopper.cu test/ptx_probe/tensor_copies.cu): GENCODE = -gencode=arch=compute_90a,code=sm_90a

programs: $(PROGRAMS)  ## every program that this machine can build: trainers, tests, benchmarks, probes
gpu-programs: $(addprefix $(BUILD)/,$(GPU_PROGRAMS))  ## of these, what needs nvcc, for every GPU of ARCH
run:    ## the quickstart: install, build, train on the King James text, print samples
	scripts/quickstart.sh
test:   ## install what is missing and run every test
	scripts/test.sh
interop: $(BUILD)/train_gpt_cpu  ## by hand: tests with real programs and libraries from PyPI; NAMES= of test/interop
	python3 test/interop $(NAMES)
fuzz:  ## by hand, for hours: fuzz what reads files; FUZZERS="manifest ...", RUNS=, MINUTES=
	scripts/setup.sh fuzz
	$(MAKE) $(BUILD)/fuzzed/fuzzer
	dev/fuzz.py $(BUILD)/fuzzed/fuzzer $(if $(RUNS),--runs $(RUNS)) $(if $(MINUTES),--minutes $(MINUTES)) $(FUZZERS)
FAULT_TOOLS := $(addprefix $(BUILD)/,train_gpt_cpu inject.so crash_states $(if $(filter 1,$(FUSE)),faulty_fs))
faults: $(FAULT_TOOLS)  ## by hand, for hours: every case of the fault campaigns; SEED=, NAMES= of test/faults
	python3 test/faults --long $(if $(SEED),--seed $(SEED)) $(NAMES)
soak: $(FAULT_TOOLS)  ## by hand, as root: random faults every few seconds for MINUTES=60; SEED=, OUT= markdown
	python3 test/faults/soak.py --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out "$(OUT)")
check:  ## the rules of the house: who includes whom, sizes of files and functions
	python3 scripts/check_house.py
bench: $(BUILD)/bench_cpu  ## milliseconds per op and per step on this machine
	$(BUILD)/bench_cpu
# Programs of an earlier build must not be taken for this one's; one that cannot be built costs only its own stages.
gpu-check:  ## measure and prove the build on this machine's GPU: PART="measure prove sanitize", OUT=, LIMIT= s, STAGES=
	rm -f $(KIT_PROGRAMS:%=$(BUILD)/%)
	-$(MAKE) -k -j$$(nproc) ARCH=native $(KIT_PROGRAMS:%=$(BUILD)/%)
	scripts/gpu_check.py $(PART) --programs $(BUILD) $(if $(OUT),--out "$(OUT)") $(if $(LIMIT),--limit $(LIMIT)) \
	    $(if $(STAGES),--stages $(STAGES))
portability:  ## by hand, as root: build and test with g++ and clang of the next Debian release, in a chroot
	dev/try_compilers.sh $(filter-out %_tsan %_asan,$(CPU_PROGRAMS))
gpu-kit:  ## build/gpu_kit.tgz: prebuilt programs and scripts for a GPU machine that has only the driver and python3
	$(MAKE) BUILD=$(BUILD)_kit ARCH="80 90a" PTX=80 MARCH=x86-64-v3 MPI=0 DEPS= RPATH='$$$$ORIGIN/lib' SHARED=1 \
	    NVCC_EXTRA=-compress-mode=size $(KIT_PROGRAMS:%=$(BUILD)_kit/%)
	scripts/pack_gpu_kit.py $(BUILD)_kit $(BUILD)/gpu_kit.tgz $(KIT_PROGRAMS)
busy-cores: $(BUILD)/train_gpt_cpu  ## step time next to busy loops: AGAINST= trainer, TORCH= python
	dev/busy_cores.py $(AGAINST) $< $(if $(TORCH),--torch $(TORCH))
flakiness: programs  ## by hand, for hours: tests again and again next to two busy loops
	dev/repeat_tests.py --times 200 $(BUILD)/test_simt --seed 1
	dev/repeat_tests.py --times 10 --at-once 1 python3 test/program
deps-folder:  ## gather headers and libraries in DEPS=folder for a machine that lacks them
	scripts/deps_folder.sh "$(DEPS)"
install:  ## the programs that were built and what belongs to them, below PREFIX=/usr/local; DESTDIR= for packages
	scripts/packaging/install.sh install "$(BUILD)" "$(PREFIX)" "$(DESTDIR)"
uninstall:  ## remove what make install with the same PREFIX= and DESTDIR= has installed
	scripts/packaging/install.sh uninstall "$(BUILD)" "$(PREFIX)" "$(DESTDIR)"
deb:    ## build/train-gpt_VERSION_amd64.deb: a Debian package of the CPU trainer, for x86-64-v3
	$(MAKE) BUILD=$(BUILD)_deb MARCH=x86-64-v3 NVCC= DEPS= RPATH= $(BUILD)_deb/train_gpt_cpu
	scripts/packaging/deb.sh $(BUILD)_deb $(VERSION) $(BUILD)
try-deb: deb  ## by hand, as root: install the package in a fresh Debian, train, remove it
	dev/try_deb.sh $(BUILD)
clean:  ## remove build/
	rm -rf $(BUILD)
help:   ## this list
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

.PHONY: FORCE all programs gpu-programs run test interop faults soak fuzz check bench busy-cores flakiness gpu-check \
        portability gpu-kit deps-folder install uninstall deb try-deb clean help
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
