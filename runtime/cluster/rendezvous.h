// How the ranks of a run find each other: all connect to rank 0, which lets in who knows the run's token.
//
// Each side shows that it knows the token by a MAC over nonces that both have drawn just now; the token itself is never
// sent, and what was overheard does not serve again. A stranger (a port scanner, junk bytes, a rank of another run)
// is turned away after 5 s at most, holds no rank's place, and 256 of them at once are as many as are listened to.
// Where the launcher gives no token (Slurm, Kubernetes), the run's id stands in: that keeps runs apart, and does not
// keep out somebody on the network who means harm. What is said after the opening is neither encrypted nor signed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/cluster/place.h"
#include "runtime/cluster/socket.h"

struct Member {
    int rank = 0;
    std::string host;
    int64_t pid = 0;
    std::string text() const;  // "rank 3 on node7 (pid 4242)"
};

// This process.
Member this_member(int rank);

struct Group {
    std::vector<Member> members;          // by rank, the same on every rank
    std::vector<Connection> connections;  // rank 0: by rank, [0] not open; others: one, to rank 0
};

// Hands rank 0's text to every rank, by means that the ranks have already (MPI). Every rank calls it once; `mine` is
// empty except on rank 0.
using Share = std::function<std::string(const std::string& mine)>;

struct OpeningSettings {
    double deadline_s = 300;  // by then all ranks must be there
    std::string listen_host;  // name or address of the interface where rank 0 listens; empty: see open_group()
};

// Rank 0 listens
//   - where start_local_ranks() listens for it already,
//   - else at settings.listen_host,
//   - else at the loopback address, if the launcher says that all ranks are on this host,
//   - else at the address of place.master_host, if that is an address of this machine (a loopback address counts only
//     where it is what the launcher said, not what the name of the machine happens to resolve to),
//   - else at every interface: a service in front of a pod has an address that is not the pod's. With `share` the first
//     address of this machine is taken instead.
// at place.master_port or, with `share`, at a free port that `share` makes known with a fresh token. It stops listening
// once all ranks are there.
//
// Fails on all ranks that are there with the same sentence: Exit::hang when ranks did not come in time, and it says
// which; Exit::config for two that claim one rank, or that count the ranks differently; Exit::peer_lost when a rank
// that was there is gone again. Exit::usage where nothing says where rank 0 is, Exit::os where it cannot listen,
// Exit::again when a signal asks to stop meanwhile. For size 1 there is nothing to open: not to be called.
Group open_group(const Place& place, const OpeningSettings& settings, const Share& share);

// "0-3, 7"
std::string text_of_ranks(const std::vector<int>& ascending);
