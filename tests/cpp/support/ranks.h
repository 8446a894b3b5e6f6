// Runs a function as every rank of a local world, one thread a rank.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/comm/local_transport.h"

namespace zc::test {

// Rethrows the first failure after all ranks have ended.
inline void run_ranks(int size, const std::function<void(std::shared_ptr<comm::Communicator>)>& body,
                      comm::Options options = {std::chrono::seconds(20)}) {
  auto world = comm::make_local_world(size, options);
  std::vector<std::exception_ptr> failures(world.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(world[rank]);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace zc::test
