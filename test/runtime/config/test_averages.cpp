// The weights of steps in averages of the masters.
#include "runtime/config/schedule.h"
#include "test/support/catch.h"

TEST_CASE("the weights of averages", "[schedule]") {
    Config config;
    const RunLength length{.end_step = 40, .cooldown_begin = 30};
    config.average.kind = AverageKind::exponential;
    config.average.decay = 0.75;
    CHECK(average_weight(config, length, 1) == 1);
    for (const int step : {2, 3, 40}) CHECK(average_weight(config, length, step) == 0.25);

    config.average.kind = AverageKind::tail;
    config.average.tail_fraction = 0.1;
    for (const int step : {1, 20, 36, 37}) CHECK(average_weight(config, length, step) == 1);
    CHECK(average_weight(config, length, 38) == 1.0 / 2);
    CHECK(average_weight(config, length, 39) == 1.0 / 3);
    CHECK(average_weight(config, length, 40) == 1.0 / 4);
    CHECK(average_weight(config, {.end_step = 0, .cooldown_begin = 0}, 38) == 1);  // the end is not known yet
    config.average.tail_fraction = 0;
    CHECK(average_weight(config, length, 40) == 1);
    config.average.tail_fraction = 1;
    CHECK(average_weight(config, length, 40) == 1.0 / 40);
}
