// Section "model" of a configuration: families, Hugging Face's names, and contradictory settings.
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/config/config.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

namespace {

Config::Model model_of(const std::string& members) {
    return parse_config("{\"model\":{" + members + "}}", "c.json").model;
}

// The configuration of a file with a run of one short step and these model keys, with overrides.
Config load(const std::string& members, const std::vector<std::string>& overrides) {
    const TemporaryDirectory directory;
    const std::string path = directory / "c.json";
    std::ofstream(path) << "{\"model\":{" + members + "},\"train\":{\"batch_size\":1,\"total_batch_tokens\":1024}}";
    return load_config(path, overrides, 1);
}

}  // namespace

TEST_CASE("a family sets the defaults of the architecture keys", "[config]") {
    const Config::Model llama = model_of(R"("n_layer":2,"norm_eps":0.5,"family":"llama")");
    CHECK(llama.n_layer == 2);
    CHECK(llama.norm_eps == 0.5);  // explicit keys take precedence, wherever the family appears
    CHECK(llama.activation == ActivationFunction::silu);
    CHECK(llama.gated_mlp);
    CHECK(llama.norm == NormKind::rmsnorm);
    CHECK_FALSE(llama.norm_bias);
    CHECK(llama.norm_weight);
    CHECK(llama.position == PositionKind::rope);
    CHECK(llama.rope.theta == 500000);
    CHECK(llama.attention_bias == AttentionBias::none);
    CHECK_FALSE(llama.mlp_bias);
    CHECK_FALSE(llama.tie_embeddings);
    CHECK(llama.qk_norm == QkNorm::none);
    const Config::Model qwen2 = model_of(R"("model_type":"qwen2")"), qwen3 = model_of(R"("family":"qwen3")");
    CHECK(qwen2.attention_bias == AttentionBias::qkv);
    CHECK(qwen2.rope.theta == 1e6);
    CHECK(qwen3.attention_bias == AttentionBias::none);
    CHECK(qwen3.qk_norm == QkNorm::weight);
    CHECK(qwen3.norm_eps == 1e-6);
    // GPT-3 and custom models start from GPT-2's defaults.
    for (const char* family : {"gpt2", "gpt3", "custom"})
        CHECK(model_differences(model_of("\"family\":\"" + std::string(family) + "\""), Config().model).empty());
}

TEST_CASE("a family from the command line is applied before the file's keys", "[config]") {
    const std::string file = R"("norm":"layernorm","n_head":4,"n_embd":64)";
    for (const auto& overrides : {std::vector<std::string>{"model.family=llama", "model.mlp_bias=true"},
                                  std::vector<std::string>{"model.mlp_bias=true", "model.model_type=llama"}}) {
        const Config::Model model = load(file, overrides).model;
        CHECK(model.family == ModelFamily::llama);
        CHECK(model.norm == NormKind::layernorm);
        CHECK(model.gated_mlp);
        CHECK(model.mlp_bias);
    }
    // It replaces a family in the file.
    CHECK(load(R"("family":"qwen3")", {"model.family=gpt2"}).model.qk_norm == QkNorm::none);
    CHECK(load(R"("family":"qwen3")", {"model.num_key_value_heads=2"}).model.given_kv_heads == 2);
}

TEST_CASE("a printed configuration omits its family's defaults and is equivalent", "[config]") {
    Config config = parse_config(R"({"model":{"family":"qwen3","norm_eps":1e-5}})", "c.json");
    const std::string changed = changed_config_json(config);
    CHECK(nlohmann::json::parse(changed) == nlohmann::json{{"model", {{"family", "qwen3"}, {"norm_eps", 1e-5}}}});
    CHECK(config_json(parse_config(changed, "changed")) == config_json(config));
    CHECK(config_json(parse_config(config_json(config), "printed")) == config_json(config));
}

TEST_CASE("Hugging Face's names are accepted, but not two names of one key", "[config]") {
    const Config::Model model = model_of(
        R"("model_type":"llama","num_hidden_layers":3,"num_attention_heads":6,"num_key_value_heads":2,"hidden_size":48,
           "head_dim":10,"intermediate_size":70,"max_position_embeddings":50,"hidden_act":"relu2","rms_norm_eps":1e-3,
           "tie_word_embeddings":true,"attention_bias":true,"partial_rotary_factor":0.6,"vocab_size":99,
           "attn_logit_softcapping":50,"final_logit_softcapping":30,"original_max_position_embeddings":7)");
    CHECK(model.n_layer == 3);
    CHECK(model.n_head == 6);
    CHECK(model.given_kv_heads == 2);
    CHECK(model.n_embd == 48);
    CHECK(model.given_head_size == 10);
    CHECK(model.given_hidden == 70);
    CHECK(model.n_positions == 50);
    CHECK(model.activation == ActivationFunction::relu2);
    CHECK(model.norm_eps == 1e-3);
    CHECK(model.tie_embeddings);
    CHECK(model.attention_bias == AttentionBias::all);
    CHECK(model.rope.fraction == 0.6);
    CHECK(model.attention_softcap == 50);
    CHECK(model.final_softcap == 30);
    CHECK(model.rope.original_positions == 7);
    const Config::Model gpt2 =
        model_of(R"("n_inner":70,"activation_function":"silu","layer_norm_epsilon":1e-3,"attention_bias":false)");
    CHECK(gpt2.given_hidden == 70);
    CHECK(gpt2.activation == ActivationFunction::silu);
    CHECK(gpt2.norm_eps == 1e-3);
    CHECK(gpt2.attention_bias == AttentionBias::none);

    for (const auto& [members, words] : std::initializer_list<std::pair<const char*, std::vector<std::string>>>{
             {R"("n_kv_head":2,"num_key_value_heads":2)", {"model.n_kv_head", "model.num_key_value_heads"}},
             {R"("rms_norm_eps":1,"layer_norm_epsilon":1)", {"model.rms_norm_eps", "model.layer_norm_epsilon"}},
             {R"("hidden_act":"gelu")", {"model.activation", "gelu_new|silu|relu2"}},
             {R"("attention_bias":1)", {"model.attention_bias", "none|qkv|all"}},
             {R"("num_experts":8)", {"model.num_experts"}}}) {
        INFO(members);
        expect_error(Exit::config, words, [&] { model_of(members); });
    }
}

TEST_CASE("derived sizes equal the same sizes given explicitly", "[config]") {
    Config::Model model = model_of(R"("n_head":4,"n_embd":64)");
    model.fill_in_sizes();
    CHECK(model.given_kv_heads == 4);
    CHECK(model.given_head_size == 16);
    CHECK(model.given_hidden == 256);
    CHECK(model.rope.original_positions == 1024);
    // Llama 2's sizes: 7B, 13B.
    CHECK(model_of(R"("family":"llama","n_head":32,"n_embd":4096)").hidden() == 11008);
    CHECK(model_of(R"("family":"llama","n_head":40,"n_embd":5120)").hidden() == 13824);

    Config derived, given;
    given.model.fill_in_sizes();
    CHECK(config_digest(derived) == config_digest(given));
    CHECK(config_differences(derived, given).empty());
    given.model.given_kv_heads = 4;
    CHECK(config_differences(derived, given) == std::vector<std::string>{"model.n_kv_head: 12 -> 4"});
    derived.model.n_head = 6;  // its n_kv_head and head_size follow
    CHECK(config_differences(Config(), derived) == std::vector<std::string>{"model.n_head: 12 -> 6"});
}

TEST_CASE("contradictory settings are rejected with both keys", "[config]") {
    for (const auto& [members, words] : std::initializer_list<std::pair<const char*, std::vector<std::string>>>{
             {R"("n_kv_head":5)", {"model.n_head (12)", "model.n_kv_head (5)"}},
             {R"("n_head":5)", {"model.n_embd (768)", "model.n_head (5)", "4 or 6"}},
             {R"("rope_scaling":"yarn")", {"model.rope_scaling \"yarn\"", "model.position \"rope\""}},
             {R"("rope_fraction":0.5)", {"model.rope_fraction (0.5)", "model.position \"rope\""}},
             {R"("position":"rope","head_size":13)", {"model.rope_fraction (1)", "model.head_size (13)"}},
             {R"("position":"rope","rope_fraction":0.1)", {"model.rope_fraction (0.1)", "model.head_size (64)"}},
             {R"("position":"rope","rope_fraction":0)", {"model.rope_fraction (0)", "model.head_size (64)"}},
             {R"("position":"rope","rope_factor":2)", {"model.rope_factor (2)", "model.rope_scaling"}},
             {R"("position":"rope","rope_scaling":"llama3","rope_low_freq_factor":4)",
              {"model.rope_high_freq_factor (4)", "model.rope_low_freq_factor (4)"}},
             {R"("position":"rope","rope_scaling":"yarn","rope_beta_slow":32)",
              {"model.rope_beta_fast (32)", "model.rope_beta_slow (32)"}},
             {R"("window_pattern":"SL")", {"model.window_pattern \"SL\"", "model.sliding_window"}},
             {R"("sliding_window":8,"window_pattern":"SX")", {"model.window_pattern", "\"SX\""}},
             {R"("sliding_window":8,"n_layer":2,"window_pattern":"SSL")",
              {"model.window_pattern (3 letters)", "model.n_layer (2)"}}}) {
        INFO(members);
        expect_error(Exit::config, words, [&] { load(members, {}); });
    }
    expect_error(Exit::config, {"data.document_mask", "data.tokenizer", "data.document_token"},
                 [] { load("", {"data.document_mask=true"}); });
    expect_error(Exit::config, {"data.document_token (50257)", "model.vocab_size (50257)"}, [] {
        load("", {"data.document_mask=true", "data.document_token=50257"});
    });
    CHECK_NOTHROW(load("", {"data.document_mask=true", "data.document_token=50256"}));
    CHECK_NOTHROW(load(R"("position":"rope","n_head":5,"head_size":12,"rope_fraction":0.5)", {}));
}
