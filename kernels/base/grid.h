// The grid of a run's ranks: pipeline x data x tensor. Ranks along `tensor` divide each layer and are neighbors, so
// that their traffic, the largest, stays within a node; ranks along `data` compute different samples; ranks along
// `pipeline` have different layers, and are the farthest apart, because their traffic is the smallest.
#pragma once

#include <string>

struct Grid {
    int data = 1, tensor = 1, pipeline = 1;  // ranks along each dimension

    struct Place {
        int data = 0, tensor = 0, pipeline = 0;
        bool operator==(const Place&) const = default;
    };
    int size() const { return pipeline * data * tensor; }
    Place place_of(int rank) const { return {rank / tensor % data, rank % tensor, rank / (tensor * data)}; }
    int rank_of(const Place& place) const { return (place.pipeline * data + place.data) * tensor + place.tensor; }
    // " (data 1, pipeline 0, tensor 0)" with the dimensions of more than one rank; empty if only data has several,
    // whose coordinate is the rank.
    std::string text_of(int rank) const {
        if (tensor == 1 && pipeline == 1) return "";
        const Place place = place_of(rank);
        std::string text = " (data " + std::to_string(place.data);
        if (pipeline > 1) text += ", pipeline " + std::to_string(place.pipeline);
        if (tensor > 1) text += ", tensor " + std::to_string(place.tensor);
        return text + ")";
    }
};
