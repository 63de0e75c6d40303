# `make help` lists the targets. Everything is built in build/; nothing is downloaded.
CXX      ?= g++
OPT      ?= -O2
MARCH    ?= native
ARCH     ?= 80 86 89 90 100 120
PTX      ?= $(call ptx_of,$(lastword $(ARCHITECTURES)))
BUILD    ?= build
# WERROR=1 (set by the tests): warnings and register spills are errors. New compilers must not break a user's build.
WERROR   ?=
# DEPS=folder: use the headers and libraries that `make deps-folder` has put there.
DEPS     ?=
PREFIX   ?= /usr/local
# RPATH=folder: where programs look for libraries instead of the toolkit's folder. The GPU kit uses $ORIGIN/lib.
RPATH    ?=
# SHARED=1: the GPU programs share one library, in $(BUILD)/lib. The GPU kit uses this.
SHARED   ?=
# CHANGELOG.md's newest heading has the same version. Without git: make REVISION=...
VERSION  := 0.1.0
REVISION := $(or $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2> /dev/null),unknown)
DATE     := $(or $(shell git log -1 --format=%cs 2> /dev/null),$(shell date -r CHANGELOG.md +%F))
PROGRAM_VERSION := $(VERSION) ($(REVISION)$(DATE:%=, %))
comma    := ,

# restrict: GCC bug 105651. pass-failed: clang's, of loops that it cannot vectorize. psabi: g++'s, of wide vectors.
WARNINGS := -Wall -Wextra -Wshadow $(if $(filter 1,$(WERROR)),-Werror) -Wno-restrict -Wno-unknown-warning-option \
            -Wno-pass-failed -Wno-psabi

CXXFLAGS  = -std=c++20 $(OPT) -march=$(MARCH) -fno-math-errno -fno-trapping-math -fopenmp -g1 -I. -MMD -MP \
            $(if $(SHARED),-fPIC) $(if $(DEPS),-isystem $(DEPS)/include) $(WARNINGS) $(EXTRA)
LINK_RPATH = $(if $(RPATH),-Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)'$(RPATH)')
LIBS      = $(if $(DEPS),-L$(DEPS)/lib -Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)$(abspath $(DEPS))/lib) \
            $(LINK_RPATH) -lpcre2-8 -lisal -lzstd -lsnappy -lxxhash -lsodium -lutf8proc -lpthread -ldl

# MPI (collectives on CPUs; with GPUs it only lets mpirun start ranks) and NCCL are used if a call of them compiles and,
# for MPI, links. NCCL is loaded at run time. MPI=0 and NCCL=0 build without them.
calls        = $(shell printf '\043include <$(1)>\nint main() { $(2); }\n' | \
                 $(CXX) -x c++ - -o /dev/null $(3) > /dev/null 2>&1 && echo 1 || echo 0)
MPI_FLAGS   := $(patsubst -I%,-isystem %,$(shell mpicc --showme:compile 2> /dev/null)) -DOMPI_SKIP_MPICXX
MPI_LIBS    := $(or $(shell mpicc --showme:link 2> /dev/null),-lmpi)
MPI         := $(call calls,mpi.h,MPI_Init(0$(comma) 0),$(MPI_FLAGS) $(MPI_LIBS))

# The GPU trainer is built if nvcc is found: machine code for the compute capabilities in ARCH, PTX for later GPUs.
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
COMM_CPU      := $(if $(filter 1,$(MPI)),kernels/cpu/comm_mpi.cpp,$(COMM_NONE) $(LAUNCHER_NONE))
CPU_SOURCES  := $(filter-out kernels/cpu/comm_%,$(wildcard kernels/cpu/*.cpp)) $(COMM_CPU)
CUDA_SOURCES := $(wildcard kernels/cuda/*.cu kernels/cuda/*/*.cu)
COMM_CUDA    := kernels/cuda/comm_nccl.cu
NCCL_LIBRARY := kernels/cuda/nccl_library.cpp
HOST_SOURCES := $(wildcard $(addsuffix /*.cpp,commands training training/models model runtime/* data/*))
object        = $(patsubst %,$(BUILD)/%.o,$(1))
HOST         := $(call object,$(HOST_SOURCES))
CPU          := $(call object,$(CPU_SOURCES))
CUDA         := $(call object,$(filter-out $(COMM_CUDA),$(CUDA_SOURCES)) $(LAUNCHER_CUDA) \
                  $(if $(filter 1,$(NCCL)),$(COMM_CUDA) $(NCCL_LIBRARY),$(COMM_NONE)))
# Code that runs before main() must be in the program, not in the library.
AT_START     := $(call object,runtime/io/cpu_features.cpp)
GPU_CODE     := $(if $(SHARED),$(BUILD)/lib/libtrain_gpt_cuda.so $(AT_START),$(HOST) $(CUDA))
CPU_LIBS      = -ldnnl $(if $(filter 1,$(MPI)),$(MPI_LIBS)) $(LIBS)

# GPUs of one generation share their PTX: half of nvcc's time for the same machine code. 90 stands for 90a.
GPUS_HERE  = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | tr -d . | sort -nu)
ARCHITECTURES := $(patsubst 90,90a,$(or $(if $(filter native,$(ARCH)),$(GPUS_HERE)),$(ARCH)))
ptx_of     = $(or $(if $(filter 86 87 89,$(1)),80),$(if $(filter 103 120 121,$(1)),100),$(1))
GENCODE   := $(if $(filter native,$(ARCHITECTURES)),-arch=native,\
               $(foreach arch,$(ARCHITECTURES),-gencode=arch=compute_$(call ptx_of,$(arch)),code=sm_$(arch)) \
               -gencode=arch=compute_$(PTX),code=compute_$(PTX))
NVCCFLAGS  = -std=c++20 -O3 --expt-relaxed-constexpr -lineinfo -I. $(GENCODE) -Xptxas -v \
             $(if $(filter 1,$(WERROR)),-Werror all-warnings) \
             -Xcompiler -Wall,-Wextra,-Wno-unused-parameter$(if $(SHARED),$(comma)-fPIC) \
             -DCUDA_ARCHITECTURES='"$(strip $(ARCHITECTURES))"' $(NVCC_EXTRA)
GPU_LIBS  := $(if $(findstring mpi,$(LAUNCHER_CUDA)),$(MPI_LIBS)) $(CUDA_LIBS)

TRAINERS  := $(BUILD)/train_gpt_cpu $(if $(and $(NVCC),$(CUDA_SOURCES)),$(BUILD)/train_gpt)
all: $(TRAINERS)  ## the CPU trainer and, with nvcc, the GPU trainer
	@for trainer in $^; do echo; $$trainer --version; done
	@$(if $(NVCC),,echo; echo "nvcc was not found: the GPU trainer is not built")

# The files of `report`'s page are embedded in this object.
$(call object,commands/report_page.cpp): $(wildcard commands/report/*.* commands/report/uplot/*)

# Programs are linked again when MPI or NCCL appears or disappears; main() is compiled again for a new revision.
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
# No rpath: the programs have a DT_RPATH, which also applies to the libraries that they load.
$(BUILD)/lib/libtrain_gpt_cuda.so: $(filter-out $(AT_START),$(HOST)) $(CUDA) $(BUILD)/features
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -shared -Wl,-soname,$(@F) -o $@ $(filter %.o,$^) $(filter-out -Wl%,$(GPU_LIBS))

# Loops of the CPU kernels are written to be unrolled and vectorized. Code that runs once only has to compile quickly.
$(CPU): OPT = -O3
$(call object,$(wildcard commands/*.cpp training/*.cpp training/models/*.cpp)): OPT = -O1

$(BUILD)/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -x c++ -o $@ $<
# check_ptxas.py reads ptxas's output and reports spills and local memory.
NVCC_OBJECTS := $(sort $(call object,$(CUDA_SOURCES) $(wildcard test/ptx_probe/*.cu) dev/bench_matmul.cu))
$(NVCC_OBJECTS): $(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D); echo nvcc $<
	@set -o pipefail; $(NVCC) $(NVCCFLAGS) -MMD -MP -MT $@ -MF $(@:.o=.d) -c -o $@.part $< 2>&1 \
	    | scripts/check_ptxas.py $(if $(filter 1,$(WERROR)),--werror) $(BUILD)/ptxas/$(subst /,.,$*).tsv && mv $@.part $@
$(NVCC_OBJECTS): SHELL := bash

run:    ## the quickstart: install packages, build, train on the King James text
	scripts/quickstart.sh
check:  ## style and structure: include rules, sizes, dead links
	python3 scripts/check_house.py
deps-folder:  ## copy headers and libraries into DEPS=folder for a machine without them
	scripts/deps_folder.sh "$(DEPS)"
install:  ## install the programs below PREFIX=/usr/local; DESTDIR= for packages
	scripts/packaging/install.sh install "$(BUILD)" "$(PREFIX)" "$(DESTDIR)"
uninstall:  ## remove what `make install` with the same PREFIX= and DESTDIR= installed
	scripts/packaging/install.sh uninstall "$(BUILD)" "$(PREFIX)" "$(DESTDIR)"
deb:    ## build/train-gpt_VERSION_amd64.deb: a Debian package of the CPU trainer
	$(MAKE) BUILD=$(BUILD)_deb MARCH=x86-64-v3 NVCC= DEPS= RPATH= $(BUILD)_deb/train_gpt_cpu
	scripts/packaging/deb.sh $(BUILD)_deb $(VERSION) $(BUILD)
clean:  ## remove build/
	rm -rf $(BUILD)
help:   ## this list
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile test.mk
.PHONY: FORCE all run check deps-folder install uninstall deb clean help

include test.mk
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
