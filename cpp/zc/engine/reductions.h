// Small reductions over ranks that do not depend on the order or the number of ranks.
#pragma once

#include "zc/comm/communicator.h"

namespace zc::engine {

// The mean of `value` over the ranks with counts = true: the exact sum, rounded once, over their number. NaN when a
// counted value is not finite or nobody counts. Collective; blocks.
double exact_mean(comm::Communicator& comm, double value, bool counts);

}  // namespace zc::engine
