// How the optimizers divide the tensors, for any number of ranks.
#include <set>

#include "kernels/shared/update_rules.h"
#include "model/update.h"
#include "test/support/catch.h"

namespace {

const GptShape kShape{2, 4, 4, 300, 64, 700};

GptOptions options_of(int rank, int ranks, int zero_stage) {
    GptOptions options;
    options.shape = kShape;
    options.rank = rank;
    options.ranks = ranks;
    options.zero_stage = zero_stage;
    return options;
}

}  // namespace

TEST_CASE("weight decay applies to matrices, embeddings and the head, and not to vectors", "[model]") {
    const GptOptions options = options_of(0, 1, 0);
    const TensorLayout layout = lay_out_tensors(kShape);
    const UpdateLayout update = lay_out_update(options, layout);
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const double decay = update.groups[size_t(update.tensors[i].group)].weight_decay;
        INFO(layout.tensors[i].name);
        CHECK(decay == (logical_shape(layout.tensors[i]).size() == 2 ? options.optimizer.weight_decay : 0));
    }
}

TEST_CASE("each owned element has its own place in the optimizer's state", "[model]") {
    for (const int ranks : {1, 2, 3})
        for (const int stage : {0, 1})
            for (int rank = 0; rank < ranks; rank++) {
                const GptOptions options = options_of(rank, ranks, stage);
                const TensorLayout layout = lay_out_tensors(kShape, ranks);
                UpdateLayout update = lay_out_update(options, layout);
                const bool whole = !options.is_sharded();
                const std::vector<ops::Chunk> grid = chunk_grid(layout);
                const std::vector<ops::Chunk> chunks =
                    update_chunks(options, layout, update, whole ? grid : owned_chunks(layout, grid, rank, whole));
                std::set<size_t> places;
                size_t elements = 0;
                for (const ops::Chunk& chunk : chunks) {
                    const RuleState& rule = update.rules[size_t(update.tensors[size_t(chunk.tensor)].rule)];
                    CHECK(chunk.state_begin + size_t(chunk.count) <= rule.elements);
                    CHECK(chunk.group == update.tensors[size_t(chunk.tensor)].group);
                    for (size_t e = 0; e < size_t(chunk.count); e++) places.insert(chunk.state_begin + e);
                    elements += size_t(chunk.count);
                }
                CHECK(places.size() == elements);
                size_t owned = 0;
                for (const Tensor& tensor : layout.tensors) owned += owned_part(options, layout, tensor).count;
                CHECK(elements == owned);
            }
}

TEST_CASE("each optimizer has as many arrays of state as its rule updates", "[model]") {
    for (size_t kind = 0; kind < names_of(OptimizerKind()).size(); kind++)
        ops::dispatch(OptimizerKind(kind), [&]<class Rule>() {
            CHECK(optimizer_row(OptimizerKind(kind)).slots.size() == size_t(Rule::kStates));
        });
}

TEST_CASE("the scalars of an update follow AdamW's formula", "[model]") {
    const OptimizerSettings settings{.beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6};
    const ops::UpdateScalars scalars = update_scalars(settings, {OptimizerKind::adamw, 0.5}, 0.25, 2);
    CHECK(scalars.learning_rate == 0.25f);
    CHECK(scalars.keep == 0.875f);
    CHECK(scalars.beta2 == 0.99f);
    CHECK(scalars.one_minus_beta2 == 0.01f);
    CHECK(std::abs(scalars.step_size / (0.25 / 0.19) - 1) < 1e-6);
    CHECK(std::abs(scalars.root_bias_correction2 / std::sqrt(0.0199) - 1) < 1e-6);
}
