// Fused optimizers over shards: turns hyperparameters and step counts into the scalars that kernels read, and runs
// the kernels over a bucket's pieces.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "zc/device/kernels.h"

namespace zc::optim {

// Hyperparameters of one parameter group.
using Hyper = std::variant<math::AdamHyper, math::SgdHyper, math::LionHyper, math::AdagradHyper, math::ForeignHyper>;

// fp32 values an optimizer keeps for each parameter element, besides the parameter.
int num_states(std::span<const Hyper> groups);

// All numbers in it, to compare those of ranks.
std::vector<double> values(const Hyper& hyper);

class Optimizer {
 public:
  // group_of: the group of each slot (parameter). All groups must be of one kind.
  Optimizer(std::vector<Hyper> groups, std::vector<int> group_of);

  int num_states() const { return num_states_; }
  std::span<const std::int64_t> steps() const { return steps_; }  // updates made so far, a slot

  void set_steps(std::span<const std::int64_t> steps);

  // Hyperparameters may change between steps, the kind and the number of states may not.
  void set_groups(std::span<const Hyper> groups);

  // Begins a step: counts it for every slot with used[slot] != 0 and computes the scalars. Other slots are left out of
  // update() until the next begin_step: no decay, their count stands, as in torch.
  void begin_step(std::span<const std::uint8_t> used);

  // Updates the pieces of one shard. step: as for Kernels::adam.
  void update(device::Kernels& kernels, std::span<const device::Piece> pieces, const math::StepScalars& step,
              const device::OptimizerBuffers& buffers, device::Stream stream);

 private:
  std::vector<Hyper> groups_;
  std::vector<int> group_of_;
  int num_states_;
  std::vector<std::int64_t> steps_;
  std::vector<std::uint8_t> used_;
  bool all_used_ = true;
  std::vector<math::AdamScalars> adam_;  // one a slot, as the others; those of this kind are used
  std::vector<math::SgdScalars> sgd_;
  std::vector<math::LionScalars> lion_;
  std::vector<math::AdagradScalars> adagrad_;
  std::vector<device::Piece> used_pieces_;  // reused by update()
};

}  // namespace zc::optim
