// The configuration: every invalid one is rejected with a message that names the file and the key, and everything
// derived from the table of options agrees with it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/config/options.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

using namespace std::string_literals;

namespace {

Config parse_and_check(const std::string& text) {
    Config config = parse_config(text, "bad.json");
    check_config(config, "bad.json", 1);
    return config;
}

struct BadText {
    std::string text;
    std::vector<std::string> words;  // in the message, in addition to the file's name
};

const std::vector<BadText> kBadTexts = {
    // Not JSON, or not an object of objects.
    {"", {"empty"}},
    {" \n\t", {"empty"}},
    {"{", {"line 1, column 1"}},
    {"nonsense", {"line 1"}},
    {"[]", {"object of sections", "[]"}},
    {"3", {"object of sections", "3"}},
    {"null", {"object of sections", "null"}},
    {"{\"train\":3}", {"train", "object of keys", "3"}},
    {"{\"train\":[{\"max_steps\":1}]}", {"train", "object of keys"}},
    {"{\"train\":{\"max_steps\":1},}", {"line 1, column 25", "unexpected comma"}},
    {"{\"train\":{\"max_steps\":1}} {}", {"line 1, column 27"}},
    {"{\n  \"optim\": {\n    \"learning_rate\": NaN\n  }\n}", {"line 3, column 22", "learning_rate"}},
    {"{\"optim\":{\"learning_rate\":Infinity}}", {"learning_rate"}},
    {"{\"optim\":{\"learning_rate\":1e400}}", {"1e400", "too large"}},
    {"{\"optim\":{\"learning_rate\":-1e400}}", {"-1e400", "too large"}},
    {"{\"optim\":{\"learning_rate\":.1}}", {"learning_rate"}},
    {"{\"optim\":{'beta1':0.9}}", {"line 1, column 11"}},
    {"// comment\n{}", {"line 1, column 1"}},
    {"{\"run\":{\"dir\":\"\xff\xfe\"}}", {"UTF-8", "dir"}},
    {"{\"run\":{\"dir\":\"\xc0\xaf\"}}", {"UTF-8", "dir"}},
    {"{\"run\":{\"dir\":\"\\ud800\"}}", {"surrogate"}},
    {"{\"run\":{\"dir\":\"a\nb\"}}", {"control character"}},
    {"{}\0{\"run\":1}"s, {"NUL", "line 1, column 3"}},
    {"{\"run\":{}}\0"s, {"NUL", "column 11"}},
    {std::string(100000, '['), {"nested more than 8 deep"}},
    {"{\"train\":{\"max_steps\":{\"a\":{\"b\":{\"c\":{\"d\":{\"e\":{\"f\":{}}}}}}}}}", {"nested more than 8 deep"}},
    // The same key twice.
    {"{\"run\":{\"seed\":1,\"seed\":1}}", {"\"seed\"", "duplicate", "column 23"}},
    {"{\"run\":{},\n\"run\":{}}", {"\"run\"", "duplicate", "line 2, column 5"}},
    {"{\"run\":{\"seed\":1,\"se\\u0065d\":1}}", {"\"seed\"", "duplicate"}},
    // A key that does not exist.
    {"{\"traim\":{}}", {"\"traim\"", "did you mean \"train\""}},
    {"{\"train\":{\"batchsize\":1}}", {"\"train.batchsize\"", "did you mean \"train.batch_size\""}},
    {"{\"train\":{\"learning_rate\":1}}", {"\"train.learning_rate\"", "did you mean \"optim.learning_rate\""}},
    {"{\"learning_rate\":1}", {"\"learning_rate\"", "did you mean \"optim.learning_rate\""}},
    {"{\"train.max_step\":1}", {"\"train.max_step\"", "did you mean \"train.max_steps\""}},
    {"{\"fsdp\":{\"zero_stage\":1}}", {"\"fsdp\"", "--help-config lists all keys"}},
    {"{\"run.dir\":\"x\"}", {"\"run.dir\"; in a file, keys are nested in sections: {\"run\":{\"dir\":\"x\"}}"}},
    {"{\"max_steps\":5}", {"did you mean \"train.max_steps\"? In a file, write {\"train\":{\"max_steps\":5}}"}},
    {"{\"max_step\":5}", {"did you mean \"train.max_steps\"?"}},
    {"{\"model\":{\"max_steps\":5}}", {"\"model.max_steps\"; did you mean \"train.max_steps\"?"}},
    {"{\"train\":{\"every_steps\":5}}",
     {"did you mean \"checkpoint.every_steps\", \"eval.every_steps\", \"sample.every_steps\" or \"log.every_steps\"?"}},
    {"{\"model\":{\"\":1}}", {"\"model.\""}},
    {"{\"\":{}}", {"\"\""}},
    {"{\"model\":{\"n_layer.\":1}}", {"\"model.n_layer.\"", "did you mean \"model.n_layer\""}},
    {"{\"model\":{\"N_LAYER\":1}}", {"\"model.N_LAYER\""}},
    // Values of the wrong type.
    {"{\"model\":{\"n_layer\":\"12\"}}", {"model.n_layer", "an integer in [1, 10000]", "\"12\""}},
    {"{\"model\":{\"n_layer\":12.0}}", {"model.n_layer", "integer", "12.0"}},
    {"{\"model\":{\"n_layer\":null}}", {"model.n_layer", "integer", "null"}},
    {"{\"model\":{\"n_layer\":true}}", {"model.n_layer", "integer", "true"}},
    {"{\"model\":{\"n_layer\":[12]}}", {"model.n_layer", "integer", "[12]"}},
    {"{\"train\":{\"total_batch_tokens\":5e5}}", {"train.total_batch_tokens", "integer", "500000.0"}},
    {"{\"run\":{\"seed\":-1}}", {"run.seed", "integer from 0", "-1"}},
    {"{\"run\":{\"seed\":1.5}}", {"run.seed", "integer from 0", "1.5"}},
    {"{\"run\":{\"seed\":18446744073709551616}}", {"run.seed", "18446744073709551615"}},
    {"{\"run\":{\"dir\":7}}", {"run.dir", "text", "7"}},
    {"{\"run\":{\"dir\":[\"runs\"]}}", {"run.dir", "text", "[\"runs\"]"}},
    {"{\"$schema\":5}", {"\"$schema\""}},
    {"{\"run\":{\"$schema\":\"x\"}}", {"\"run.$schema\""}},
    {"{\"optim\":{\"learning_rate\":\"6e-4\"}}", {"optim.learning_rate", "number", "\"6e-4\""}},
    {"{\"optim\":{\"learning_rate\":false}}", {"optim.learning_rate", "a number in [0, 1000]", "false"}},
    {"{\"loss_scale\":{\"dynamic\":1}}", {"loss_scale.dynamic", "true or false", "1"}},
    {"{\"loss_scale\":{\"dynamic\":\"yes\"}}", {"loss_scale.dynamic", "true or false", "\"yes\""}},
    {"{\"train\":{\"precision\":32}}", {"train.precision", "fp32|bf16|fp16|fp8", "32"}},
    // Out of range.
    {"{\"model\":{\"n_layer\":0}}", {"model.n_layer", "[1, 10000]", "0"}},
    {"{\"model\":{\"n_layer\":-12}}", {"model.n_layer", "[1, 10000]", "-12"}},
    {"{\"model\":{\"n_embd\":4294967297}}", {"model.n_embd", "[1, 65536]", "4294967297"}},
    {"{\"model\":{\"vocab_size\":0}}", {"model.vocab_size", "0"}},
    {"{\"train\":{\"max_steps\":2147483648}}", {"train.max_steps", "2147483648"}},
    {"{\"train\":{\"max_steps\":18446744073709551615}}", {"train.max_steps", "18446744073709551615"}},
    {"{\"train\":{\"batch_size\":-1}}", {"train.batch_size", "[0, 1048576]"}},
    {"{\"train\":{\"head_rows\":-1}}", {"train.head_rows", "[0, 2147483647]"}},
    {"{\"train\":{\"precision\":\"fp4\"}}", {"train.precision", "fp32|bf16|fp16|fp8", "\"fp4\""}},
    {"{\"train\":{\"recompute\":\"all\"}}", {"train.recompute", "none|gelu|norm|block", "\"all\""}},
    {"{\"optim\":{\"name\":\"adamx\"}}", {"optim.name", "adamw|adam|sgd", "\"adamx\""}},
    {"{\"optim\":{\"name\":\"\"}}", {"optim.name", "adamw|adam|sgd", "\"\""}},
    {"{\"optim\":{\"learning_rate\":-0.1}}", {"optim.learning_rate", "[0, 1000]", "-0.1"}},
    {"{\"optim\":{\"beta1\":1}}", {"optim.beta1", "[0, 0.999999]", "1"}},
    {"{\"optim\":{\"beta2\":1.0}}", {"optim.beta2", "[0, 0.999999]", "1.0"}},
    {"{\"optim\":{\"eps\":0}}", {"optim.eps", "[1e-30, 1]", "0"}},
    {"{\"optim\":{\"weight_decay\":-1}}", {"optim.weight_decay", "-1"}},
    {"{\"optim\":{\"grad_clip\":-1}}", {"optim.grad_clip", "-1"}},
    {"{\"schedule\":{\"name\":\"cosin\"}}", {"schedule.name", "cosine|linear|wsd|constant|cyclic", "\"cosin\""}},
    {"{\"schedule\":{\"final_lr_fraction\":1.01}}", {"schedule.final_lr_fraction", "[0, 1]", "1.01"}},
    {"{\"schedule\":{\"cooldown_fraction\":-0.1}}", {"schedule.cooldown_fraction", "-0.1"}},
    {"{\"schedule\":{\"cycle_steps\":1}}", {"schedule.cycle_steps", "1"}},
    {"{\"loss_scale\":{\"initial\":0}}", {"loss_scale.initial", "0"}},
    {"{\"loss_scale\":{\"growth_factor\":1}}", {"loss_scale.growth_factor", "[1.001, 65536]"}},
    {"{\"loss_scale\":{\"backoff_factor\":1}}", {"loss_scale.backoff_factor", "[0.001, 0.999]"}},
    {"{\"loss_scale\":{\"hysteresis\":0}}", {"loss_scale.hysteresis", "0"}},
    {"{\"checkpoint\":{\"keep\":0}}", {"checkpoint.keep", "0"}},
    {"{\"sample\":{\"temperature\":-1}}", {"sample.temperature", "-1"}},
    {"{\"log\":{\"every_steps\":0}}", {"log.every_steps", "0"}},
    {"{\"run\":{\"dir\":\"\"}}", {"run.dir", "1 to 4096 bytes"}},
    {"{\"run\":{\"dir\":\"a\\u0000b\"}}", {"run.dir", "without NUL"}},
    {"{\"data\":{\"train\":\"" + std::string(4097, 'x') + "\"}}", {"data.train", "4096"}},
    {"{\"data\":{\"train\":\"\"}}", {"data.train"}},
    // Keys that contradict each other.
    {"{\"model\":{\"n_head\":7}}", {"model.n_embd (768)", "model.n_head (7)"}},
    {"{\"model\":{\"n_positions\":512}}", {"train.seq_len (1024)", "model.n_positions (512)"}},
    {"{\"eval\":{\"stride\":1025}}", {"eval.stride (1025)", "train.seq_len (1024)"}},
    {"{\"sample\":{\"top_k\":50258}}", {"sample.top_k (50258)", "model.vocab_size (50257)"}},
    {"{\"train\":{\"total_batch_tokens\":500000}}",
     {"train.total_batch_tokens (500000)", "train.batch_size (16)", "train.seq_len (1024)", "ranks (1)", "16384",
      "491520 and 507904"}},
    {"{\"train\":{\"batch_size\":1048576,\"seq_len\":16777216},\"model\":{\"n_positions\":16777216}}",
     {"17592186044416"}},
    {"{\"train\":{\"total_batch_tokens\":1}}", {"train.total_batch_tokens (1)", "the nearest valid value is 16384"}},
    {"{\"train\":{\"batch_size\":1048576}}", {"train.batch_size (1048576)", "1073741824"}},
    {R"({"train":{"batch_ramp":[{"until_step":9,"total_batch_tokens":50000}]}})",
     {"train.batch_ramp: total_batch_tokens until step 9 (50000)", "train.batch_size (16)", "train.seq_len (1024)",
      "ranks (1)", "16384", "49152 and 65536"}},
    {R"({"train":{"batch_ramp":[{"until_step":9,"total_batch_tokens":16384},
                                {"until_step":19073,"total_batch_tokens":32768}]}})",
     {"train.batch_ramp: until_step 19073 must be above the previous one (9) and below train.max_steps (19073)"}},
    {"{\"train\":{\"max_steps\":699}}", {"schedule.warmup_steps (700)", "train.max_steps (699)"}},
    {"{\"schedule\":{\"name\":\"wsd\",\"warmup_steps\":15259}}",
     {"schedule.warmup_steps (15259)", "schedule.cooldown_fraction 0.2", "3815 steps", "train.max_steps (19073)"}},
    {"{\"train\":{\"max_steps\":0}}", {"train.max_steps", "train.max_epochs", "train.max_minutes"}},
    {"{\"train\":{\"max_minutes\":5}}", {"train.max_minutes (5)", "schedule.name", "\"wsd\"", "\"cosine\""}},
    {"{\"eval\":{\"patience\":2,\"every_steps\":0}}", {"eval.patience", "eval.every_steps"}},
    {"{\"checkpoint\":{\"keep_best\":true},\"data\":{\"val\":\"\"}}", {"checkpoint.keep_best", "data.val"}},
    {"{\"train\":{\"precision\":\"fp16\"}}", {"train.precision \"fp16\"", "loss_scale.dynamic"}},
    {"{\"loss_scale\":{\"dynamic\":true,\"minimum\":2,\"initial\":1}}",
     {"loss_scale.minimum (2)", "loss_scale.initial (1)"}},
};

}  // namespace

TEST_CASE("a bad configuration is rejected with the file, the key and the value", "[config]") {
    for (const BadText& bad : kBadTexts) {
        INFO(bad.text.substr(0, 100));
        const std::string sentence = expect_error(Exit::config, {"bad.json"}, [&] { parse_and_check(bad.text); });
        for (const std::string& word : bad.words) {
            INFO(sentence << "\nexpected words: " << word);
            CHECK(sentence.find(word) != std::string::npos);
        }
        CHECK(sentence.size() < 400);
    }
}

TEST_CASE("--set takes JSON or bare words and rejects what a file may not contain", "[config]") {
    Config config;
    for (const char* assignment : {"optim.learning_rate=3e-4", "train.precision=fp32", "run.dir=runs/a=b",
                                   "model.init_from=\"gpt2\"", "loss_scale.dynamic=true", "data.val=",
                                   "run.seed=18446744073709551615", "sample.prompt=12", "optim.weight_decay=0"})
        override_config(config, assignment);
    CHECK(config.optim.learning_rate == 3e-4);
    CHECK(config.train.precision == Precision::fp32);
    CHECK(config.run.dir == "runs/a=b");
    CHECK(config.model.init_from == "gpt2");
    CHECK(config.loss_scale.dynamic);
    CHECK(config.data.val.empty());
    CHECK(config.run.seed == UINT64_MAX);
    CHECK(config.sample.prompt == "12");
    CHECK(config.optim.weight_decay == 0);

    struct BadAssignment {
        const char* text;
        Exit code;
        const char* word;
    };
    for (const BadAssignment& bad : std::initializer_list<BadAssignment>{
             {"optim.learning_rate", Exit::usage, "optim.learning_rate"},
             {"", Exit::usage, "section.key=value"},
             {"=", Exit::config, "\"\""},
             {"optim=adamw", Exit::config, "optim"},
             {"optim.lr=1", Exit::config, "optim.lr"},
             {"optim.learning_rate=nan", Exit::config, "optim.learning_rate must be a number in [0, 1000], is \"nan\""},
             {"optim.learning_rate=1e400", Exit::config, "optim.learning_rate must be a number in [0, 1000], is"},
             {"optim.learning_rate=", Exit::config, "optim.learning_rate must be a number in [0, 1000], is \"\""},
             {"optim.beta1=2", Exit::config, "optim.beta1 must be a number in [0, 0.999999], is 2"},
             {"train.max_steps=1.5", Exit::config, "train.max_steps must be an integer"},
             {"train.precision=fp64", Exit::config, "train.precision must be fp32|bf16|fp16|fp8, is \"fp64\""},
             {"loss_scale.dynamic=yes", Exit::config, "loss_scale.dynamic must be true or false"},
             {"run.dir=", Exit::config, "run.dir"},
             {"run.dir=a\xff", Exit::config, "run.dir"}}) {
        INFO(bad.text);
        const Config before = config;
        expect_error(bad.code, {"--set", bad.word}, [&] { override_config(config, bad.text); });
        CHECK(config_json(config) == config_json(before));
    }
}

TEST_CASE("a configuration file is read, overridden and checked without further changes", "[config]") {
    TemporaryDirectory directory;
    const std::string path = directory / "run.json";
    std::ofstream(path) << R"({"train": {"batch_size": 4, "seq_len": 64, "total_batch_tokens": 1536}})";
    const Config config = load_config(path, {"train.batch_size=2", "train.max_steps=800"}, 3);
    CHECK(config.train.batch_size == 2);
    CHECK(config.train.max_steps == 800);
    CHECK(micro_steps(config, 3, 1) == 4);
    CHECK(config.model.n_layer == Config().model.n_layer);
    CHECK(config.train.head_rows == 128);  // resolved, and not from the file's batch
    CHECK(load_config(path, {"train.batch_size=2", "train.head_rows=7"}, 3).train.head_rows == 7);

    expect_error(Exit::config, {path, "ranks (5)", "640", "1280 and 1920"},
                 [&] { load_config(path, {"train.batch_size=2"}, 5); });
    expect_error(Exit::no_input, {directory / "absent.json"}, [&] { load_config(directory / "absent.json", {}, 1); });
    expect_error(Exit::no_input, {directory.path(), "directory"}, [&] { load_config(directory.path(), {}, 1); });
    std::ofstream(directory / "huge.json") << std::string(2 << 20, ' ');
    expect_error(Exit::data, {"huge.json", "2097152"}, [&] { load_config(directory / "huge.json", {}, 1); });
}

TEST_CASE("head_rows defaults to the rows of a micro-step, at most 8192", "[config]") {
    CHECK(default_head_rows(4, 64) == 256);
    CHECK(default_head_rows(8, 1024) == 8192);
    CHECK(default_head_rows(64, 1024) == 8192);
    CHECK(default_head_rows(1 << 20, 1 << 24) == 8192);  // the product exceeds the range of int
    // A run's directory and checkpoints contain resolved values: no 0 whose default could change later.
    TemporaryDirectory directory;
    std::ofstream(directory / "run.json") << "{}";
    const Config config = load_config(directory / "run.json", {}, 1);
    CHECK(parse_config(config_json(config), "printed").train.head_rows == 8192);
}

TEST_CASE("printing a configuration and parsing it gives the same text", "[config]") {
    Config config;
    config.run.seed = UINT64_MAX;
    config.run.dir = "d\u00e9p\u00f4t/\"quoted\"\\\n";
    config.optim.learning_rate = 0.1 + 0.2;
    config.optim.eps = 1.0 / 3e8;
    config.schedule.final_lr_fraction = 5e-324;
    config.train.precision = Precision::fp16;
    config.train.total_batch_tokens = 2147483647;
    for (const Config& printed_one : {Config(), config}) {
        const std::string text = config_json(printed_one);
        const Config parsed = parse_config(text, "printed");
        CHECK(config_json(parsed) == text);
        CHECK(config_digest(parsed) == config_digest(printed_one));
        CHECK(config_differences(parsed, printed_one).empty());
    }
    CHECK(parse_config(config_json(config), "printed").optim.learning_rate == 0.1 + 0.2);
    CHECK(config_json(parse_config("{}", "empty object")) == config_json(Config()));
    CHECK(config_json(parse_config(R"({"$schema": "train_gpt.schema.json"})", "editor's")) == config_json(Config()));
}

TEST_CASE("options of earlier versions are ignored", "[config]") {
    const std::string text =
        R"({"cost":{"price_per_hour":2.5,"co2_g_per_kwh":300},"log":{"terminal":"live"},"run":{"seed":7}})";
    CHECK(parse_config(text, "old").run.seed == 7);
    for (const std::string key : {"cost.price_per_hour", "log.terminal"})
        expect_error(Exit::config, {"--set", "\"" + key + "\""}, [&] {
            Config config;
            override_config(config, key + "=2.5");
        });
}

TEST_CASE("every option has a unique key, help, and a default that is allowed", "[config]") {
    Config config;
    std::set<std::string> keys;
    std::set<const void*> places;
    for (const Option& option : option_table(config)) {
        INFO(option.key);
        CHECK(keys.insert(option.key).second);
        CHECK(places.insert(std::visit([](auto* value) -> const void* { return value; }, option.value)).second);
        CHECK(std::count(option.key, option.key + std::strlen(option.key), '.') == 1);
        CHECK(std::strlen(option.help.c_str()) > 5);
        CHECK_FALSE(allowed_values(option).empty());
        CHECK_NOTHROW(assign_option(option, option_value(option), "default"));
        CHECK(("\n" + config_help()).find("\n"s + option.key + " ") != std::string::npos);
        CHECK(config_markdown().find("| `"s + option.key + "` |") != std::string::npos);
    }
    CHECK_NOTHROW(check_config(config, "defaults", 1));
}

TEST_CASE("the ends of every range are allowed, and values beyond them are not", "[config]") {
    Config config;
    for (const Option& option : option_table(config)) {
        INFO(option.key);
        const bool is_integer =
            std::holds_alternative<int*>(option.value) || std::holds_alternative<int64_t*>(option.value);
        if (!is_integer && !std::holds_alternative<double*>(option.value)) continue;
        auto assign = [&](double x) {
            assign_option(option, is_integer ? nlohmann::ordered_json(int64_t(x)) : nlohmann::ordered_json(x), "range");
        };
        const auto [low, high] = std::pair(option.allowed.low, option.allowed.high);
        REQUIRE(std::isfinite(low));
        REQUIRE(std::isfinite(high));
        CHECK_NOTHROW(assign(low));
        CHECK_NOTHROW(assign(high));
        CHECK_THROWS_AS(assign(is_integer ? low - 1 : std::nextafter(low, -1e300)), Error);
        CHECK_THROWS_AS(assign(is_integer ? high + 1 : std::nextafter(high, 1e300)), Error);
        if (!is_integer) CHECK_THROWS_AS(assign(std::nan("")), Error);
    }
}

TEST_CASE("optim.name sets the defaults of the keys that the optimizer reads", "[config]") {
    const auto beta2 = [](const char* json, const std::vector<std::string>& overrides = {}) {
        return parse_config(json, "test", overrides).optim.beta2;
    };
    CHECK(beta2("{}") == 0.95);
    CHECK(beta2(R"({"optim": {"name": "lion"}})") == 0.99);
    CHECK(beta2(R"({"optim": {"beta2": 0.5, "name": "lion"}})") == 0.5);
    CHECK(beta2(R"({"optim": {"name": "lion"}})", {"optim.name=adam"}) == 0.999);
    CHECK(beta2(R"({"optim": {"name": "lion", "beta2": 0.5}})", {"optim.name=adam"}) == 0.5);
    Config config;
    override_config(config, "optim.name=adagrad");
    CHECK(config.optim.eps == 1e-10);
    CHECK(config.optim.weight_decay == 0.1);  // every optimizer reads it
    CHECK(changed_settings(config) == std::vector<std::string>{"optim.name=\"adagrad\""});
    CHECK(parse_config(config_json(config), "test").optim.eps == 1e-10);
    CHECK(parse_config(changed_config_json(config), "test").optim.eps == 1e-10);
}

TEST_CASE("optim.groups is a list of tensors with their settings", "[config]") {
    const auto groups_of = [](const std::string& groups) {
        return parse_config("{\"optim\": {\"groups\": " + groups + "}}", "test").optim.groups;
    };
    CHECK(groups_of("[]").empty());
    const TensorGroups groups = groups_of(R"([{"tensors": "embedding", "lr_scale": 2},
                                              {"tensors": "h.*.fc.weight", "weight_decay": 0},
                                              {"tensors": "vector", "beta1": 0.8, "beta2": 0.99},
                                              {"tensors": "matrix", "warmup_steps": 0, "final_lr_fraction": 0.5,
                                               "cooldown_power": 2}])");
    REQUIRE(groups == TensorGroups{{"embedding", 2, -1},
                                   {"h.*.fc.weight", 1, 0},
                                   {"vector", 1, -1, 0.8, 0.99},
                                   {"matrix", 1, -1, -1, -1, 0, 0.5, 2}});
    Config config;
    config.optim.groups = groups;
    CHECK(parse_config(config_json(config), "test").optim.groups == groups);
    for (const char* wrong :
         {"{}", "\"head\"", "[1]", "[{}]", "[{\"tensors\": \"\"}]", "[{\"tensors\": 1}]",
          "[{\"tensors\": \"head\", \"rate\": 1}]", "[{\"tensors\": \"head\", \"lr_scale\": \"1\"}]",
          "[{\"tensors\": \"head\", \"lr_scale\": -1}]", "[{\"tensors\": \"head\", \"beta2\": 1}]",
          "[{\"lr_scale\": 1}]", "[{\"tensors\": \"head\", \"warmup_steps\": 1.5}]",
          "[{\"tensors\": \"head\", \"cooldown_power\": 0}]"}) {
        INFO(wrong);
        CHECK_THROWS_AS(groups_of(wrong), Error);
    }
}

TEST_CASE("digest and differences cover exactly the options that change a run's result", "[config]") {
    Config before, after;
    for (const Option& option : option_table(after)) {
        INFO(option.key);
        // The spike threshold and the rollback settings change nothing as long as there is no rollback.
        const bool matters_after_spikes =
            option.key == "train.spike_deviations"s || option.key == "checkpoint.every_steps"s;
        before.train.on_spike = matters_after_spikes ? OnSpike::rollback : OnSpike::warn;
        after = before;
        auto change = []<class T>(T* value) {
            if constexpr (std::is_same_v<T, bool>)
                *value = !*value;
            else if constexpr (std::is_same_v<T, std::string>)
                *value += "x";
            else if constexpr (std::is_same_v<T, DataParts>)
                value->push_back({"x", 0.5});
            else if constexpr (std::is_same_v<T, TensorGroups>)
                value->push_back({.tensors = "vector", .lr_scale = 2});
            else if constexpr (std::is_same_v<T, Ramp>)
                value->push_back({7, 5});
            else if constexpr (std::is_same_v<T, std::vector<int>>)
                value->push_back(7);
            else if constexpr (std::is_enum_v<T>)
                *value = T(*value == T(0));
            else
                *value = *value * 2 + 3;
        };
        std::visit(change, option.value);
        const bool counts = option.effect == Effect::result;
        const auto differences = config_differences(before, after);
        CHECK((config_digest(before) != config_digest(after)) == counts);
        REQUIRE(differences.size() == size_t(counts));
        if (counts) CHECK(differences[0].starts_with(option.key + ": "s));
    }
    before = after = Config();
    after.train.spike_deviations = 5;
    after.checkpoint.every_steps = 7;
    CHECK(config_digest(before) == config_digest(after));
    CHECK(config_differences(before, after).empty());
    after.optim.learning_rate = 3e-4;
    after.schedule.name = LrSchedule::wsd;
    after.run.dir = "elsewhere";
    CHECK(config_differences(before, after) ==
          std::vector<std::string>{"optim.learning_rate: 0.0006 -> 0.0003", "schedule.name: \"cosine\" -> \"wsd\""});
    CHECK(config_digest(before).size() == 16);
}

TEST_CASE("options that do not change a resumed run's result are not in the digest", "[config]") {
    Config config;
    for (const Option& option : option_table(config)) {
        INFO(option.key);
        const std::string section = std::string(option.key).substr(0, std::string(option.key).find('.'));
        static const std::set<std::string> kObservers = {"data", "checkpoint", "eval", "sample", "log", "offload"};
        static const std::set<std::string> kKeys = {"run.dir",
                                                    "model.family",
                                                    "train.recompute",
                                                    "train.check_replicas_every",
                                                    "device.graphs",
                                                    "device.debug_sync",
                                                    "parallel.zero_stage",
                                                    "parallel.tensor",
                                                    "parallel.auto",
                                                    "parallel.context",
                                                    "parallel.pipeline",
                                                    "parallel.pipeline_schedule",
                                                    "parallel.pipeline_chunks",
                                                    "parallel.pipeline_layers",
                                                    "parallel.start_timeout_s",
                                                    "parallel.silence_s",
                                                    "parallel.step_timeout_s",
                                                    "device.kernel_check_s"};
        static const std::set<std::string> kEffective = {"eval.patience", "data.document_mask", "data.document_token",
                                                         "checkpoint.every_steps"};
        const bool is_effective = kEffective.count(option.key);
        const bool is_observer = (kObservers.count(section) && !is_effective) || kKeys.count(option.key);
        CHECK((option.effect == Effect::none) == is_observer);
    }
}

TEST_CASE("the nearest name is the one with the fewest changes", "[config]") {
    CHECK(nearest_name("trian", {"plan", "train", "sample"}) == "train");
    CHECK(nearest_name("exprt", {"import", "export"}) == "export");
    CHECK(nearest_name("abc", {"xyz", "uvw"}).empty());
    CHECK(nearest_name("ab", {"ax", "ay"}) == "ax");
    CHECK(nearest_name("abcd", {"abxy", "abcx", "bcd", "a"}) == "abcx");
    CHECK(nearest_name("abcd", {"abcdefg", "abcdef", "xyz"}) == "abcdef");
    CHECK(nearest_name("", {"train"}).empty());
    CHECK(nearest_name(std::string(100000, 'a'), {"train"}).empty());
}

TEST_CASE("all contradictions of a configuration are reported at once", "[config]") {
    Config config;
    config.train.seq_len = 2048;
    config.train.precision = Precision::fp16;
    config.checkpoint.keep_best = true;
    config.eval.every_steps = 0;
    expect_error(Exit::config,
                 {"x.json: train.seq_len (2048) must not be larger than model.n_positions (1024); train.precision",
                  "; checkpoint.keep_best needs validations"},
                 [&] { check_config(config, "x.json", 1); });
}

TEST_CASE("a batch size of 0 divides the tokens of a step among the ranks", "[config]") {
    Config config;
    config.train.seq_len = 64;
    config.train.total_batch_tokens = 64 * 24;
    CHECK(largest_batch_size(config, 1, kMaxDefaultBatch) == 8);
    CHECK(largest_batch_size(config, 2, kMaxDefaultBatch) == 6);
    CHECK(largest_batch_size(config, 4, kMaxDefaultBatch) == 6);
    CHECK(largest_batch_size(config, 12, kMaxDefaultBatch) == 2);
    CHECK(largest_batch_size(config, 5, kMaxDefaultBatch) == 0);
    config.train.batch_size = 16;
    expect_error(Exit::config, {"or set train.batch_size to 12"}, [&] { check_config(config, "x.json", 1); });
}
