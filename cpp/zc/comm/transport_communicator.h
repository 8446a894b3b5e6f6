// Collectives over any transport.
#pragma once

#include <memory>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// The communicator of all ranks that `transport` connects. Starts the rank's progress thread, which from then on is the
// only one to call the transport.
std::shared_ptr<Communicator> make_transport_communicator(std::unique_ptr<Transport> transport, Options options = {});

}  // namespace zc::comm
