"""Faults in grids of ranks, for dev/plant_faults.py: the same form as kernel_faults.py, with the tests as in
host_faults.py."""
GRID = "program: test_grid.Grid."
LAYERS, TENSORS, SHARDING, UPDATE = "model/layers.cpp", "model/tensors.cpp", "model/sharding.cpp", "model/update.cpp"
LOSSES, FAMILIES = GRID + "test_losses_match_one_rank", GRID + "test_families_recomputation_and_precision"
REPEATS, WEIGHTS = GRID + "test_a_grid_repeats_its_bits", GRID + "test_initial_weights_have_the_bits_of_one_rank"

FAULTS = [
    # ---- layers
    (LAYERS, "each rank adds the bias", "if (x.group->comm.rank > 0) term", "if (x.group->comm.rank > 99) term",
     LOSSES),
    (LAYERS, "a row-parallel layer's terms are not added",
     "    linear_forward(x, term, inp, {rows_to_sum(x, out.view), false});\n    sum_rows(x, out.view);\n",
     "    linear_forward(x, term, inp, {rows_to_sum(x, out.view), false});\n", LOSSES),
    (LAYERS, "the gradient of a column-parallel layer's input is not added",
     "dout, rows_to_sum(x, dinp));\n    sum_rows(x, dinp);\n", "dout, rows_to_sum(x, dinp));\n", LOSSES),
    (LAYERS, "a recomputed sum counts as kept", "{rows_to_sum(x, out.view), false}", "{rows_to_sum(x, out.view), true}",
     FAMILIES),
    (LAYERS, "the head's columns are the first tokens",
     "    const int first_token = x.group->comm.rank * w.weight.rows;\n", "    const int first_token = 0;\n", LOSSES),
    (LAYERS, "the embedding's rows are the first tokens",
     ".part = {.first_token = x.group->comm.rank * wte.weight.rows,", ".part = {.first_token = 0,", LOSSES),
    (LAYERS, "each rank adds the positions of the first rows", "                  .first_row = x.first_row(),\n",
     "                  .first_row = 0,\n", LOSSES),
    (LAYERS, "the embedding's gradient goes to the first tokens",
     "         .first_token = x.group->comm.rank * wte.weight.rows});", "         .first_token = 0});", LOSSES),
    (LAYERS, "each rank drops the elements of the first rows", ".first = size_t(x.first_row()) * channels,",
     ".first = 0,", LOSSES),
    (LAYERS, "each rank drops the probabilities of the first heads",
     "    mask.place += uint32_t(x.group->comm.rank * x.shape->n_head);\n", "", LOSSES),
    ("model/inference.cpp", "each rank's logits are the first tokens'",
     "std::min(size_t(s.group.comm.rank) * padded, vocab)", "std::min(0 * padded, vocab)",
     GRID + "test_samples_match_one_rank"),
    # ---- gradients and the update
    (SHARDING, "the gradients of norms are not added", "    copy_parts(false);\n", "", LOSSES),
    (TENSORS, "each rank counts a norm's gradients", "return layout.tensor_parallel.rank > 0 &&",
     "return layout.tensor_parallel.rank > 99 &&", LOSSES),
    (UPDATE, "each rank counts the losses", "    if (s.group.comm.rank > 0)  //", "    if (s.group.comm.rank > 99)  //",
     LOSSES),
    (UPDATE, "LAMB's norms are this rank's", "s.options.is_sharded() ? s.world : s.group.comm;",
     "s.options.is_sharded() ? s.comm : comm_single();", GRID + "test_optimizers"),
    # ---- names, initial values and checkpoints
    (TENSORS, "each rank has the first columns", ".col = rank * cols,", ".col = 0 * rank,", WEIGHTS),
    (TENSORS, "the keys begin where this rank's queries end", "first += size_t(layout.tensor_parallel.size) * count;",
     "first += count;", WEIGHTS),
    ("model/named_state.cpp", "each rank saves a norm",
     "if (once && !is_divided && s.options.tensor_parallel.rank > 0) part.count = 0;",
     "if (once && !is_divided && s.options.tensor_parallel.rank > 99) part.count = 0;", REPEATS),
    ("model/initialize.cpp", "the initial values ignore the column", ".first = box.row * shape[1] + box.col,",
     ".first = box.row * shape[1],", WEIGHTS),
    ("model/initialize.cpp", "each shard begins with the box's first values", ".skipped = first - begin,",
     ".skipped = 0,", WEIGHTS),
    ("model/initialize.cpp", "a part with only padding has fewer rows than none",
     "std::max(box.row, initialized_rows(tensor, s.layout.whole))", "initialized_rows(tensor, s.layout.whole)", LOSSES),
    # ---- the run
    ("training/divergence.cpp", "replicas of different parts are compared",
     "compared[size_t(run.grid.place_of(rank).tensor)][rank]", "compared[0][rank]", REPEATS),
    ("kernels/base/grid.h", "ranks that divide the layers are not neighbors", "return {rank / tensor, rank % tensor};",
     "return {rank % data, rank / data};", "test_cpu: grid*"),
    ("training/models/model_io.cpp", "each rank reads its own samples", ".rank = grid.place_of(rank).data,",
     ".rank = rank % grid.data,", LOSSES),
]
