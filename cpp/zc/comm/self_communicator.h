// The group of one rank: a collective is done, in the calling thread, when the call returns.
#pragma once

#include <memory>

#include "zc/comm/communicator.h"

namespace zc::comm {

std::shared_ptr<Communicator> make_self_communicator(Options options = {});

}  // namespace zc::comm
