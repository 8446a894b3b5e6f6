#include "zc/engine/reductions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/ranks.h"
#include "zc/base/error.h"

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

TEST(ReductionsTest, WeightsAreAddedUpExactlyWhereThereAreAny) {
  test::run_ranks(3, [](std::shared_ptr<comm::Communicator> comm) {
    const std::vector<Weights> weights = {{{1e300, 0.5}, false}, {{}, false}, {{-0.0, 1.0, 2.0}, false}};
    EXPECT_EQ(sum_weights(*comm, weights[static_cast<std::size_t>(comm->rank())]), 1e300);
    const std::vector<Weights> small = {{{1e16, 1.0}, false}, {{}, false}, {{1.0}, false}};
    EXPECT_EQ(sum_weights(*comm, small[static_cast<std::size_t>(comm->rank())]), 1e16 + 2.0);
    EXPECT_EQ(sum_weights(*comm, {{}, comm->rank() == 1}), std::nullopt);
    EXPECT_THROW(sum_weights(*comm, comm->rank() == 1 ? Weights{{}, true} : Weights{{1.0}, false}), Error);
    EXPECT_THROW(sum_weights(*comm, {{0.0}, false}), Error);
  });
}

}  // namespace
}  // namespace zc::engine
