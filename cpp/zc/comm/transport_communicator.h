// Collectives over any transport.
#pragma once

#include <memory>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// The communicator of all ranks that `transport` connects. Starts the rank's progress thread. Without a doorbell it
// alone calls the transport; with one, whoever drives does (endpoint.h).
std::shared_ptr<Communicator> make_transport_communicator(std::unique_ptr<Transport> transport, Options options = {});

}  // namespace zc::comm
