#include "runtime/config/config.h"
#include "test/support/expect_error.h"

TEST_CASE("pipeline: the grid, the parts of the layers and their contradictions", "[config]") {
    const auto config_of = [](const std::string& members) {
        return parse_config("{\"parallel\": {" + members + "}, \"model\": {\"n_layer\": 6}}", "x.json");
    };
    const Config stages = config_of(R"("tensor": 2, "pipeline": 3)");
    const Grid grid = grid_of(stages, 12);
    CHECK((grid.tensor == 2 && grid.pipeline == 3 && grid.data == 2));
    CHECK(grid_of(stages, 1).size() == 6);
    CHECK(stages.parallel.chunks() == 1);
    CHECK(config_of(R"("pipeline_schedule": "interleaved")").parallel.chunks() == 2);
    CHECK(config_of(R"("pipeline_schedule": "interleaved", "pipeline_chunks": 3)").parallel.chunks() == 3);
    const Config layers = config_of(R"("pipeline": 2, "pipeline_layers": [2, 4])");
    CHECK(layers.parallel.pipeline_layers == std::vector{2, 4});
    CHECK(parse_config(config_json(layers), "x.json").parallel.pipeline_layers == std::vector{2, 4});

    struct Case {
        const char* members;
        int world;
        std::vector<std::string> words;  // none: valid
    };
    const std::string most =
        "model.n_layer (6) must be at least parallel.pipeline (4) times parallel.pipeline_chunks (2)";
    for (const auto& [members, world, words] : {
             Case{R"("tensor": 2, "pipeline": 3)", 6, {}},
             {R"("tensor": 2, "pipeline": 3)",
              9,
              {"ranks (9) must be a multiple of parallel.tensor (2) times "
               "parallel.pipeline (3), i.e. of 6"}},
             {R"("pipeline": 6)", 6, {}},
             {R"("pipeline": 7)", 7, {"model.n_layer (6)", "parallel.pipeline (7)", "i.e. 7"}},
             {R"("pipeline": 4, "pipeline_schedule": "interleaved")", 4, {most}},
             {R"("pipeline": 3, "pipeline_schedule": "interleaved")", 3, {}},
             {R"("pipeline": 2, "pipeline_chunks": 2)", 2, {"parallel.pipeline_chunks (2) must be 1", "\"1f1b\""}},
             {R"("pipeline": 2, "pipeline_chunks": 2, "pipeline_schedule": "gpipe")", 2, {"must be 1", "\"gpipe\""}},
             {R"("pipeline": 2, "pipeline_chunks": 1, "pipeline_schedule": "interleaved")",
              2,
              {"parallel.pipeline_chunks (1) must be at least 2"}},
             {R"("pipeline": 2, "pipeline_layers": [1, 5])", 2, {}},
             {R"("pipeline": 2, "pipeline_layers": [1, 4])", 2, {"pipeline_layers (5) must be model.n_layer (6)"}},
             {R"("pipeline": 2, "pipeline_layers": [2, 2, 2])", 2, {"i.e. 2, numbers, has 3"}},
             {R"("pipeline": 2, "zero_stage": 3)", 2, {"parallel.zero_stage (3)", "parallel.pipeline (2)"}},
             {R"("pipeline": 2, "zero_stage": 2)", 2, {}},
             {R"("pipeline_layers": [1], "pipeline_chunks": 4, "zero_stage": 3)", 2, {}},
             {R"("auto": true)", 7, {}},  // the grid is checked when it is chosen
             {R"("auto": true, "tensor": 2)", 2, {"parallel.auto chooses parallel.tensor, which must not be set"}},
             {R"("auto": true, "pipeline_layers": [1, 5])", 2, {"parallel.auto chooses parallel.pipeline_layers"}},
         }) {
        INFO(members);
        const Config config = config_of(members);
        if (words.empty())
            CHECK_NOTHROW(check_config(config, "x.json", world));
        else
            expect_error(Exit::config, words, [&, w = world] { check_config(config, "x.json", w); });
    }
    Config noise = stages;
    noise.log.noise_scale_every_steps = 1;
    expect_error(Exit::config, {"log.noise_scale_every_steps does not support parallel.pipeline (3)"},
                 [&] { check_config(noise, "x.json", 6); });
    for (const char* wrong : {"[0]", "[1.5]", "[\"1\"]", "3", "\"2,4\"", "[10001]", "[null]"}) {
        INFO(wrong);
        expect_error(Exit::config, {"parallel.pipeline_layers must be a list of up to 256 integers in [1, 10000]"},
                     [&] { config_of("\"pipeline_layers\": " + std::string(wrong)); });
    }
}
