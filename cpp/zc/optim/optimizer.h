// Fused optimizers over shards: turns hyperparameters and step counts into the scalars that kernels read, and runs
// the kernels over a bucket's pieces.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "zc/device/kernels.h"

namespace zc::optim {

// Hyperparameters of one parameter group.
using Hyper = std::variant<math::AdamHyper, math::SgdHyper, math::LionHyper, math::AdagradHyper, math::MuonHyper,
                           math::ForeignHyper>;

// fp32 values an optimizer keeps for each element of a parameter, besides that: of the matrices that Muon updates, or
// of all others.
int num_states(std::span<const Hyper> groups, bool matrices = false);

// All numbers in it, to compare those of ranks.
std::vector<double> values(const Hyper& hyper);

class Optimizer {
 public:
  // A parameter. group: -1 where it is not trained. rows_by_columns: of a matrix that Muon updates, else 0.
  struct Slot {
    int group = 0;
    double rows_by_columns = 0;
  };

  // All groups must be of one kind, but for Muon's beside Adam's: Muon's hold the matrices, and them only.
  Optimizer(std::vector<Hyper> groups, std::vector<Slot> slots);

  int num_states(bool matrices) const { return num_states_[matrices ? 1 : 0]; }
  std::span<const std::int64_t> steps() const { return steps_; }  // updates made so far, a slot

  void set_steps(std::span<const std::int64_t> steps);

  // Hyperparameters may change between steps, the kind and the number of states may not.
  void set_groups(std::span<const Hyper> groups);

  // Begins a step: counts it for every slot with used[slot] != 0 and computes the scalars. Other slots are left out of
  // update() until the next begin_step: no decay, their count stands, as in torch.
  void begin_step(std::span<const std::uint8_t> used);

  // Of a matrix that Muon updates.
  int newton_schulz_iterations(int slot) const;
  bool used(int slot) const { return used_[static_cast<std::size_t>(slot)] != 0; }

  // Updates the pieces of one shard. step: as for Kernels::adam. Matrices: from what orthogonalize() left in
  // buffers.direction; muon_momentum() goes before.
  void update(device::Kernels& kernels, std::span<const device::Piece> pieces, const math::StepScalars& step,
              const device::OptimizerBuffers& buffers, device::Stream stream);
  void muon_momentum(device::Kernels& kernels, std::span<const device::Piece> pieces, const math::StepScalars& step,
                     const device::OptimizerBuffers& buffers, device::Stream stream);

 private:
  std::span<const device::Piece> used_pieces(std::span<const device::Piece> pieces);

  std::vector<Hyper> groups_;
  std::vector<Slot> slots_;
  std::array<int, 2> num_states_;
  std::vector<std::int64_t> steps_;
  std::vector<std::uint8_t> used_;
  bool all_used_ = true;
  std::vector<math::AdamScalars> adam_;  // one a slot, as the others; those of this kind are used
  std::vector<math::SgdScalars> sgd_;
  std::vector<math::LionScalars> lion_;
  std::vector<math::AdagradScalars> adagrad_;
  std::vector<math::MuonScalars> muon_;
  std::vector<device::Piece> used_pieces_;  // reused
};

}  // namespace zc::optim
