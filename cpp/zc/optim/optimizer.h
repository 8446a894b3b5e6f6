// Fused optimizers over shards: turns hyperparameters and step counts into the scalars that kernels read, and runs
// the kernels over a bucket's pieces.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "zc/device/device.h"
#include "zc/device/transfer.h"

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
  // device: whose kernels update, and must outlive this.
  Optimizer(device::Device& device, std::vector<Hyper> groups, std::vector<Slot> slots);

  int num_states(bool matrices) const { return num_states_[matrices ? 1 : 0]; }
  std::span<const std::int64_t> steps() const { return steps_; }  // updates made so far, a slot

  void set_steps(std::span<const std::int64_t> steps);

  // Hyperparameters may change between steps, the kind and the number of states may not.
  void set_groups(std::span<const Hyper> groups);

  // Begins a step: counts it for every slot with used[slot] != 0, computes the scalars and puts them on their way to
  // the kernels of the stream. Other slots are left out of update() until the next begin_step: no decay, their count
  // stands, as in torch.
  void begin_step(std::span<const std::uint8_t> used, device::Stream stream);

  // Of a matrix that Muon updates.
  int newton_schulz_iterations(int slot) const;
  bool used(int slot) const { return used_[static_cast<std::size_t>(slot)] != 0; }

  // The step turned out to be one that updates nothing: its counts are taken back. Before the next begin_step().
  void undo_step();

  // Updates the pieces of one shard. step: as for Kernels::adam. Matrices: from what orthogonalize() left in
  // buffers.direction; muon_momentum() goes before.
  void update(const device::Pieces& pieces, const math::StepScalars* step, const device::OptimizerBuffers& buffers,
              device::Stream stream);
  void muon_momentum(const device::Pieces& pieces, const math::StepScalars* step,
                     const device::OptimizerBuffers& buffers, device::Stream stream);

 private:
  // One T a slot, written by the host and read by kernels. Empty where no group needs it.
  template <class T>
  class Table {
   public:
    void allocate(device::Device& device, std::size_t num_slots) {
      upload_ = device::Upload(device, static_cast<std::int64_t>(num_slots * sizeof(T)));
      num_slots_ = num_slots;
    }
    void begin() { host_ = num_slots_ > 0 ? reinterpret_cast<T*>(upload_.host()) : nullptr; }
    T& operator[](std::size_t slot) { return host_[slot]; }
    void send(device::Stream stream) {
      if (num_slots_ > 0) there_ = reinterpret_cast<const T*>(upload_.send(stream));
    }
    const T* there() const { return there_; }

   private:
    device::Upload upload_;
    std::size_t num_slots_ = 0;
    T* host_ = nullptr;
    const T* there_ = nullptr;
  };

  device::Device& device_;
  std::vector<Hyper> groups_;
  std::vector<Slot> slots_;
  std::array<int, 2> num_states_;
  std::vector<std::int64_t> steps_;
  std::vector<std::uint8_t> used_;
  Table<std::uint8_t> used_there_;
  Table<math::AdamScalars> adam_;  // those of this kind are used; so with the others
  Table<math::SgdScalars> sgd_;
  Table<math::LionScalars> lion_;
  Table<math::AdagradScalars> adagrad_;
  Table<math::MuonScalars> muon_;
};

}  // namespace zc::optim
