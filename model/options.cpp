#include "model/options.h"

#include "kernels/base/check.h"
#include "model/tensors.h"
#include "model/update.h"

std::string tensor_parallel_problem(const GptOptions& o) {
    const int parts = o.tensor_parallel.size;
    if (parts == 1) return "";
    if (std::string problem = o.shape.parts_problem(parts); !problem.empty()) return problem;
    if (o.batch * o.seq_len % parts != 0)
        return format("train.batch_size (%d) times train.seq_len (%d) must be a multiple of parallel.tensor (%d)",
                      o.batch, o.seq_len, parts);
    for (const RuleState& rule : lay_out_update(o, lay_out_tensors(o.shape)).rules)
        if (optimizer_row(rule.rule).scope == UpdateScope::factors)
            return format("optim.name \"%s\" updates whole tensors, which parallel.tensor (%d) divides",
                          name_of(rule.rule), parts);
    return o.cached_sequences == 0 ? "" : "parallel.tensor does not support the KV cache";
}
