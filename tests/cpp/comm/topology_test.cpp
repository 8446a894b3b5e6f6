#include "zc/comm/topology.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "zc/base/error.h"

namespace zc::comm {
namespace {

TEST(TopologyTest, TensorRanksAreNeighboursAndStagesFarApart) {
  const Topology topology{.pp = 2, .dp = 3, .ep = 2, .tp = 4};
  EXPECT_EQ(topology.size(), 48);
  EXPECT_EQ(topology.coordinates(0), (Topology::Coordinates{0, 0, 0, 0}));
  EXPECT_EQ(topology.coordinates(3), (Topology::Coordinates{0, 0, 0, 3}));
  EXPECT_EQ(topology.coordinates(4), (Topology::Coordinates{0, 0, 1, 0}));
  EXPECT_EQ(topology.coordinates(8), (Topology::Coordinates{0, 1, 0, 0}));
  EXPECT_EQ(topology.coordinates(24), (Topology::Coordinates{1, 0, 0, 0}));
}

TEST(TopologyTest, GroupsOfARolePartitionTheRanks) {
  const Topology topology{.pp = 2, .dp = 3, .ep = 2, .tp = 4};
  const std::pair<Role, std::size_t> sizes[] = {{Role::kShard, 6},  {Role::kExpertShard, 3}, {Role::kPipe, 2},
                                                {Role::kExpert, 2}, {Role::kTensor, 4},      {Role::kModel, 16}};
  for (const auto& [role, size] : sizes) {
    std::map<int, std::set<int>> groups;
    for (int rank = 0; rank < topology.size(); ++rank) groups[topology.group_of(role, rank)].insert(rank);
    EXPECT_EQ(groups.size(), 48 / size);
    EXPECT_EQ(groups.begin()->first, 0);
    EXPECT_EQ(groups.rbegin()->first, static_cast<int>(48 / size) - 1);
    for (const auto& [group, ranks] : groups) EXPECT_EQ(ranks.size(), size) << "role " << static_cast<int>(role);
  }
}

TEST(TopologyTest, DegreesMustMultiplyToTheWorld) {
  EXPECT_NO_THROW((Topology{.dp = 4}.check(4)));
  EXPECT_THROW((Topology{.dp = 4}.check(3)), Error);
  EXPECT_THROW((Topology{.dp = -4, .tp = -1}.check(4)), Error);
}

}  // namespace
}  // namespace zc::comm
