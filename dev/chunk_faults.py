"""Faults in ops on chunks of sequences, for dev/plant_faults.py: the same form as kernel_faults.py."""
CUDA, CPU, BASE = "kernels/cuda/", "kernels/cpu/", "kernels/base/chunks.h"
ROPE, ROPE_CPU = CUDA + "qk_norm_rope.cu", CPU + "qk_norm_rope.cpp"
EMBEDDING, EMBEDDING_CPU = CUDA + "embedding.cu", CPU + "embedding.cpp"
DROPOUT, DROPOUT_CPU = CUDA + "dropout.cu", CPU + "dropout.cpp"
CHUNKS = "test_cpu: * of chunks *"

FAULTS = [
    # ---- positions
    (BASE, "the first second chunk is at the first one's position", "2 * b < batch", "2 * b <= batch", CHUNKS),
    (BASE, "the second chunks are first in the batch", "? first : second", "? second : first", CHUNKS),
    # ---- embedding
    (EMBEDDING, "the second chunk has the first one's positions",
     "op.starts.start(b, op.batch) + t);", "op.starts.first + t);"),
    (EMBEDDING, "the gradients of the second chunk go to the first one's positions",
     "index_in_part(position, op.starts.start(b, op.batch)", "index_in_part(position, op.starts.first"),
    (EMBEDDING, "the gradients go to the first positions",
     "index_in_part(position, op.starts.start(b, op.batch)", "index_in_part(position, 0"),
    (EMBEDDING, "each chunk adds the gradients of the other half of the batch",
     "index_in_part(position, op.starts.start(b, op.batch)",
     "index_in_part(position, op.starts.start(op.batch - 1 - b, op.batch)"),
    (EMBEDDING, "rows after the chunks keep their old content",
     "if (position >= (op.accumulate ? end_of_positions(op) : op.n_positions)) return;",
     "if (position >= end_of_positions(op)) return;"),
    (EMBEDDING, "rows that no chunk has keep their old content",
     "if (op.accumulate && c < available) sum.value[c] = row[c];",
     "if ((op.accumulate || place_in(0) + place_in(op.batch - 1) == -2) && c < available) sum.value[c] = row[c];"),
    (EMBEDDING, "the rows end with the first chunk",
     "std::max(op.starts.first, op.starts.second)", "op.starts.first"),
    (EMBEDDING_CPU, "the second chunk has the first one's positions",
     "op.starts.start(b, op.batch) + t);", "op.starts.first + t);"),
    (EMBEDDING_CPU, "the gradients of the second chunk go to the first one's positions",
     "int(position) - op.starts.start(b, op.batch);", "int(position) - op.starts.first;"),
    (EMBEDDING_CPU, "the gradients go to the first positions",
     "int(position) - op.starts.start(b, op.batch);", "int(position);"),
    (EMBEDDING_CPU, "each chunk adds the gradients of the other half of the batch",
     "int(position) - op.starts.start(b, op.batch);", "int(position) - op.starts.start(op.batch - 1 - b, op.batch);"),
    (EMBEDDING_CPU, "rows that no chunk has keep their old content",
     "if (!op.accumulate) std::fill(row, row + op.channels, 0.0f);\n        for",
     "if (!op.accumulate && (int(position) - op.starts.first < op.seq_len || int(position) >= op.starts.second)) "
     "std::fill(row, row + op.channels, 0.0f);\n        for"),
    # ---- QK norm and RoPE
    (ROPE, "the second chunk has the first one's positions", "op.starts.start(int(b), op.batch)", "op.starts.first"),
    (ROPE, "backward begins with the first position", "op.starts.start(int(b), op.batch)",
     "(std::is_same_v<Op, QkNormRopeForward> ? op.starts.start(int(b), op.batch) : 0)"),
    (ROPE_CPU, "the second chunk has the first one's positions",
     "op.starts.start(int(row / op.seq_len), op.batch)", "op.starts.first"),
    (ROPE_CPU, "backward begins with the first position",
     "load_angles(op.table, position_of(op, row), half, -1.0f)",
     "load_angles(op.table, row % op.seq_len, half, -1.0f)"),
    # ---- dropout
    (DROPOUT, "a chunk begins with the call of its first element's number", "op.start / kDropoutGroup + call",
     "op.start + call"),
    (DROPOUT, "a chunk begins with its sample's first call", "op.start / kDropoutGroup + call", "call"),
    (DROPOUT_CPU, "a chunk begins with the call of its first element's number", "op.start + begin - origin",
     "op.start * kDropoutGroup + begin - origin"),
    (DROPOUT_CPU, "a chunk begins with its sample's first call", "op.start + begin - origin", "begin - origin"),
]
