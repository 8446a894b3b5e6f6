#include "zc/engine/reductions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/ranks.h"

namespace zc::engine {
namespace {

TEST(ReductionsTest, ExactMeanCountsOnlyWhoCounts) {
  test::run_ranks(4, [](std::shared_ptr<comm::Communicator> comm) {
    const double values[] = {1e300, 1.0, -1e300, 2.0};  // any floating-point order loses the small ones
    EXPECT_EQ(exact_mean(*comm, values[comm->rank()], true), 0.75);
    EXPECT_EQ(exact_mean(*comm, comm->rank() + 1.0, comm->rank() < 3), 2.0);
  });
}

TEST(ReductionsTest, ExactMeanIsNaNWhenAValueIsNotFiniteOrNobodyCounts) {
  test::run_ranks(2, [](std::shared_ptr<comm::Communicator> comm) {
    const double bad = comm->rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
    EXPECT_TRUE(std::isnan(exact_mean(*comm, bad, true)));
    EXPECT_TRUE(std::isnan(exact_mean(*comm, 1.0, false)));
    EXPECT_EQ(exact_mean(*comm, bad, comm->rank() == 0), 1.0);
  });
}

}  // namespace
}  // namespace zc::engine
