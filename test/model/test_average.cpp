// The average of the weights.
#include <cmath>

#include "model/evaluate.h"
#include "model/gpt.h"
#include "model/plan.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

constexpr std::pair<Dtype, OptimizerDtype> kTypes[] = {
    {Dtype::fp32, OptimizerDtype::fp32}, {Dtype::bf16, OptimizerDtype::fp32}, {Dtype::bf16, OptimizerDtype::bf16}};

struct Averaged {
    GptOptions options;
    Gpt gpt;
    std::vector<int> ids;

    explicit Averaged(Dtype precision, OptimizerDtype master = OptimizerDtype::fp32)
        : options(options_of(precision, master)), gpt(options, comm_single()) {
        gpt.initialize(42);
        ids = nano_tokens(size_t(options.batch) * size_t(options.seq_len) + 1, options.shape.vocab_size);
    }
    static GptOptions options_of(Dtype precision, OptimizerDtype master) {
        GptOptions options = nano_options(precision);
        options.optimizer.master_dtype = master;
        options.averages = true;
        return options;
    }
    double step(int number, double average_weight) {
        gpt.begin_step({.learning_rate = 1e-2, .average_weight = average_weight, .update = number});
        gpt.forward(ids.data());
        gpt.backward(ids.data() + 1, 1.0f / float(ids.size() - 1));
        return gpt.end_step().loss_sum;
    }
    double loss() {
        const auto next = [&]() -> Batch { return {ids.data(), ids.data() + 1}; };
        return evaluate(gpt, 1, next, nullptr).loss;
    }
    std::vector<float> average() const {
        std::vector<NamedTensor> tensors;
        for (const NamedTensor& tensor : gpt.state_tensors())
            if (tensor.name.starts_with("average.")) tensors.push_back(tensor);
        return values_of(tensors);
    }
};

}  // namespace

TEST_CASE("the average has the given weight of each step's masters", "[model]") {
    for (const auto& [precision, master] : kTypes) {
        Averaged run(precision, master);
        std::vector<double> expected;
        for (int number = 1; number <= 6; number++) {
            const double weight = number == 1 ? 1 : 0.25;
            run.step(number, weight);
            const std::vector<float> masters = values_of(run.gpt.master_tensors());
            expected.resize(masters.size());
            for (size_t i = 0; i < masters.size(); i++)
                expected[i] = (1 - weight) * expected[i] + weight * double(masters[i]);
            if (number == 1) CHECK(same_bits(run.average(), masters));
        }
        const std::vector<float> average = run.average();
        REQUIRE(average.size() == expected.size());
        double error = 0, distance = 0;
        const std::vector<float> masters = values_of(run.gpt.master_tensors());
        for (size_t i = 0; i < average.size(); i++) {
            error = std::max(error, std::abs(average[i] - expected[i]) / std::max(std::abs(expected[i]), 1e-3));
            distance = std::max(distance, std::abs(masters[i] - expected[i]));
        }
        CHECK(error < 1e-5);
        CHECK(distance > 1e-3);
    }
}

TEST_CASE("passes use the average between use_average and restore_masters", "[model]") {
    for (const auto& [precision, master] : kTypes) {
        INFO(name_of(precision) << ", masters " << name_of(master));
        Averaged run(precision, master), other(precision);
        for (int number = 1; number <= 4; number++) run.step(number, number == 1 ? 1 : 0.1);
        const std::vector<float> masters = values_of(run.gpt.master_tensors()), average = run.average();
        CHECK(!same_bits(masters, average));
        run.gpt.use_average();
        // Another model with these masters has the same loss.
        size_t begin = 0;
        for (const NamedTensor& tensor : other.gpt.master_tensors()) {
            set_floats(tensor.values, average.data() + begin, tensor.count);
            begin += tensor.count;
        }
        synchronize(Stream{});
        other.gpt.masters_changed();
        const double expected = other.loss();
        CHECK(run.loss() == expected);
        run.gpt.restore_masters();
        CHECK(same_bits(values_of(run.gpt.master_tensors()), masters));
        CHECK(same_bits(run.average(), average));
        CHECK(run.loss() != expected);
    }
}

TEST_CASE("the average is a part of the state and of the plan", "[model]") {
    Averaged run(Dtype::bf16);
    size_t saved = 0;
    for (const NamedTensor& tensor : run.gpt.saved_tensors()) saved += tensor.count * sizeof(float);
    CHECK(saved == saved_bytes(run.options));
    GptOptions without = run.options;
    without.averages = false;
    CHECK(planned_bytes(run.options) - planned_bytes(without) >= run.average().size() * sizeof(float));
    CHECK(saved - saved_bytes(without) == run.average().size() * sizeof(float));
}
