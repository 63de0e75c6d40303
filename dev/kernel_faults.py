"""Faults for dev/plant_faults.py: (file, what is wrong, the code as it is, the code with the fault).

The code must stand in the file exactly once. Each fault is of a kind that hardware or a kind schedule may hide: a
missing barrier or wait, a comparison off by one, a wrong lane, a dropped tail, a missing scale, a wrong order.
"""
CUDA = "kernels/cuda/"
FORWARD, BACKWARD = CUDA + "attention_forward.cu", CUDA + "attention_backward.cu"
TILES, NORM, NORM_BACKWARD = CUDA + "attention_tiles.cuh", CUDA + "norm.cu", CUDA + "norm_backward.cu"
LOSS, EMBEDDING, OPTIMIZER = CUDA + "cross_entropy.cu", CUDA + "embedding.cu", CUDA + "optimizer.cu"
REDUCE, GRAD_NORM, EPILOGUE = CUDA + "reduce.cuh", CUDA + "grad_norm.cu", CUDA + "matmul_epilogue.cu"
PRODUCTS, FILL, VECTOR = CUDA + "matmul_products.h", CUDA + "fill.cu", CUDA + "vector.cuh"
DROPOUT, GENERAL_FORWARD = CUDA + "dropout.cu", CUDA + "attention_general_forward.cuh"
ROPE, ROPE_CPU = CUDA + "qk_norm_rope.cu", "kernels/cpu/qk_norm_rope.cpp"

FAULTS = [
    # ---- attention, forward
    (FORWARD, "no barrier before the queries are read",
     "    __syncthreads();  // the queries are there\n", ""),
    (FORWARD, "no barrier between a tile's arrival and its use",
     "        __syncthreads();  // the tile has arrived, and all warps have finished reading the other stage\n", ""),
    (FORWARD, "the wait for a tile leaves one copy in flight",
     "        ptx::cp_async_wait<0>();", "        ptx::cp_async_wait<1>();"),
    (FORWARD, "the wait for the queries is missing",
     "    ptx::cp_async_wait<1>();\n    __syncthreads();  // the queries", "    __syncthreads();  // the queries"),
    (TILES, "the copy of keys and values is never committed", "    ptx::cp_async_commit();\n", ""),
    (FORWARD, "a query sees one key too many", "if (key > query + distance)", "if (key > query + distance + 1)"),
    (FORWARD, "a query does not see itself", "if (key > query + distance)", "if (key >= query + distance)"),
    (FORWARD, "the last tile that needs a mask gets none",
     "if (distance < kKeys - 1) mask_future", "if (distance < kKeys - 32) mask_future"),
    (FORWARD, "the sum before is not rescaled",
     "float sum = softmax.sum[m][half] * rescale;", "float sum = softmax.sum[m][half];"),
    (FORWARD, "the output before is not rescaled", "out[m][n][i] *= rescale;", "out[m][n][i] *= 1.0f;"),
    (FORWARD, "the maximum of a row leaves out two of its four lanes",
     "    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));", "    return x;"),
    (FORWARD, "the sum of a row is taken over the wrong lanes",
     "return x + __shfl_xor_sync(0xffffffffu, x, 2);", "return x + __shfl_xor_sync(0xffffffffu, x, 4);"),
    (FORWARD, "the log-sum-exp lacks the scale",
     "softmax.max[m][half] * op.scale + logf", "softmax.max[m][half] + logf"),
    (FORWARD, "the tail of the queries writes its log-sum-exp too",
     "if (lane % 4 == 0 && row < at.seq_len)", "if (lane % 4 == 0)"),
    (FORWARD, "values of the wrong head in grouped-query attention",
     "qkv + at.value(b, head / at.group(), 0);", "qkv + at.value(b, head % at.n_kv_head, 0);"),
    # ---- attention, tiles and fragments
    (TILES, "values are read without transposing", "ptx::ldmatrix<4, true>(b,", "ptx::ldmatrix<4>(b,"),
    (TILES, "halves of a packed fragment in the wrong order",
     "ptx::pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);", "ptx::pack<T>(w[i % 2 * 2 + 1], w[i % 2 * 2]);"),
    (TILES, "fragment rows swapped", "weights[m][2 * k + i / 2];", "weights[m][2 * k + i % 2];"),
    (TILES, "the copy swizzles another way than the reader",
     "ptx::cp_async<16>(to + tile_offset<kHeadSize>(row, pack), from",
     "ptx::cp_async<16>(to + tile_offset<kHeadSize>(row, pack ^ 1), from"),
    (TILES, "rows beyond the sequence are copied", "inside ? 16 : 0);", "16);"),
    (TILES, "the last row is not stored", "if (r < count)\n", "if (r + 1 < count)\n"),
    (TILES, "a row too many is stored", "if (r < count)\n", "if (r <= count)\n"),
    (TILES, "no warp barrier before the output is read back",
     "    __syncwarp();\n#pragma unroll\n    for (int pass = 0; pass < 16", "#pragma unroll\n"
     "    for (int pass = 0; pass < 16"),
    (TILES, "the second half of the product goes to the first",
     "ptx::mma_m16n8k16<T>(acc[m][2 * pair + 1], a[m], b + 2, acc[m][2 * pair + 1]);\n        }\n    }\n"
     "}\n\n// acc (16 kM, kHeadSize)",
     "ptx::mma_m16n8k16<T>(acc[m][2 * pair + 1], a[m], b, acc[m][2 * pair + 1]);\n        }\n    }\n}\n\n"
     "// acc (16 kM, kHeadSize)"),
    # ---- attention, backward
    (BACKWARD, "the gradient of the scores without dout . out",
     "dp = score * (dp - query.dout_out);", "dp = score * dp;"),
    (BACKWARD, "no barrier between tiles of queries",
     "        __syncthreads();  // the tile has arrived; all warps have read the other stage and the stationary rows\n"
     "        if (tile + 1 < n_tiles)\n            load_queries", "        if (tile + 1 < n_tiles)\n"
     "            load_queries"),
    (BACKWARD, "statistics are read before the warp has written them",
     "    __syncwarp();  // a query's statistics are read by four lanes of this warp\n", ""),
    (BACKWARD, "the gradient of the keys lacks the scale",
     "dkey, [&](int, int) { return op.scale; });", "dkey, [&](int, int) { return 1.0f; });"),
    (BACKWARD, "the mask of the keys is off by one",
     "if (row > column + distance) scores", "if (row >= column + distance) scores"),
    (BACKWARD, "only the first query head of a group reaches the keys",
     "return at.group() * per_head_;", "return min(at.group(), 1) * per_head_;"),
    # ---- dropout
    (TILES, "rows and columns of dropout's squares are exchanged",
     "random.word[i / 2 * 2 + n]", "random.word[2 * n + i / 2]"),
    (TILES, "rows and columns of the transposed squares are exchanged",
     "random.word[2 * n + half]", "random.word[2 * half + n]"),
    (TILES, "a lane takes the decisions of its neighbour's keys", "+ lane / 8);", "+ lane % 4);"),
    (FORWARD, "what dropout keeps is not scaled", "kDrops ? op.dropout.factor : 1.0f;", "1.0f;"),
    (FORWARD, "every tile has the first tile's mask",
     "begin + warp_row, tile * kKeys,", "begin + warp_row, 0 * kKeys,"),
    (BACKWARD, "every part of a tile of keys has the first one's mask",
     "head, begin + warp_row, tile * S::kOthers + part,", "head, begin + warp_row, tile * S::kOthers,"),
    (BACKWARD, "the values' gradient has the probabilities before dropout",
     "if (is_dropped(m, n, i)) scores[m][n][i] = 0;", ""),
    (BACKWARD, "the values' gradient lacks dropout's factor",
     "return kDrops ? op.dropout.factor : 1.0f; });", "return 1.0f; });"),
    (GENERAL_FORWARD, "dropped probabilities are left out of the softmax's sum", "            sum += p;",
     "            sum += s.p[row][key];"),
    (DROPOUT, "the second pack of a call has the first one's decisions", "random.word[(first + i) / 2]",
     "random.word[i / 2]"),
    (DROPOUT, "all samples have the first one's key", "op.mask.keys[blockIdx.y]", "op.mask.keys[0]"),
    # ---- norms
    (REDUCE, "a block sum without its barrier",
     "s_part[threadIdx.x / kWarpSize] = value;\n    __syncthreads();\n"
     "    V all", "s_part[threadIdx.x / kWarpSize] = value;\n    V all"),
    (REDUCE, "a warp sum over half a warp",
     "for (int lanes = kWarpSize / 2;", "for (int lanes = kWarpSize / 4;"),
    (REDUCE, "a block sum leaves out the last warp",
     "for (int warp = 1; warp < kWarps; warp++) all =", "for (int warp = 1; warp < kWarps - 1; warp++) all ="),
    (NORM, "the variance counts the padding of the last pack", "squares = i < available ?", "squares = i <= "
    "available ?"),
    (NORM, "the last rows are left to nobody's block", "if (row >= op.rows) return;\n    const size_t begin",
     "if (row + 1 >= op.rows) return;\n    const size_t begin"),
    (NORM_BACKWARD, "the ring is read before the copy has landed",
     "        ptx::cp_async_wait<kStages - 1>();", "        ptx::cp_async_wait<kStages>();"),
    (NORM_BACKWARD, "no barrier between the ring and the sums that lie in its place",
     "    __syncthreads();  // the sums lie where the ring was\n", ""),
    (NORM_BACKWARD, "sums of rows of both parities in one place",
     "s.row_sums[iteration % 2];", "s.row_sums[iteration % 1];"),
    (NORM_BACKWARD, "a group loses its last row",
     "    const int end = min(op.rows, begin + groups.rows_per_group);\n\n    Pack",
     "    const int end = min(op.rows, begin + groups.rows_per_group - 1);\n\n    Pack"),
    (NORM_BACKWARD, "weight gradients overwrite instead of adding",
     "out = op.accumulate ? out + total : total;", "out = total;"),
    # ---- loss
    (LOSS, "the maximum of a pack is not carried into the sum",
     "float sum = softmax.sum * exp_below(softmax.max, scaled_max);", "float sum = softmax.sum;"),
    (LOSS, "padding takes part in the softmax",
     "x.value[i] = i < available ? x.value[i] : -INFINITY;", "x.value[i] = i <= available ? x.value[i] : -INFINITY;"),
    (LOSS, "the target's logit is read after its owner has overwritten it",
     "        op.loss[row] = float(log(double(softmax.sum)) + (double(softmax.max * kLog2E) * kLn2 - "
     "double(target_logit)));",
     "        op.loss[row] = float(log(double(softmax.sum)) + (double(softmax.max * kLog2E) * kLn2 - "
     "double(0 * target_logit + to_float(logits[target]))));"),
    (LOSS, "the loss scale is forgotten", "op.grad_scale * (op.loss_scale ? *op.loss_scale : 1.0f);",
    "op.grad_scale;"),
    (LOSS, "the padding's gradient is not cleared", "    zero_packs<kAligned>(logits, p, op.padded_vocab);\n}", "}"),
    # ---- embedding
    (EMBEDDING, "no barrier before a tile's places are known",
     "    if (digit >= 0 && rank == 0) s_place[warp][digit] = __popc(same);\n    __syncthreads();",
     "    if (digit >= 0 && rank == 0) s_place[warp][digit] = __popc(same);"),
    (EMBEDDING, "a lane counts itself in its rank", "((1u << lane) - 1)", "((2u << lane) - 1)"),
    (EMBEDDING, "a token's rows end with the group",
     "const bool goes_on = rows >> (kWarpSize - 1) & 1;", "const bool goes_on = false;"),
    (EMBEDDING, "the token before the group is taken from the group",
     "if (lane == 0) token_before = first > 0 ? sums.op.tokens[sums.order[first - 1]] : -1;",
     "if (lane == 0) token_before = -1;"),
    # ---- update
    (OPTIMIZER, "no barrier before the scalars are read",
     "    if (threadIdx.x == 0) s = adamw_scalars(op, chunk.decayed);\n    __syncthreads();",
     "    if (threadIdx.x == 0) s = adamw_scalars(op, chunk.decayed);"),
    (OPTIMIZER, "the update is applied to gradients that are not finite",
     "    if (op.grad_norm->non_finite_tensor >= 0 || is_beyond(chunk)) return;", "    if "
     "(is_beyond(chunk)) return;"),
    (OPTIMIZER, "eps inside the root",
     "sqrtf(v.value[k]) / s.root_bias_correction2 + s.eps", "sqrtf(v.value[k] + s.eps) / s.root_bias_correction2"),
    (GRAD_NORM, "NaN is taken for finite", "if (!(fabs(sums[i]) < INFINITY))", "if (fabs(sums[i]) >= INFINITY)"),
    (GRAD_NORM, "a chunk's sum goes to its place in the list instead of the grid",
     "op.out[chunk.index] = sum;", "op.out[blockIdx.x] = sum;"),
    (FILL, "a rank's part of a tensor begins with the tensor's first numbers", "(op.first + i) / 4", "i / 4"),
    (FILL, "add adds twice", "    sum += load_four<kAligned>(inp, i, op.count);\n",
     "    sum += load_four<kAligned>(inp, i, op.count);\n    sum += load_four<kAligned>(inp, i, op.count);\n"),
    (FILL, "add writes whole packs at the end", "store_four<kAligned>(op.out, i, op.count, pack_floats(sum));",
     "store_four<kAligned>(op.out, i, op.count + 3, pack_floats(sum));"),
    # ---- QK norm and RoPE
    (ROPE, "the rotation has the other sign",
     "fmaf(first, angles.cosine[i], -second * angles.sine[i]);\n        second = fmaf(second, angles.cosine[i], first",
     "fmaf(first, angles.cosine[i], second * angles.sine[i]);\n        second = fmaf(second, angles.cosine[i], -first"),
    (ROPE, "backward rotates as forward does",
     "fmaf(first, angles.cosine[i], second * angles.sine[i]);\n        second = fmaf(second, angles.cosine[i], -first",
     "fmaf(first, angles.cosine[i], -second * angles.sine[i]);\n        second = fmaf(second, angles.cosine[i], first"),
    (ROPE, "neighboring packs are pairs instead of the halves",
     "return {{begin, half + begin}, {count, count}, true};",
     "return {{2 * begin, 2 * begin + count}, {count, count}, true};"),
    (ROPE, "the keys' weight multiplies queries",
     "(at.is_query ? op.q_weight : op.k_weight).template as<T>();\n#pragma",
     "op.k_weight.template as<T>();\n#pragma"),
    (ROPE, "the first position is forgotten", "size_t(op.first_position) + at.position", "size_t(at.position)"),
    (ROPE, "what lies behind the rotated elements is rotated",
     "count(begin + kPackSize<T>)}, false};", "count(begin + kPackSize<T>)}, true};"),
    (ROPE, "the gradient lacks its projection",
     "multiply(head.normed[u], -average);", "multiply(head.normed[u], 0.0f);"),
    (ROPE, "the gradient lacks rstd", "multiply(head.d[u], rstd);", "multiply(head.d[u], 1.0f);"),
    (ROPE, "the keys' gradient goes to the queries' weight",
     "add_products(sums.key[u], head.d", "add_products(sums.query[u], head.d"),
    (ROPE, "the gradient of a weight has the weight in it", "float* out = column < op.head_size ? op.dq_weight : "
     "op.dk_weight;", "float* out = column <= op.head_size ? op.dq_weight : op.dk_weight;"),
    (ROPE, "the scale of the table is not divided out", "? 1.0f / square : 0.0f", "? 1.0f : 0.0f"),
    (ROPE, "a team beyond the last head counts in the sums",
     "if (exists) head = load_gradient", "head = load_gradient"),
    (ROPE, "a team sums over half of its lanes", "for (int step = lanes / 2; step > 0;", "for (int step = lanes / 4; "
     "step > 0;"),
    (ROPE, "no barrier before the warps' sums are added",
     "    __syncthreads();\n    float* out = static_cast<float*>(teams", "    float* out = static_cast<float*>(teams"),
    (ROPE, "the groups beyond 32 are dropped", "group < teams.n_groups; group +=", "group < min(32, teams.n_groups); "
     "group +="),
    (ROPE, "raw holds the normalised heads",
     "        if (op.raw) store_unit<kAligned>(op.raw.as<T>() + at.alone, unit[u], x[u]);\n"
     "        if (op.rstd) multiply(x[u], rstd);\n",
     "        if (op.rstd) multiply(x[u], rstd);\n"
     "        if (op.raw) store_unit<kAligned>(op.raw.as<T>() + at.alone, unit[u], x[u]);\n"),
    (ROPE_CPU, "the rotation has the other sign", "x[i] = first * cosine[i] - second * sine[i];\n        x[i + half] = "
     "second * cosine[i] + first", "x[i] = first * cosine[i] + second * sine[i];\n        x[i + half] = second * "
     "cosine[i] - first"),
    (ROPE_CPU, "backward rotates as forward does", "rotate_back(d, work", "rotate(d, work"),
    (ROPE_CPU, "neighbors are pairs instead of the halves",
     "        const float first = x[i], second = x[i + half];\n        x[i] = first * cosine[i] - second * sine[i];\n"
     "        x[i + half] = second",
     "        const float first = x[2 * i], second = x[2 * i + 1];\n        x[2 * i] = first * cosine[i] - second * "
     "sine[i];\n        x[2 * i + 1] = second"),
    (ROPE_CPU, "the keys' weight multiplies queries", "scale(x, rstd, (h < op.n_head ?", "scale(x, rstd, (h < 0 ?"),
    (ROPE_CPU, "the first position is forgotten", "op.first_position + row % op.seq_len", "row % op.seq_len"),
    (ROPE_CPU, "the rotation reaches beyond its elements",
     "rotate(x, work.cosine, work.sine, half);", "rotate(x, work.cosine, work.sine, half > 0 ? size / 2 : 0);"),
    (ROPE_CPU, "the gradient lacks its projection", "(d[c] - normed[c] * average) * rstd", "d[c] * rstd"),
    (ROPE_CPU, "the keys' gradient goes to the queries' weight",
     "dweights + (is_query ? 0 : size)", "dweights + (is_query ? size : size)"),
    (ROPE_CPU, "the scale of the table is not divided out", "x[i + half] /= square;", "x[i + half] /= 1;"),
    (ROPE_CPU, "the last block of positions is dropped",
     "sum_blocks(op.dk_weight, partials + op.head_size, n_blocks(rows)",
     "sum_blocks(op.dk_weight, partials + op.head_size, n_blocks(rows) - 1"),
    # ---- around the products
    (EPILOGUE, "no barrier before the warps' sums are added",
     "    __syncthreads();  // all warps' sums are there\n", ""),
    (EPILOGUE, "column sums drop the last group's tail",
     "end_row = min(op.rows, first_row + kGroupRows);", "end_row = min(op.rows / 2 * 2, first_row + kGroupRows);"),
    (PRODUCTS, "a weight gradient adds to what was there on the first micro-step",
     ".accumulate = op.accumulate};", ".accumulate = true};"),
    (VECTOR, "the second half of a word of bf16 keeps the first half's bits",
     "to[1] = std::bit_cast<float>(word & 0xffff0000u);", "to[1] = std::bit_cast<float>(word);"),
]
