#include "model/plan.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "model/arena.h"
#include "model/factors.h"
#include "model/matrices.h"
#include "model/update.h"

size_t planned_bytes(const GptOptions& options) {
    size_t bytes = 0;
    for (const MemoryRegion& region : plan_memory(options)) bytes += region.bytes;
    return bytes;
}

TokenWork token_work(const GptShape& shape, int seq_len) {
    const TensorLayout layout = lay_out_tensors(shape);
    TokenWork work{int64_t(layout.parameters), 0};
    if (shape.has_head()) work.parameters -= int64_t(layout.tensors[0].count);  // wte
    for (int layer = 0; layer < shape.n_layer; layer++) work.attended += shape.attended(layer, seq_len);
    return work;
}

std::string plan_row(const std::string& name, size_t bytes) {
    return format("%-22s %16zu bytes %10.1f MiB\n", name.c_str(), bytes, double(bytes) / 0x1p20);
}

size_t saved_bytes(const GptOptions& options) {
    const TensorLayout layout = lay_out_rank(options);
    const UpdateLayout update = lay_out_update(options, layout);
    size_t masters = 0, slots = 0, elements = 0;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const size_t count = layout.tensors[i].is_copy ? 0 : part_of(layout, layout.tensors[i], options.rank).count;
        masters += count, slots += count * update.row_of(i).slots.size();
        if (options.averages) elements += count;
    }
    for (const Matrix& matrix : lay_out_matrices(layout))
        for (const MatrixSlot& slot : update.row_of(size_t(matrix.tensor)).matrix_slots)
            if (matrix.owner == options.stage_rank()) elements += slot_elements(slot, matrix);
    if (options.rank == 0) elements += factor_elements(options, layout, update);
    const OptimizerSettings& optimizer = options.optimizer;
    return masters * size_of(optimizer.master_type()) + slots * size_of(optimizer.state_type()) +
           elements * sizeof(float);
}

std::string plan_table(const GptOptions& options) {
    const std::vector<MemoryRegion> regions = plan_memory(options);
    std::vector<std::string> categories;
    for (const MemoryRegion& region : regions)
        if (std::find(categories.begin(), categories.end(), region.category) == categories.end())
            categories.push_back(region.category);

    std::string table;
    for (const std::string& category : categories) {
        std::string rows;
        size_t bytes = 0;
        for (const MemoryRegion& region : regions) {
            if (category != region.category) continue;
            rows += plan_row("    " + region.name, region.bytes);
            bytes += region.bytes;
        }
        table += plan_row(category, bytes) + rows;
    }
    table += plan_row("total", planned_bytes(options));
    table += format("%-22s %16zu\n", "parameters", lay_out_tensors(options.shape).parameters);
    return table;
}

void check_fits(const GptOptions& options) {
    const size_t needed = planned_bytes(options), free_bytes = device_info().free_bytes;
    if (needed <= free_bytes || free_bytes == 0) return;  // 0: the device cannot be used, and device_alloc() fails
    fail(Exit::os,
         "not enough memory: %zu bytes needed, %zu bytes available\n%sto reduce memory, use a smaller "
         "train.batch_size (now %d) with more micro-steps, train.recompute norm or block, a smaller train.head_rows "
         "(now %d)%s",
         needed, free_bytes, plan_table(options), options.batch, options.head_rows,
         options.precision == Dtype::fp32 ? " or train.precision bf16" : "");
}
