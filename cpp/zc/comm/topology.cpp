#include "zc/comm/topology.h"

namespace zc::comm {

void Topology::check(int world_size) const {
  ZC_CHECK(pp >= 1 && dp >= 1 && ep >= 1 && tp >= 1 && size() == world_size, kConfig,
           "[topology] parallel degrees do not multiply to the number of ranks: got pipeline ", pp, " x data ", dp,
           " x expert ", ep, " x tensor ", tp, ", expected a product of ", world_size,
           " with every degree at least 1. Change a degree or the number of ranks.");
}

Topology::Coordinates Topology::coordinates(int rank) const {
  return {rank / (dp * ep * tp), rank / (ep * tp) % dp, rank / tp % ep, rank % tp};
}

int Topology::group_of(Role role, int rank) const {
  const auto [pipe, data, expert, tensor] = coordinates(rank);
  switch (role) {
    case Role::kShard:
      return pipe * tp + tensor;
    case Role::kExpertShard:
      return (pipe * ep + expert) * tp + tensor;
    case Role::kPipe:
      return (data * ep + expert) * tp + tensor;
    case Role::kExpert:
      return (pipe * dp + data) * tp + tensor;
    case Role::kTensor:
      return (pipe * dp + data) * ep + expert;
    case Role::kModel:
      return data;
  }
  fail(ErrorKind::kInternal, "[topology] unknown role ", static_cast<int>(role));
}

std::shared_ptr<Communicator> Topology::make_group(Communicator& world, Role role) const {
  check(world.size());
  return world.split(group_of(role, world.rank()), world.rank());
}

}  // namespace zc::comm
