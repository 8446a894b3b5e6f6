// Small reductions over ranks that do not depend on the order or the number of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/math/exact_sum.h"

namespace zc::engine {

// The mean of `value` over the ranks with counts = true: the exact sum, rounded once, over their number. NaN when a
// counted value is not finite or nobody counts. Collective; blocks.
double exact_mean(comm::Communicator& comm, double value, bool counts);

// What this rank's micro-batches of one step weigh.
struct Weights {
  std::vector<double> given;  // each finite and not negative
  bool missing = false;       // some micro-batch of this rank came without
};

// What ranks tell each other about their weights, for an all-reduce by sum.
inline constexpr std::size_t kWeightWords = math::ExactSum::kNumLimbs + 2;
void write_weights(const Weights& weights, std::span<std::int64_t, kWeightWords> words);

// The sum of all ranks' weights, from the sum of what they told, rounded once; none when no rank gave one. kConfig when
// some micro-batches have a weight and others not, or all weigh nothing.
std::optional<double> total_weight(std::span<const std::int64_t, kWeightWords> words);

// That sum by itself. Collective; blocks.
std::optional<double> sum_weights(comm::Communicator& comm, const Weights& weights);

}  // namespace zc::engine
