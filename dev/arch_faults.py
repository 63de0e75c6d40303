"""Faults of kernels for one compute capability, their list and their check, for dev/plant_faults.py, in the form of
host_faults.py."""
CUDA = "kernels/cuda/"
TABLE, CHECK, LOSS = CUDA + "arch_kernels.cu", CUDA + "arch_check.cu", CUDA + "hopper/cross_entropy_sm90.cu"
CHOICE, PROGRAM = "runtime/cluster/kernel_check.cpp", "runtime/cluster/child_program.cpp"
LIST = ["test_simt: kernels for compute capability*,every kernel for this GPU*,cross_entropy runs*"]
ELEMENTS = ["test_simt: a check compares every element"]
ROWS = ["test_simt: cross_entropy*", "test_simt: cross_entropy* --seed 1",
        "test_simt: cross_entropy* --seed 2"]
RANKS, TEXTS = ["simulated: test_simulated_kernels"], ["test_cpu: [kernels]"]
BACKGROUND = ["test_cpu: [subprocess]"]

FAULTS = [
    (TABLE, "a kernel for 9.0 runs on every GPU", "std::atoi(row.architecture) == 10 * major + minor &&", "true &&",
     *LIST),
    (TABLE, "kernels are used before they are checked", "uses[std::size(kRows)] = {};",
     "uses[std::size(kRows)] = {true};", "test_simt: cross_entropy runs*"),
    (TABLE, "kernels that passed are not used", "std::ranges::count(names, row.name) > 0;", "names.empty();", *LIST),
    (TABLE, "every check passes", "return row.difference();", 'return "";', *RANKS),
    (CHECK, "a NaN is no difference", "if (!(deviation < INFINITY)) {", "if (deviation == INFINITY) {", *ELEMENTS),
    (CHECK, "the first element is not compared", "for (size_t i = 0; i < actual.count; i++) {\n        const double a",
     "for (size_t i = 1; i < actual.count; i++) {\n        const double a", *ELEMENTS),
    (CHECK, "negative deviations are allowed", "std::abs(a - e) /", "(a - e) /", *ELEMENTS),
    (CHOICE, "a kernel that fails on another rank is used", "push_back(line.substr(colon + 2));",
     'push_back(text == texts.front() ? line.substr(colon + 2) : "");', *TEXTS),
    (CHOICE, "a kernel that a rank lacks is used", "if (of_ranks.size() < texts.size())", "if (false)", *TEXTS),
    (CHOICE, "a check without a result passes", "found_.push_back({waiting_.front(), problem_of(result, limit_s_)});",
     'found_.push_back({waiting_.front(), ""});', *RANKS),
    (CHOICE, "the check uses GPU 0 of every rank", "configure_device({.local_rank = local_rank});",
     "configure_device({});", *RANKS),
    (CHOICE, "a check outlives its run", "process_->wait(limit_s_)", "process_->wait(1e6)", *RANKS),
    (PROGRAM, "output beyond one read is lost", "is_open = count > 0 ||", "is_open =", *BACKGROUND),
    (PROGRAM, "a signal counts as success", "128 + WTERMSIG(status)", "0", *BACKGROUND),
    (PROGRAM, "the time limit is not kept", "        if (left_ms <= 0) break;\n", "", *BACKGROUND),
    (PROGRAM, "a program outlives its owner", "    ::kill(-pid_, SIGKILL);\n    ::waitpid(pid_, nullptr, 0);\n}", "}",
     *BACKGROUND),
    # ---- cross_entropy_sm90
    (LOSS, "the sums are read before the other blocks have written them",
     "        ptx::cluster_arrive();\n        ptx::cluster_wait();  // wait for the sums of all blocks\n", "", *ROWS),
    (LOSS, "a block ends while others read its memory",
     "        ptx::cluster_wait();  // other blocks may still read this block's memory\n", "", *ROWS),
    (LOSS, "each block has its own maximum", "exp_below(number(mine.max, block), all.max * kLog2E);",
     "exp_below(mine.max, all.max * kLog2E);", *ROWS),
    (LOSS, "the sums of the first block are missing", "for (int block = 0; block < blocks; block++) {",
     "for (int block = 1; block < blocks; block++) {", *ROWS),
    (LOSS, "each block takes the target for one of its columns", "index_in_part(target, first, op.vocab);",
     "target % op.vocab;", *ROWS),
    (LOSS, "the padding is not cleared", "? op.padded_vocab - first : args.columns;", "? op.vocab : args.columns;",
     *ROWS),
    (LOSS, "a row without a target keeps its logits",
     "if (op.write_dlogits) zero_packs<true>(logits, int(threadIdx.x), op.padded_vocab);", "", *ROWS),
    (LOSS, "evaluation overwrites the logits", "if (op.write_dlogits) write_gradient", "write_gradient", *ROWS),
    (LOSS, "rows that are not aligned are taken", "&& has_aligned_rows<T>(op)) is_done", ") is_done",
     "test_simt: cross_entropy_sm90*"),
    (LOSS, "parts of a vocabulary are taken", "if (!op.sums && op.rows > 0", "if (op.rows > 0",
     "test_simt: cross_entropy_sm90*"),
]
