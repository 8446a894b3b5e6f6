#include "zc/engine/reductions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "zc/base/error.h"

namespace zc::engine {

double exact_mean(comm::Communicator& comm, double value, bool counts) {
  constexpr std::size_t kLimbs = math::ExactSum::kNumLimbs;
  math::ExactSum sum;
  if (counts && std::isfinite(value)) sum.add(value);
  sum.normalize();
  std::array<std::int64_t, kLimbs + 2> message{};
  std::copy(sum.limbs().begin(), sum.limbs().end(), message.begin());
  message[kLimbs] = counts;
  message[kLimbs + 1] = counts && !std::isfinite(value);
  comm.all_reduce(message, comm::ReduceOp::kSum, "mean over ranks").wait();
  if (message[kLimbs] == 0 || message[kLimbs + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
  std::copy_n(message.begin(), kLimbs, sum.limbs().begin());
  sum.normalize();
  return sum.to_double() / static_cast<double>(message[kLimbs]);
}

void write_weights(const Weights& weights, std::span<std::int64_t, kWeightWords> words) {
  math::ExactSum sum;
  for (double weight : weights.given) sum.add(weight);
  sum.normalize();
  std::copy(sum.limbs().begin(), sum.limbs().end(), words.begin());
  words[kWeightWords - 2] = weights.given.empty() ? 0 : 1;
  words[kWeightWords - 1] = weights.missing ? 1 : 0;
}

std::optional<double> total_weight(std::span<const std::int64_t, kWeightWords> words) {
  if (words[kWeightWords - 2] == 0) return std::nullopt;
  ZC_CHECK(words[kWeightWords - 1] == 0, kConfig,
           "[engine] backward: got a weight for some micro-batches of this step and none for others, on this rank or "
           "between ranks, expected one for all or for none. Nothing was updated. Pass weight=0 with a second loss of "
           "a micro-batch that has one.");
  math::ExactSum sum;
  std::copy_n(words.begin(), math::ExactSum::kNumLimbs, sum.limbs().begin());
  sum.normalize();
  const double total = sum.to_double();
  ZC_CHECK(total > 0, kConfig,
           "[engine] backward: the weights of this step's micro-batches add up to 0 on all ranks, expected more: the "
           "mean over nothing is not defined. Nothing was updated. Leave batches without tokens out.");
  return total;
}

std::optional<double> sum_weights(comm::Communicator& comm, const Weights& weights) {
  std::array<std::int64_t, kWeightWords> words;
  write_weights(weights, words);
  comm.all_reduce(words, comm::ReduceOp::kSum, "weights of micro-batches").wait();
  return total_weight(words);
}

}  // namespace zc::engine
