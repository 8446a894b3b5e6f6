// Ranks that are threads of one process: for tests, and for runs under sanitizers.
#pragma once

#include <memory>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// The ends of a hub of `size` ranks; each may be used by another thread. They share the hub and may outlive each other.
std::vector<std::unique_ptr<Transport>> make_local_transports(int size);

// One communicator a rank, over a hub of their own.
std::vector<std::shared_ptr<Communicator>> make_local_world(int size, Options options = {});

}  // namespace zc::comm
