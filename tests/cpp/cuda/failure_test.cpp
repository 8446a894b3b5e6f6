// What goes wrong with collectives on devices: every rank learns of it in time, nothing waits on a device any more, and
// what was in use lives until it no longer is.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cuda/machine.h"
#include "support/errors.h"
#include "support/limits.h"

namespace zc::cuda {
namespace {

using comm::Communicator;
using comm::kLong;
using comm::milliseconds;
using comm::seconds;
using Clock = std::chrono::steady_clock;
using test::expect_contains;

struct Fate {
  std::string error{};  // of the body's Error; empty when it returned
  ErrorKind kind = ErrorKind::kInternal;
  Clock::duration took{};
};

struct Rank {
  Communicator& comm;
  CudaDevice& device;
  Machine& machine;
  device::Stream stream;
  std::vector<Memory>& held;  // until nothing is left on the stream
};

// What became of each rank.
std::vector<Fate> fates(Machine& machine, milliseconds timeout, const std::function<void(const Rank&)>& body,
                        const char* backend = "nccl") {
  std::vector<Fate> all(static_cast<std::size_t>(machine.simulation().num_devices()));
  test::run_ranks(machine.simulation().num_devices(),
                  [&](std::shared_ptr<Communicator> host) {
                    const int rank = host->rank();
                    Fate& fate = all[static_cast<std::size_t>(rank)];
                    CudaDevice& device = machine.device(rank);
                    const auto stream = device.make_stream();
                    const auto start = Clock::now();
                    std::vector<Memory> held;
                    std::shared_ptr<Communicator> comm;
                    try {
                      comm = machine.connect(backend, std::move(host));
                      body({*comm, device, machine, *stream, held});
                    } catch (const Error& error) {
                      fate.error = error.what();
                      fate.kind = error.kind();
                    }
                    fate.took = Clock::now() - start;
                    // Nothing on the device waits for peers any more.
                    comm.reset();
                    EXPECT_NO_THROW(device.synchronize(*stream));
                  },
                  {timeout});
  EXPECT_TRUE(wait_until_idle(seconds(20)));  // groups are aborted by a thread of their own
  return all;
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "it says: " << (text)

// One collective of `numel` elements a rank, awaited by the host.
void gather(const Rank& rank, std::size_t numel, std::string_view label) {
  Array<float> data(rank.machine, rank.device, DType::kF32, numel * static_cast<std::size_t>(rank.comm.size()));
  rank.held.push_back(data.memory());
  data.set(rank.stream, 1.0f);
  const comm::Work work = rank.comm.all_gather(data, label, rank.stream);
  work.wait(rank.stream);
  work.wait();
}

Simulation::Options machine_of(int num_devices, unsigned seed = 1) {
  return {.num_devices = num_devices, .seed = seed};
}

TEST(DeviceFailureTest, DifferentCollectivesAreNamedOnEveryRank) {
  Machine machine(machine_of(3));
  const auto all = fates(machine, kLong, [](const Rank& rank) {
    rank.comm.set_activity("step 41");
    gather(rank, 5, "first");
    if (rank.comm.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(100));  // so it learns of it as it calls
      gather(rank, 5, "save_checkpoint");
    } else {
      gather(rank, 7, "gather bucket 7 (layers.3.mlp.*)");
    }
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error, "[comm] ranks are in different collectives: rank 0 is in step 41, gather bucket 7");
    EXPECT_SAYS(fate.error, "rank 2 is in step 41, save_checkpoint [all_gather of 15 fp32");
    EXPECT_LT(fate.took, seconds(5));
  }
  EXPECT_EQ(machine.nccl().num_aborted(), 3);
}

TEST(DeviceFailureTest, APeerThatDoesNotArriveIsNamedAfterTheTimeout) {
  Machine machine(machine_of(3));
  const auto all = fates(machine, milliseconds(300), [](const Rank& rank) {
    rank.comm.set_activity("step 3");
    gather(rank, 5, "first");
    if (rank.comm.rank() == 1) return std::this_thread::sleep_for(seconds(2));
    gather(rank, 5, "gather bucket 2");
  });
  for (int rank : {0, 2}) {
    const Fate& fate = all[static_cast<std::size_t>(rank)];
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error, "rank 1 ");
    EXPECT_LT(fate.took, seconds(2));
  }
  EXPECT_GE(machine.nccl().num_aborted(), 2);
}

TEST(DeviceFailureTest, APeerThatLeavesIsQuoted) {
  Machine machine(machine_of(2));
  const auto all = fates(machine, kLong, [](const Rank& rank) {
    gather(rank, 5, "first");
    if (rank.comm.rank() == 1) {
      return rank.comm.leave(comm::Departure::kFailed, "raised ValueError: no", milliseconds(100));
    }
    gather(rank, 5, "second");
  });
  EXPECT_SAYS(all[0].error, "rank 1 has left (raised ValueError: no)");
  EXPECT_LT(all[0].took, seconds(5));
}

// Found as it is called, or by who watches it.
TEST(DeviceFailureTest, AnAsynchronousErrorEndsAllRanks) {
  for (bool late : {false, true}) {
    for (unsigned seed : {0u, 1u, 2u, 3u}) {
      Machine machine(machine_of(3, seed));
      const auto all = fates(machine, kLong, [late](const Rank& rank) {
        gather(rank, 5, "first");
        const auto group = rank.comm.split(0, rank.comm.rank());
        rank.comm.barrier("all are connected").wait();
        rank.machine.simulation().hang(true);
        const auto fail = [&] {
          if (rank.comm.rank() == 1) rank.machine.nccl().fail_asynchronously(1);
        };
        Array<float> data(rank.machine, rank.device, DType::kF32, 15);
        rank.held.push_back(data.memory());
        if (!late) fail();
        const comm::Work work = group->all_gather(data, "gather bucket 7", rank.stream);
        if (late) fail();
        work.wait();
      });
      for (const Fate& fate : all) {
        EXPECT_EQ(fate.kind, ErrorKind::kComm);
        EXPECT_SAYS(fate.error, "remote process exited or there was a network error");
        EXPECT_LT(fate.took, seconds(5));
      }
      EXPECT_SAYS(all[1].error, "on cuda:1 (a fake failure)");
      EXPECT_SAYS(all[1].error, "gather bucket 7");
      EXPECT_EQ(machine.nccl().num_aborted(), 6);  // of both groups
    }
  }
}

TEST(DeviceFailureTest, ADeviceThatHangsIsGivenUpAfterTheTimeout) {
  Machine machine(machine_of(2));
  const auto all = fates(machine, milliseconds(300), [](const Rank& rank) {
    gather(rank, 5, "first");
    rank.comm.barrier("all have").wait();
    rank.machine.simulation().hang(true);
    gather(rank, 5, "gather bucket 7");
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_LT(fate.took, seconds(3));
    EXPECT_SAYS(fate.error, "timed out after 0.3 s in all_gather \"gather bucket 7\"");
  }
}

TEST(DeviceFailureTest, AFailedDeviceEndsAllRanks) {
  for (const char* backend : {"nccl", "staged"}) {
    Machine machine(machine_of(2));
    const auto all = fates(
        machine, kLong,
        [](const Rank& rank) {
          gather(rank, 5, "first");
          rank.comm.barrier("all have").wait();
          rank.machine.simulation().fail(true);
          gather(rank, 5, "gather bucket 7");
        },
        backend);
    for (const Fate& fate : all) {
      EXPECT_SAYS(fate.error, "the device has failed");
      EXPECT_LT(fate.took, seconds(5));
    }
  }
}

TEST(DeviceFailureTest, ACallThatNcclRefusesEndsAllRanks) {
  Machine machine(machine_of(2));
  const auto all = fates(machine, kLong, [](const Rank& rank) {
    gather(rank, 5, "first");
    rank.comm.barrier("all have").wait();
    if (rank.comm.rank() == 0) rank.machine.nccl().refuse_calls(0);
    gather(rank, 5, "gather bucket 7");
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error, "NCCL reports \"unhandled cuda error\" for ncclAllGather on cuda:0");
    EXPECT_LT(fate.took, seconds(5));
  }
}

TEST(DeviceFailureTest, RanksThatCannotBeConnectedAllLearnOfIt) {
  Machine machine(machine_of(3));
  machine.nccl().refuse_to_connect(1);
  const auto all = fates(machine, kLong, [](const Rank&) { ADD_FAILURE() << "connected"; });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error, "unhandled cuda error");
    EXPECT_LT(fate.took, seconds(5));
  }
}

TEST(DeviceFailureTest, AfterAFailureEveryGroupFailsAtOnceWithTheFirstReason) {
  Machine machine(machine_of(2));
  const auto all = fates(machine, kLong, [](const Rank& rank) {
    const auto group = rank.comm.split(0, rank.comm.rank());
    const Error first = test::error_of([&] { gather(rank, 5, rank.comm.rank() == 0 ? "one" : "other"); });
    expect_contains(first, "different collectives");
    gather({*group, rank.device, rank.machine, rank.stream, rank.held}, 5, "later");
  });
  for (const Fate& fate : all) {
    EXPECT_SAYS(fate.error, "different collectives");
    EXPECT_LT(fate.took, seconds(5));
  }
}

TEST(DeviceFailureTest, AGroupMayGoWhileItsCollectivesAreInFlight) {
  for (unsigned seed : {0u, 1u, 2u, 3u}) {
    Machine machine(machine_of(2, seed));
    machine.run("nccl", [&](Communicator& comm, CudaDevice& device) {
      const auto stream = device.make_stream();
      Array<float> shard(machine, device, DType::kF32, 100);
      comm::Work last;
      {
        const auto group = comm.split(0, comm.rank());
        Array<float> bucket(machine, device, DType::kF32, 200);
        bucket.set(*stream, 1.0f);
        last = group->reduce_scatter_add(bucket, shard, "last", true, *stream);
        last.keep(std::make_shared<Memory>(bucket.memory()));
      }
      last.wait();
      EXPECT_EQ(shard.get(*stream), std::vector<float>(100, 2.0f));
    });
  }
}

// --- Finding NCCL

TEST(NcclTest, ALibraryThatIsNowhereIsNamedWithAllPlaces) {
  const Error error = test::error_of([] { open_nccl("libzc_no_such.so.2", "/nowhere/libnccl.so.2"); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  expect_contains(error, "libzc_no_such.so.2: not loaded by this process");
  expect_contains(error, "/nowhere/libnccl.so.2: ");
  expect_contains(error, "Install torch with CUDA");
}

TEST(NcclTest, ALibraryThatIsAnotherIsNamed) {
  const Error error = test::error_of([] { open_nccl("libm.so.6", ""); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  expect_contains(error, "libm.so.6");
  expect_contains(error, "has no ncclGetVersion");
}

TEST(NcclTest, AnOldVersionIsRefused) {
  NcclApi api;
  api.get_version = [](int* version) {
    *version = 21703;
    return 0;
  };
  const Error error = test::error_of([&] { check_nccl_version(api, "some file"); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  expect_contains(error, "got 2.17.3 (some file), expected 2.27.3 or later");
  api.get_version = [](int* version) {
    *version = 22703;
    return 0;
  };
  check_nccl_version(api, "some file");
  EXPECT_EQ(api.description, "NCCL 2.27.3 (some file)");
}

TEST(NcclTest, RanksThatShareADeviceAreFound) {
  for (bool same : {false, true}) {
    Machine machine({.num_devices = 2, .same_device = same});
    test::run_ranks(2, [&](std::shared_ptr<Communicator> host) {
      CudaDevice& device = machine.device(host->rank());
      EXPECT_EQ(ranks_share_a_device(*host, device), same);
      if (same) {
        EXPECT_STREQ(make_device_communicator(std::move(host), device, "")->backend(), "staged");
      }
    });
  }
}

}  // namespace
}  // namespace zc::cuda
