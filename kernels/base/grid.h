// The grid of a run's ranks: pipeline x data x context x tensor. Ranks along `tensor` divide each layer and are
// neighbors, so that their traffic, the largest, stays within a node; ranks along `context` divide each sequence; ranks
// along `data` compute different samples; ranks along `pipeline` have different layers, and are the farthest apart,
// because their traffic is the smallest.
#pragma once

#include <string>

struct Grid {
    int data = 1, tensor = 1, pipeline = 1, context = 1;  // ranks along each dimension
    bool operator==(const Grid&) const = default;

    struct Place {
        int data = 0, tensor = 0, pipeline = 0, context = 0;
        bool operator==(const Place&) const = default;
    };
    int size() const { return pipeline * data * context * tensor; }
    Place place_of(int rank) const {
        return {.data = rank / (tensor * context) % data,
                .tensor = rank % tensor,
                .pipeline = rank / (tensor * context * data),
                .context = rank / tensor % context};
    }
    // The ranks that hold the same part of the model, and the number of a rank among them.
    int replicas() const { return data * context; }
    int replica_of(const Place& place) const { return place.data * context + place.context; }
    // " (data 1, pipeline 0, tensor 0)" with the dimensions of more than one rank; empty if only data has several,
    // whose coordinate is the rank.
    std::string text_of(int rank) const {
        if (data == size()) return "";
        const Place place = place_of(rank);
        std::string text = " (data " + std::to_string(place.data);
        if (pipeline > 1) text += ", pipeline " + std::to_string(place.pipeline);
        if (context > 1) text += ", context " + std::to_string(place.context);
        if (tensor > 1) text += ", tensor " + std::to_string(place.tensor);
        return text + ")";
    }
};
