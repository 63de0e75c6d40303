// Adafactor's state in the model.
#include <map>

#include "model/gpt.h"
#include "model/plan.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

GptOptions adafactor_options() {
    GptOptions options = nano_options();
    options.shape.given_kv_heads = 1;
    options.shape.gated_mlp = true;
    options.shape.given_hidden = 40;
    set_optimizer(options.optimizer, OptimizerKind::adafactor);
    return options;
}

}  // namespace

TEST_CASE("Adafactor's averages have the names of their matrices and vectors", "[model]") {
    const GptOptions options = adafactor_options();
    const Gpt gpt(options, comm_single());
    std::map<std::string, std::vector<size_t>> shapes;
    size_t saved = 0;
    for (const NamedTensor& tensor : gpt.saved_tensors()) {
        saved += tensor.count * sizeof(float);
        if (tensor.name.starts_with("master.")) continue;
        REQUIRE(tensor.shape.size() == 1);
        CHECK(tensor.count == tensor.shape[0]);
        shapes[tensor.name] = tensor.shape;
    }
    CHECK(saved == saved_bytes(options));
    const size_t channels = size_t(options.shape.n_embd), head = size_t(options.shape.head_size());
    CHECK(options.shape.padded_vocab() > options.shape.vocab_size);
    CHECK(shapes.at("row_v.wte") == std::vector{size_t(options.shape.vocab_size)});
    CHECK(shapes.at("col_v.wte") == std::vector{channels});
    CHECK(shapes.at("row_v.h.1.qkv.weight.0") == std::vector{channels});
    CHECK(shapes.at("row_v.h.1.qkv.weight.2") == std::vector{head});
    CHECK(shapes.at("row_v.h.1.fc.weight.1") == std::vector<size_t>{40});
    CHECK(shapes.at("col_v.h.1.fc_proj.weight") == std::vector<size_t>{40});
    CHECK(shapes.at("v.h.1.norm1.weight") == std::vector{channels});
    CHECK(!shapes.contains("row_v.h.1.norm1.weight"));
}

TEST_CASE("all ranks keep Adafactor's averages, and rank 0 saves them", "[model]") {
    GptOptions options = adafactor_options();
    const size_t alone = saved_bytes(options);
    options.ranks = 2, options.zero_stage = 3;
    size_t of_ranks = 0;
    std::map<std::string, size_t> planned[2];
    for (options.rank = 0; options.rank < 2; options.rank++) {
        of_ranks += saved_bytes(options);
        for (const MemoryRegion& region : plan_memory(options)) planned[options.rank][region.name] = region.bytes;
    }
    CHECK(of_ranks == alone);
    for (const char* name : {"row_v", "col_v", "factor_sums"}) CHECK(planned[0].at(name) == planned[1].at(name));
    CHECK(!planned[0].contains("m"));
    CHECK(!planned[0].contains("v"));
}
