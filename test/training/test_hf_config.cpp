// The config.json of Hugging Face's transformers and the model that it describes.

#include <nlohmann/json.hpp>
#include <tuple>

#include "test/support/expect_error.h"
#include "training/models/hf_config.h"

namespace {

using Json = nlohmann::ordered_json;

// Every setting is the family's default; the sizes are unusual.
Config::Model small(ModelFamily family) {
    Config::Model model;
    model.n_layer = 3, model.n_head = 6, model.given_kv_heads = family == ModelFamily::gpt2 ? 6 : 2, model.n_embd = 48;
    model.n_positions = 40, model.vocab_size = 131;
    set_family(model, family);
    return model;
}

Json example(ModelFamily family) { return Json::parse(hf_config(small(family), 130, Dtype::fp32)); }

constexpr ModelFamily kFamilies[] = {ModelFamily::gpt2, ModelFamily::llama, ModelFamily::qwen2, ModelFamily::qwen3};

}  // namespace

TEST_CASE("each family's model survives a round trip through config.json", "[config]") {
    for (const ModelFamily family : kFamilies) {
        INFO(name_of(family));
        const Json config = example(family);
        CHECK(config["model_type"] == name_of(family));
        CHECK(model_differences(hf_model(config.dump(), "config.json"), small(family)).empty());
        CHECK(hf_model(config.dump(), "config.json").family == family);
        CHECK_NOTHROW(check_hf_model(config.dump(), small(family), "config.json"));
    }
}

TEST_CASE("a config.json of another model is rejected with the key that differs", "[config]") {
    Config::Model gpt2 = small(ModelFamily::gpt2);
    gpt2.dropout = 0.1;
    const Json good = Json::parse(hf_config(gpt2, 130, Dtype::fp32));
    for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) REQUIRE(good[key] == 0.1);
    for (const auto& [key, value, said] : std::initializer_list<std::tuple<const char*, Json, const char*>>{
             {"n_layer", 4, "model.n_layer: 4 -> 3"},
             {"n_head", 4, "model.n_head"},
             {"n_embd", 60, "model.n_embd"},
             {"vocab_size", 132, "model.vocab_size"},
             {"n_positions", 25, "model.n_positions"},
             {"activation_function", "relu", "activation_function"},
             {"activation_function", "silu", "model.activation"},
             {"layer_norm_epsilon", 1e-6, "model.norm_eps"},
             {"n_inner", 100, "model.hidden_size_mlp: 100 -> 192"},
             {"model_type", "mixtral", "model_type \"mixtral\", is not supported"},
             {"model_type", "unheard_of", "GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"},
             {"scale_attn_by_inverse_layer_idx", true, "scale_attn_by_inverse_layer_idx"},
             {"scale_attn_weights", false, "scale_attn_weights"},
             {"quantization_config", Json{{"bits", 4}}, "quantization_config"},
             {"n_layer", 0, "but must be from 1"},
             {"tie_word_embeddings", false, "model.tie_embeddings: false -> true"}}) {
        Json bad = good;
        bad[key] = value;
        INFO(key << " " << value.dump());
        expect_error(Exit::config, {"config.json", said}, [&] { check_hf_model(bad.dump(), gpt2, "config.json"); });
    }
    const Config::Model llama = small(ModelFamily::llama);
    for (const auto& [key, value, said] : std::initializer_list<std::tuple<const char*, Json, const char*>>{
             {"num_key_value_heads", 3, "model.n_kv_head: 3 -> 2"},
             {"num_key_value_heads", nullptr, "model.n_kv_head: 6 -> 2"},
             {"head_dim", 10, "model.head_size: 10 -> 8"},
             {"intermediate_size", 100, "model.hidden_size_mlp: 100 -> 256"},
             {"rms_norm_eps", 1e-6, "model.norm_eps"},
             {"rope_theta", 10000.0, "model.rope_theta"},
             {"attention_bias", true, "model.attention_bias: \"all\" -> \"none\""},
             {"mlp_bias", true, "model.mlp_bias: true -> false"},
             {"tie_word_embeddings", true, "model.tie_embeddings"},
             {"hidden_act", "gelu", "hidden_act"},
             {"partial_rotary_factor", 0.5, "partial_rotary_factor"},
             {"rope_scaling", Json{{"type", "dynamic"}, {"factor", 2.0}}, "\"dynamic\""},
             {"rope_scaling", Json{{"type", "linear"}, {"factor", 2.0}}, "model.rope_scaling: \"linear\" -> \"none\""},
             {"rope_parameters", Json{{"rope_theta", 7.0}, {"rope_type", "default"}}, "model.rope_theta: 7.0"}}) {
        Json bad = example(ModelFamily::llama);
        bad[key] = value;
        INFO(key << " " << value.dump());
        expect_error(Exit::config, {"config.json", said}, [&] { check_hf_model(bad.dump(), llama, "config.json"); });
    }
}

// The defaults of transformers' LlamaConfig, Qwen2Config and Qwen3Config.
TEST_CASE("keys missing in a config.json have the architecture's defaults", "[config]") {
    for (const auto& [family, head_size, kv_heads, positions] : {std::tuple{ModelFamily::llama, 0, 6, 2048},
                                                                 {ModelFamily::qwen2, 0, 32, 32768},
                                                                 {ModelFamily::qwen3, 128, 32, 32768}}) {
        INFO(name_of(family));
        Json config = example(family);
        for (const char* key : {"head_dim", "num_key_value_heads", "max_position_embeddings"}) config.erase(key);
        const Config::Model model = hf_model(config.dump(), "config.json");
        CHECK(model.given_head_size == head_size);
        CHECK(model.given_kv_heads == kv_heads);
        CHECK(model.n_positions == positions);
    }
}

TEST_CASE("rotary embedding settings are read from both places where transformers stores them", "[config]") {
    const Json parameters = {
        {"rope_type", "llama3"},  {"factor", 8.0},           {"original_max_position_embeddings", 16},
        {"low_freq_factor", 1.5}, {"high_freq_factor", 3.5}, {"rope_theta", 1000.0}};
    Json four = example(ModelFamily::llama), five = four;
    four["rope_scaling"] = parameters;
    four["rope_scaling"].erase("rope_theta");
    four["rope_theta"] = 1000.0;
    five.erase("rope_theta"), five.erase("rope_scaling");
    five["rope_parameters"] = parameters;
    Config::Model expected = small(ModelFamily::llama);
    expected.rope.theta = 1000, expected.rope.scaling = RopeScaling::llama3, expected.rope.factor = 8;
    expected.rope.original_positions = 16, expected.rope.low_freq_factor = 1.5, expected.rope.high_freq_factor = 3.5;
    CHECK(model_differences(hf_model(four.dump(), ""), expected).empty());
    CHECK(model_differences(hf_model(five.dump(), ""), expected).empty());
    CHECK(model_differences(hf_model(hf_config(expected, 1, Dtype::fp32), ""), expected).empty());
}

TEST_CASE("windows are read and written per layer", "[config]") {
    Config::Model model = small(ModelFamily::qwen2);
    model.sliding_window = 7, model.window_pattern = "SL";
    Json config = Json::parse(hf_config(model, 1, Dtype::fp32));
    CHECK(config["layer_types"] == Json{"sliding_attention", "full_attention", "sliding_attention"});
    CHECK(model_differences(hf_model(config.dump(), ""), model).empty());
    config.erase("layer_types");
    config["max_window_layers"] = 2;
    CHECK(hf_model(config.dump(), "").window_pattern == "LLS");
    config["use_sliding_window"] = false;
    CHECK(hf_model(config.dump(), "").sliding_window == 0);
    // Llama has no windows: Qwen2 remains the nearest family.
    model.attention_bias = AttentionBias::none;
    expect_error(Exit::config, {"the nearest is Qwen2ForCausalLM", "model.attention_bias"},
                 [&] { hf_config(model, 1, Dtype::fp32); });
}

TEST_CASE("a model that no architecture computes is rejected with the setting", "[config]") {
    for (const auto& [change, said] : std::initializer_list<std::pair<void (*)(Config::Model&), const char*>>{
             {[](Config::Model& m) { m.qk_norm = QkNorm::unit; }, "model.qk_norm"},
             {[](Config::Model& m) { m.norm_weight = false; }, "model.norm_weight: true -> false"},
             {[](Config::Model& m) { m.activation = ActivationFunction::relu2, m.gated_mlp = false; },
              "model.gated_mlp"},
             {[](Config::Model& m) { m.final_softcap = 15; }, "model.final_softcap"},
             {[](Config::Model& m) { m.embedding_norm = true; }, "model.embedding_norm"},
             {[](Config::Model& m) { m.rope.fraction = 0.5; }, "model.rope_fraction"},
             {[](Config::Model& m) { m.given_attention_scale = 0.1; }, "model.attention_scale"}}) {
        Config::Model model = small(ModelFamily::llama);
        change(model);
        INFO(said);
        expect_error(Exit::config, {"LlamaForCausalLM", said}, [&] { hf_config(model, 1, Dtype::fp32); });
    }
}
