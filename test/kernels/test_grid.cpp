#include "kernels/base/grid.h"
#include "test/support/catch.h"

TEST_CASE("grid: neighbors divide the layers, stages are the farthest apart, and each place has one rank") {
    const Grid grid{.data = 3, .tensor = 4, .pipeline = 2, .context = 5};
    REQUIRE(grid.size() == 120);
    int rank = 0;
    for (int pipeline = 0; pipeline < 2; pipeline++)
        for (int data = 0; data < 3; data++)
            for (int context = 0; context < 5; context++)
                for (int tensor = 0; tensor < 4; tensor++, rank++) {
                    const Grid::Place place{.data = data, .tensor = tensor, .pipeline = pipeline, .context = context};
                    CHECK(grid.place_of(rank) == place);
                    CHECK(grid.replica_of(place) == data * 5 + context);
                }
}

TEST_CASE("grid: messages name the place in the dimensions of several ranks") {
    CHECK(Grid{.data = 4}.text_of(3).empty());
    CHECK(Grid{.data = 2, .tensor = 2}.text_of(3) == " (data 1, tensor 1)");
    CHECK(Grid{.data = 2, .pipeline = 3}.text_of(5) == " (data 1, pipeline 2)");
    CHECK(Grid{.data = 2, .context = 2}.text_of(2) == " (data 1, context 0)");
    CHECK(Grid{.data = 2, .tensor = 2, .pipeline = 2}.text_of(5) == " (data 0, pipeline 1, tensor 1)");
}
