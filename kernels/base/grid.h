// The grid of a run's ranks: data x tensor. Ranks along `tensor` divide each layer and are neighbors, so that their
// traffic, the largest, stays within a node; ranks along `data` compute different samples.
#pragma once

#include <string>

struct Grid {
    int data = 1, tensor = 1;  // ranks along each dimension

    struct Place {
        int data = 0, tensor = 0;
    };
    int size() const { return data * tensor; }
    Place place_of(int rank) const { return {rank / tensor, rank % tensor}; }
    // " (data 1, tensor 0)", or empty if there is only one dimension, whose coordinate is the rank.
    std::string text_of(int rank) const {
        const Place place = place_of(rank);
        return tensor == 1 ? ""
                           : " (data " + std::to_string(place.data) + ", tensor " + std::to_string(place.tensor) + ")";
    }
};
