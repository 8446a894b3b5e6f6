// Which ranks work together: the job's ranks as a grid of pipeline x data x expert x tensor parallel degrees.
#pragma once

#include <memory>

#include "zc/comm/communicator.h"

namespace zc::comm {

// The groups a rank belongs to. Its members differ in the named coordinates only.
enum class Role {
  kShard,        // data and expert: replicas of a dense parameter; its state is sharded over them
  kExpertShard,  // data: replicas of an expert's parameters
  kPipe,
  kExpert,
  kTensor,
  kModel,  // pipeline, expert and tensor: together they hold one copy of the model
};

// rank = ((pipe * dp + data) * ep + expert) * tp + tensor: tensor-parallel ranks are neighbours, stages far apart.
struct Topology {
  int pp = 1, dp = 1, ep = 1, tp = 1;

  struct Coordinates {
    int pipe = 0, data = 0, expert = 0, tensor = 0;
    friend bool operator==(const Coordinates&, const Coordinates&) = default;
  };

  int size() const { return pp * dp * ep * tp; }

  // Throws kConfig when a degree is below 1 or the degrees do not multiply to world_size.
  void check(int world_size) const;

  Coordinates coordinates(int rank) const;

  // Equal for the ranks of one group of `role`; groups of a role are numbered from 0.
  int group_of(Role role, int rank) const;

  // This rank's group of `role`, in rank order. Collective over `world`.
  std::shared_ptr<Communicator> make_group(Communicator& world, Role role) const;
};

}  // namespace zc::comm
