// Messages through shared memory between the processes of one node, and memory that they read in place.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// Gives every rank's bytes to every rank, in rank order, as Communicator::gather_bytes does: what ranks need to find
// each other, over whatever connects them already.
using Exchange = std::function<void(std::span<const std::byte> own, std::span<std::byte> all)>;

// Null: at least one rank cannot reach another; *reason says on all ranks which, and why. What decides is whether the
// other's abstract socket can be reached, not what hosts call themselves. Collective; blocks as long as `exchange`
// does.
std::unique_ptr<Transport> connect_shm(int rank, int size, const Exchange& exchange, std::string* reason);

}  // namespace zc::comm
