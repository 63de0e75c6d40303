"""Faults of attention_forward_sm90, mostly of its asynchronous parts, for dev/plant_faults.py: (file, what, old text,
new text)."""
KERNEL = "kernels/cuda/attention/attention_forward_sm90.cu"
PARTS = "kernels/cuda/attention/attention_forward_sm90.cuh"
SHARED = "kernels/cuda/attention/attention_sm90.cuh"

FAULTS = [
    # ---- waits
    (KERNEL, "the keys of a step are not waited for", "            fill++;\n            inputs.wait_key(fill);\n",
     "            fill++;\n"),
    (KERNEL, "the values are not waited for", "            inputs.wait_value(fill);\n        };", "        };"),
    (KERNEL, "the queries are not waited for", "        inputs.wait_query();\n", ""),
    (KERNEL, "the scores are not waited for", "            ptx::wgmma_wait<1>();\n", ""),
    (KERNEL, "the wait for the scores leaves them in flight", "            ptx::wgmma_wait<1>();\n",
     "            ptx::wgmma_wait<2>();\n"),
    (KERNEL, "the output is rescaled before its product has ended",
     "            ptx::wgmma_wait<0>();\n            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);\n"
     "            inputs.release_value(fill - 1);\n            scale_rows(out, rescale);\n",
     "            scale_rows(out, rescale);\n            ptx::wgmma_wait<0>();\n"
     "            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);\n            inputs.release_value(fill - 1);\n"),
    (KERNEL, "the weights change while the product reads them",
     "            add_scores(scores, tile);\n            ptx::wgmma_wait<0>();\n",
     "            add_scores(scores, tile);\n            pack_weights<T>(weights, scores);\n"
     "            ptx::wgmma_wait<0>();\n"),
    (KERNEL, "no wgmma fence in a step", "            turns.take();\n            ptx::wgmma_fence();\n",
     "            turns.take();\n"),
    # ---- releases
    # Only of the queries: the producer fills values before it refills these keys, and waits for the values' release,
    # which follows the product with the keys.
    (KERNEL, "the queries are released before their last product has ended",
     "            ptx::wgmma_wait<1>();\n            release_operands(tile);\n",
     "            release_operands(tile);\n            ptx::wgmma_wait<1>();\n"),
    (KERNEL, "a task's first keys and only queries are released before their product has ended",
     "        ptx::wgmma_wait<0>();\n        release_operands(begin);\n",
     "        release_operands(begin);\n        ptx::wgmma_wait<0>();\n"),
    (KERNEL, "values are released before their product has ended",
     "            add_scores(scores, tile);\n            ptx::wgmma_wait<0>();\n"
     "            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);\n            inputs.release_value(fill - 1);\n",
     "            add_scores(scores, tile);\n            inputs.release_value(fill - 1);\n"
     "            ptx::wgmma_wait<0>();\n"
     "            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);\n"),
    (KERNEL, "the last values are released before their product has ended",
     "            ptx::wgmma_wait<0>();\n            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);\n        };",
     "        };"),
    (KERNEL, "the task is read after its release",
     "        const int skipped_behind = task.skipped_behind;\n        inputs.release_task();\n",
     "        inputs.release_task();\n        const int skipped_behind = task.skipped_behind;\n"),
    (KERNEL, "the task is released before all lanes have read it",
     "        __syncwarp();  // wait until all lanes have read it\n", ""),
    (KERNEL, "a consumer does not release the values that it skips",
     "            inputs.release_key(fill);\n            inputs.release_value(fill);\n",
     "            inputs.release_key(fill);\n"),
    # ---- barriers
    (KERNEL, "consumers wait for the wrong parity", "fill / kCount % 2};", "(fill / kCount + 1) % 2};"),
    (SHARED, "the producer waits for the wrong parity", "at.parity ^ 1);", "at.parity);"),
    (KERNEL, "a stage of keys is refilled one arrival too early", "s.keys.init(S::kConsumers * kWarps);",
     "s.keys.init(S::kConsumers * kWarps - 1);"),
    (KERNEL, "tasks are read when the first one is written",
     "s.tasks.init(S::kConsumers * kWarps, S::kConsumers * kWarps);",
     "s.tasks.init(S::kConsumers * kWarps, 1);"),
    (KERNEL, "too few bytes are expected", "s.values.begin_fill(place, Tile::kBytes)",
     "s.values.begin_fill(place, Tile::kBytes - 128)"),
    (KERNEL, "the queries' bytes are not expected completely",
     "s.queries[consumer].begin_fill(place[consumer], Tile::kBytes)",
     "s.queries[consumer].begin_fill(place[consumer], Tile::kBytes / 2)"),
    (KERNEL, "no barrier between the initialization of mbarriers and their use",
     "            ptx::fence_mbarrier_init();\n        }\n        __syncthreads();\n",
     "            ptx::fence_mbarrier_init();\n        }\n"),
    (KERNEL, "the producer stops before the last tile",
     "tile < tiles.end; tile++) {\n            Tile::load(",
     "tile + 1 < tiles.end; tile++) {\n            Tile::load("),
    (PARTS, "a turn is a barrier of one warpgroup", "take() { ptx::bar_sync(mine_, 2 * kWarpgroupThreads); }",
     "take() { ptx::bar_sync(mine_, kWarpgroupThreads); }"),
    (PARTS, "nobody has the first turn", "        if (next_ == 1) pass();\n", ""),
    (PARTS, "the last turn's arrivals stay in its barrier", "        if (is_first_) take();\n", ""),
    # ---- the output's way through shared memory
    (KERNEL, "the output is stored without a proxy fence",
     "    ptx::fence_proxy_async();\n    __syncwarp();\n    if (lane",
     "    __syncwarp();\n    if (lane"),
    (KERNEL, "the output is stored before all lanes have written it",
     "    ptx::fence_proxy_async();\n    __syncwarp();\n    if (lane", "    ptx::fence_proxy_async();\n    if (lane"),
    (KERNEL, "the previous output may still be read", "    if (lane == 0) ptx::bulk_wait_read<0>();\n", ""),
    (KERNEL, "only one lane waits until the previous output has been read",
     "    __syncwarp();  // wait until the previous output has been read\n", ""),
    (KERNEL, "the block ends while its last output is read",
     "    if (threadIdx.x % kWarpSize == 0) ptx::bulk_wait_read<0>();\n", ""),
    # ---- operands and masks
    (SHARED, "keys and queries have the stride of 16 rows", "wgmma_descriptor(tile, 16, 8 * kBoxRowBytes",
     "wgmma_descriptor(tile, 16, 16 * kBoxRowBytes"),
    (SHARED, "the boxes of values overlap",
     "wgmma_descriptor(tile, kBoxBytes,", "wgmma_descriptor(tile, kBoxBytes / 2,"),
    (PARTS, "half a tile with a visible key is skipped", "last_key % kKeys < kKeys / 2;",
     "last_key % kKeys <= kKeys / 2;"),
    (PARTS, "a query sees the key after it", "8 * n + i > last)", "8 * n + i > last + 1)"),
    (PARTS, "a query sees the key before its first one", "8 * n + i < first ||", "8 * n + i < first - 1 ||"),
    (PARTS, "the middle tasks of an odd number are left out", "(i == 2 * half ? int(is_second_) : of_second_head)",
     "of_second_head"),
]
