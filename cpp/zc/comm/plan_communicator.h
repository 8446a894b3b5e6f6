// A rank of a group that does not exist: for engines that are built to see what they would allocate, and never run.
#pragma once

#include <memory>

#include "zc/comm/communicator.h"

namespace zc::comm {

// Rank 0 of `size`. Memory is addresses only (reserve_addresses); a collective throws kInternal.
std::shared_ptr<Communicator> make_plan_communicator(int size);

}  // namespace zc::comm
