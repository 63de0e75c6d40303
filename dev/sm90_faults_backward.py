"""Faults of attention_backward for sm_90a for dev/plant_faults.py, in the form of kernel_faults.py: asynchronous work
that is not waited for, not visible, too early or in no order.
"""
from kernel_faults import CUDA

KERNEL = CUDA + "attention/attention_backward_sm90.cu"
BLOCK = CUDA + "attention/attention_backward_sm90_block.cuh"
PASSES = CUDA + "attention/attention_backward_sm90_passes.cu"
DIVISION = CUDA + "attention/attention_backward_sm90.cuh"

FAULTS = [
    (KERNEL, "no proxy fence between dS and its products",
     "            ptx::fence_proxy_async();\n"
     "            ptx::bar_sync(CONSUMERS",
     "            ptx::bar_sync(CONSUMERS"),
    (KERNEL, "no proxy fence between the sums of dQ and their copy",
     "    ptx::fence_proxy_async();\n"
     "    ptx::bar_arrive(SUMS_FULL",
     "    ptx::bar_arrive(SUMS_FULL"),
    (KERNEL, "no proxy fence between dK, dV and their copies",
     "        ptx::fence_proxy_async();\n"
     "        __syncwarp();\n",
     "        __syncwarp();\n"),
    (BLOCK, "the parity of a ring does not change",
     "number / kCount % 2}",
     "number / kCount % 1}"),
    (BLOCK, "the bytes of the statistics are not expected",
     "Of::Queries::kBytes + 2 * kRowBytes",
     "Of::Queries::kBytes + kRowBytes"),
    (BLOCK, "more bytes are expected than copied",
     "bar = begin_fill(s.dout_ring, place, Of::Queries::kBytes);",
     "bar = begin_fill(s.dout_ring, place, Of::Queries::kBytes + 16);"),
    (KERNEL, "queries are used before they have landed",
     "        s.query_ring.wait_full(place);\n",
     ""),
    (KERNEL, "gradients of the output are used before they have landed",
     "        s.dout_ring.wait_full(place);\n",
     ""),
    (KERNEL, "keys are used before they have landed",
     "        s.key_ring.wait_full(key_place);\n",
     ""),
    (KERNEL, "values are used before they have landed",
     "        s.value_ring.wait_full(place_of<1>(block.round));\n",
     ""),
    (BLOCK, "a stage is empty when half of the warps have read it",
     "kConsumerWarps = 8;",
     "kConsumerWarps = 4;"),
    (KERNEL, "the queries are released before the product for dK has read them",
     "            ptx::wgmma_wait<1>();  // for dK\n"
     "            release(s.query_ring, place);\n",
     "            release(s.query_ring, place);\n"
     "            ptx::wgmma_wait<1>();  // for dK\n"),
    (KERNEL, "the gradients of the output are released before the product for dV has read them",
     "            ptx::wgmma_wait<1>();  // for all products except dK\n"
     "            release(s.dout_ring, place);\n",
     "            release(s.dout_ring, place);\n"
     "            ptx::wgmma_wait<1>();  // for all products except dK\n"),
    # Not a fault, though it looks like one: releasing the keys before the last products. The loader fills their stage
    # only after the first queries of the next but one key block, whose stage is released after these products.
    (KERNEL, "the values are released before dV has left their place",
     "        store_gradients(block.first_key, dkey, dvalue);\n"
     "        if (s.dvalue() == s.value) release(s.value_ring, place_of<1>(block.round));\n",
     "        if (s.dvalue() == s.value) release(s.value_ring, place_of<1>(block.round));\n"
     "        store_gradients(block.first_key, dkey, dvalue);\n"),
    (BLOCK, "the last tile of a key block is not loaded",
     "tile < block.end; tile++, number++, box.advance(op))",
     "tile < block.end - 1; tile++, number++, box.advance(op))"),
    (KERNEL, "no fence before the products of scores",
     "ptx::shared_address(queries), 0, 0);\n"
     "    ptx::wgmma_fence();\n",
     "ptx::shared_address(queries), 0, 0);\n"),
    (KERNEL, "the scores are used before their product is complete",
     "        ptx::wgmma_wait<1>();\n"
     "        mask_scores",
     "        mask_scores"),
    (KERNEL, "dOut V^T is used before its product is complete",
     "scale_log2);\n"
     "        ptx::wgmma_wait<0>();\n",
     "scale_log2);\n"
     "        ptx::wgmma_wait<1>();\n"),
    (KERNEL, "dQ is used before its product is complete",
     "ptx::wgmma_wait<1>();  // for all products except dK",
     "ptx::wgmma_wait<2>();  // for all products except dK"),
    (KERNEL, "the steps of a product skip every other 32 bytes",
     "uint32_t(k % 4 * 32)) / 16",
     "uint32_t(k % 4 * 64)) / 16"),
    (KERNEL, "the steps along the rows are of 8 rows",
     "uint32_t(k * 16 * kBoxRowBytes)",
     "uint32_t(k * 8 * kBoxRowBytes)"),
    (KERNEL, "the product for dQ reads both operands with the keys along the columns",
     "ptx::wgmma<64, T, 1, 1>(dquery",
     "ptx::wgmma<64, T, 1, 0>(dquery"),
    (KERNEL, "a consumer multiplies dS before the other one has written its half",
     "            ptx::bar_sync(CONSUMERS, kConsumers * kWarpgroupThreads);\n"
     "            float dquery",
     "            float dquery"),
    (KERNEL, "dK overwrites dS that the other consumer still multiplies",
     "        ptx::bar_sync(CONSUMERS, kConsumers * kWarpgroupThreads);  // until",
     "        // until"),
    (KERNEL, "all tiles exchange dS in one place",
     "s.dscores[place.stage];",
     "s.dscores[0];"),
    (BLOCK, "the barrier of the sums counts only the consumer",
     "kSumsThreads = kWarpgroupThreads + 32;",
     "kSumsThreads = kWarpgroupThreads;"),
    (KERNEL, "the sums of dQ are overwritten before they are copied",
     "    ptx::bar_sync(SUMS_EMPTY + consumer, kSumsThreads);\n",
     ""),
    (BLOCK, "the place of the sums is free before its copy has read it",
     "            if (is_first_lane) ptx::bulk_wait_read<0>();\n",
     ""),
    (BLOCK, "a key block adds to sums that are not complete",
     "        if (is_first_lane) ptx::bulk_wait<0>();\n"
     "        for",
     "        for"),
    (BLOCK, "the sums are not copied when the block ends",
     "    });\n"
     "    if (is_first_lane) ptx::bulk_wait<0>();\n",
     "    });\n"),
    (BLOCK, "every key block adds to the sums, also the first",
     "if (tile < block.previous_end)",
     "if (true)"),
    (BLOCK, "every key block overwrites the sums",
     "if (tile < block.previous_end)",
     "if (false)"),
    (KERNEL, "dS and the values are overwritten before the copies of dK and dV have read them",
     "            ptx::bulk_commit();\n"
     "            ptx::bulk_wait_read<0>();\n",
     "            ptx::bulk_commit();\n"),
    (KERNEL, "a lane stores dK and dV before the other lanes have written them",
     "        ptx::fence_proxy_async();\n"
     "        __syncwarp();\n",
     "        ptx::fence_proxy_async();\n"),
    # Not a fault that a test can see: no __syncwarp() after the wait for the copies of dK. All lanes meet in the next
    # wgmma before they write dS to the same place. Only the memory model of PTX requires it.
    (KERNEL, "the last tile with a causal mask gets none",
     "last_key <= seen[kRows])",
     "first_key <= seen[kRows])"),
    (KERNEL, "windows and documents are not masked if the tile's first row sees the keys",
     "if (seen[kRows - 1] <= first_key",
     "if (seen[0] <= first_key"),
    (BLOCK, "groups that do not divide a tile lose a run",
     "    if (of_group < op.work.group) return;",
     "    if (of_group <= op.work.group) return;"),
    (PASSES, "a key block ends at the tile of its last key",
     "visible.end_of_queries(last_key, work.seq_len);",
     "min(visible.end_of_queries(last_key, work.seq_len), last_key + 1);"),
    (PASSES, "sums of parts that have none are added",
     "if (!has_sums<kHeadSize>(pass, b, part, tile)) continue;",
     ""),
    (DIVISION, "the parts' key blocks overlap",
     "round % 2 ? n_parts - 1 - part : part",
     "round % 2 ? n_parts - 2 + part : part"),
]
