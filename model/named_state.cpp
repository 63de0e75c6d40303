#include "model/named_state.h"

#include <algorithm>
#include <iterator>

#include "model/factors.h"
#include "model/optimizers.h"
#include "model/tensors.h"
#include "model/update.h"

// Names a tensor's values in an array that holds this rank's part of it from `owned`. `once`: only the elements that
// this rank saves.
static NamedTensor named_tensor(const GptState& s, const Tensor& tensor, const std::string& prefix, View owned,
                                bool once) {
    const TensorPart here = owned_part(s.options, s.layout, tensor);
    TensorPart part = once ? part_of(s.layout, tensor, s.options.rank) : here;
    if (once && (tensor.is_copy || (!tensor.row->is_divided() && s.options.tensor_parallel.rank > 0))) part.count = 0;
    return {.name = prefix + "." + tensor.name,
            .shape = logical_shape(s.layout, tensor),
            .values = owned.from(part.first - here.first),
            .first = part.first,
            .count = part.count,
            .boxes = boxes_of(s.layout, tensor)};
}

std::vector<NamedTensor> name_tensors(const GptState& s, const std::string& prefix, View owned, bool once) {
    std::vector<NamedTensor> named;
    for (const Tensor& tensor : s.layout.tensors) {
        const View values = owned.from(owned_part(s.options, s.layout, tensor).shard_begin);
        named.push_back(named_tensor(s, tensor, prefix, values, once));
    }
    return named;
}

std::vector<NamedTensor> name_state(const GptState& s, bool once) {
    std::vector<NamedTensor> named = name_tensors(s, "master", s.master, once);
    if (s.average) std::ranges::move(name_tensors(s, "average", s.average, once), std::back_inserter(named));
    for (const RuleState& rule : s.update.rules)
        for (size_t slot = 0; slot < rule.slots.size(); slot++)
            for (size_t i = 0; i < s.layout.tensors.size(); i++) {
                const UpdateLayout::Place& place = s.update.tensors[i];
                if (&s.update.rules[size_t(place.rule)] != &rule) continue;
                named.push_back(named_tensor(s, s.layout.tensors[i], optimizer_row(rule.rule).slots[slot].name,
                                             rule.slots[slot].from(place.state_begin), once));
            }
    std::ranges::move(name_factors(s, once), std::back_inserter(named));
    return named;
}
