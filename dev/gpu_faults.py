"""Faults that are harmless on a simulated GPU but break a real one, for dev/plant_faults.py. The same form as
host_faults.py, with the tests "test_simt: NAMES" with options, and "ptx_text"."""
CUDA = "kernels/cuda/"
PTX, HOPPER, WGMMA = (CUDA + name for name in ("ptx.cuh", "hopper/ptx_hopper.cuh", "hopper/ptx_wgmma.cuh"))
NORM, TOTALS, LOSS, LOSS_ROWS, EMBEDDING = (CUDA + name for name in (
    "norm.cu", "group_totals.cu", "cross_entropy.cu", "cross_entropy.cuh", "embedding.cu"))
OPTIMIZER, GRAD_NORM = CUDA + "optimizer.cu", CUDA + "grad_norm.cu"
GENERAL, COMM, DEVICE, FILL = (CUDA + name for name in ("attention/attention_general.cuh", "comm_nccl.cu", "device.cu",
                                                        "fill.cu"))

RECORDING, GPT = CUDA + "recording.cu", "model/gpt.cpp"
RAMPS, GRAPH_RANKS = (f"simulated: test_graphs.Graphs.{name}" for name in ("test_ramps", "test_ranks"))

FAULTS = [
    # ---- the seven of the review
    (TOTALS, "the last kernel is launched with more threads than its bound",
     "__launch_bounds__(kWarps* kWarpSize)", "__launch_bounds__(256)", "test_simt: norm_backward*"),
    (GRAD_NORM, "the launcher reads the loss scale on the host",
     "void grad_norm_finish(const GradNormFinish& op, Stream stream) {\n",
     "void grad_norm_finish(const GradNormFinish& op, Stream stream) {\n"
     '    require(*op.loss_scale > 0, "grad_norm_finish: a loss scale of %g", double(*op.loss_scale));\n',
     "test_simt: *norm_finish*"),
    (PTX, "the halves of cvt.rn.bf16x2 are exchanged",
     'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));',
     'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(low), "f"(high));', "ptx_text"),
    (LOSS_ROWS, "160 KiB are staged", "kMaxStagedPacks = (99 * 1024", "kMaxStagedPacks = (160 * 1024",
     "test_simt: cross_entropy* --capability 89"),
    (GRAD_NORM, "a kernel is given the address of a host variable",
     '    launch(grad_norm_finish_kernel, {"grad_norm_finish", dim3(1), kThreads, sizeof(FinishShared)}, stream, op);',
     "    static const float kNoScale = 1;\n    GradNormFinish unscaled = op;\n    unscaled.loss_scale = &kNoScale;\n"
     '    launch(grad_norm_finish_kernel, {"grad_norm_finish", dim3(1), kThreads, sizeof(FinishShared)}, stream, '
     "unscaled);", "test_simt: *norm_finish*"),
    (OPTIMIZER, "the first element of a chunk's state has 32 bits",
     "k++) state[k] = op.state[k].template as<State>() + chunk.state_begin;",
     "k++) state[k] = op.state[k].template as<State>() + unsigned(chunk.state_begin);", "test_simt: *update beyond*"),
    (COMM, "collectives run on a blocking stream", "cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)",
     "cudaStreamCreate(&stream_)", "test_simt: a collective that waits for other ranks*"),
    # ---- launch bounds
    (LOSS, "the sum of losses has the bound of the rows' kernel", "__launch_bounds__(kSumThreads) loss_sum_kernel",
     "__launch_bounds__(kThreads) loss_sum_kernel", "test_simt: loss_sum*"),
    (TOTALS, "the last kernel has a bound of 128",
     "__launch_bounds__(kWarps* kWarpSize)", "__launch_bounds__(128)", "test_simt: qk_norm_rope_backward*"),
    (NORM, "wide rows have the bound of narrow ones",
     "__launch_bounds__(kWideThreads)", "__launch_bounds__(kThreads)", "test_simt: *norm_forward*"),
    (EMBEDDING, "a tile has more threads than its scan's bound",
     "__launch_bounds__(kTile) embedding_backward_scan_kernel",
     "__launch_bounds__(kTile / 2) embedding_backward_scan_kernel", "test_simt: embedding_backward*"),
    # ---- addresses of the other side
    (OPTIMIZER, "the launcher asks on the host whether the gradients are finite",
     "if (op.n_chunks <= 0) return;\n    launch(kernel",
     "if (op.n_chunks <= 0 || op.grad_norm->non_finite_tensor >= 0) return;\n    launch(kernel",
     "test_simt: *update*"),
    (DEVICE, "the host itself makes a copy to the host",
     "cudaMemcpyAsync(to_host ? staged : target,",
     "to_host ? (std::memcpy(staged, source, piece.bytes), cudaSuccess) : cudaMemcpyAsync(target,",
     "test_simt: *update*"),
    (OPTIMIZER, "a step's scalars are passed from the host's stack",
     '"elementwise_update", op, stream);',
     '"elementwise_update", [&] {\n                static UpdateScalars scalars;\n'
     "                ElementwiseUpdate copy = op;\n                copy.scalars = &scalars;\n"
     "                return copy;\n            }(), stream);", "test_simt: *update*"),
    # ---- shared memory
    (GENERAL, "tiles of wide heads are as high as others", "kRows = kMaxHeadSize > 128 ? 16 : 32;", "kRows = 32;",
     "test_simt: *attention* --capability 89"),
    # ---- 32-bit indices
    (GRAD_NORM, "the first element of a chunk has 32 bits", "op.values + chunk.begin;", "op.values + int(chunk.begin);",
     "test_simt: squared_sums beyond*"),
    (OPTIMIZER, "the first element of master weights has 32 bits", "as<Master>() + chunk.begin),",
     "as<Master>() + unsigned(chunk.begin)),", "test_simt: *update beyond*"),
    # ---- PTX text
    (PTX, "the halves of cvt.rn.f16x2 are exchanged",
     'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));',
     'asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(high), "f"(low));', "ptx_text"),
    (PTX, "registers of ldmatrix.x4 in another order",
     '"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"',
     '"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %2, %1, %3}, [%4];"', "ptx_text"),
    (PTX, "a transposed ldmatrix that does not transpose",
     "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ptx_text"),
    (PTX, "fragments of A by columns in the product of fp16",
     '"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "',
     '"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %7}, {%8, %9}, "', "ptx_text"),
    (PTX, "cp.async ignores how many bytes are used", '[%0], [%1], 16, %2;"', '[%0], [%1], 16, 16;"', "ptx_text"),
    (PTX, "a commit may be moved across other copies",
     'asm volatile("cp.async.commit_group;" ::: "memory");', 'asm volatile("cp.async.commit_group;");', "ptx_text"),
    (PTX, "bar.arrive has number and threads exchanged", '"bar.arrive %0, %1;"', '"bar.arrive %1, %0;"', "ptx_text"),
    (HOPPER, "the coordinates of a tensor copy are exchanged",
     "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];",
     "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%4, %3}], [%2];",
     "ptx_text"),
    (HOPPER, "mapa has block and address exchanged", '"mapa.shared::cluster.u32 %0, %1, %2;"',
     '"mapa.shared::cluster.u32 %0, %2, %1;"', "ptx_text"),
    # ---- the program's stream, its copies and recorded work
    (CUDA + "launch.cuh", "a null handle is the legacy stream", "static_cast<cudaStream_t>(stream.handle) : own;",
     "static_cast<cudaStream_t>(stream.handle) : nullptr;", "test_simt: the program's stream*"),
    (DEVICE, "the ring's bytes are used before their copy has finished",
     "while (std::ranges::any_of(in_flight_, overlaps))", "while (false && std::ranges::any_of(in_flight_, overlaps))",
     "test_simt: data copied*"),
    (DEVICE, "the ring has place for four copies", "next_ = end;", "next_ = begin + kRingBytes / 4;",
     "test_simt: the host does not wait*"),
    (DEVICE, "the host waits for each copy", "in_flight_.push_back(std::move(piece));",
     "in_flight_.push_back(std::move(piece)), check_cuda(cudaStreamSynchronize(stream), \"a copy\");",
     "simulated: test_graphs.Graphs.test_the_host_waits_once_per_step"),
    (RECORDING, "the first call is recorded", "        return queue();\n    }\n    if (!graph_->",
     "    }\n    if (!graph_->", "test_simt: a recording calls*"),
    (RECORDING, "each call is recorded", "if (!graph_->executable) graph_", "graph_", "test_simt: a recording calls*"),
    (RECORDING, "a recorded call is not launched", "    ProfilerRange range(\"graph\");\n",
     "    static int calls = 0;\n    if (calls++ == 0) return;\n    ProfilerRange range(\"graph\");\n",
     "test_simt: a recording calls*"),
    (RECORDING, "a failed recording does not end the capture",
     "        cudaStreamEndCapture(stream, &graph);\n        if", "        if", "test_simt: the function's own*"),
    (GPT, "passes of all lengths share a recording", ".seq_len = s.step.seq_len,", ".seq_len = 0,", RAMPS),
    (GPT, "passes with any scale share a recording", ".grad_scale = s.step.grad_scale,", ".grad_scale = 0,", RAMPS),
    (GPT, "recordings of a ramp's steps are kept", " != sizes) s.recordings.clear();", " != sizes) {}", RAMPS),
    (GPT, "all backward passes share a recording", "? 0 : gradient_place(s, pass.micro_step)};", "? 0 : 0};",
     "simulated: test_graphs.Graphs.test_micro_steps"),
    (GPT, "measured passes are replayed", "if (is_measured || !is_recordable(s, pass))", "if (!is_recordable(s, pass))",
     "simulated: test_graphs.Graphs.test_passes_that_the_host_reads"),
    (GPT, "passes with collectives are recorded", "(o.ranks == 1 || is_between)", "true", GRAPH_RANKS),
    (GPT, "the gradients' pieces of ZeRO 2 are replayed", "o.keeps_whole_parameters() && o.keeps_whole_gradients()",
     "o.keeps_whole_parameters()", GRAPH_RANKS),
    ("model/sharding.cpp", "the sums of micro-steps 1 and 2 go to the same places",
     "64 * std::popcount(index) + std::countr_one(index)", "64 * std::popcount(index)",
     "simulated: test_graphs.Graphs.test_the_deterministic_sum"),
    ("model/sharding.cpp", "each pass waits for the parameters again",
     "std::exchange(s.param_ready[size_t(bucket)], {})", "s.param_ready[size_t(bucket)]", GRAPH_RANKS),
]
