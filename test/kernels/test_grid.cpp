#include "kernels/base/grid.h"

#include "test/support/catch.h"

TEST_CASE("grid: neighbors divide the layers, and each place has one rank") {
    const Grid grid{.data = 3, .tensor = 4};
    REQUIRE(grid.size() == 12);
    for (int data = 0; data < 3; data++)
        for (int tensor = 0; tensor < 4; tensor++) {
            const Grid::Place place = grid.place_of(4 * data + tensor);
            CHECK(place.data == data);
            CHECK(place.tensor == tensor);
        }
}
